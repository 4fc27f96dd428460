"""Jobs on a small real model, and what the streaming generator makes of them."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from exl2chat.engine.cache import PAGE
from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.generators.streaming import StreamingGenerator
from exl2chat.engine.replies.jobs import Final, Job, Result, Streamed
from exl2chat.engine.scheduler import Limits
from exl2chat.engine.transformer import Transformer
from exl2chat.settings import Sampling
from tests.engine.tiny_models import ByteTokenizer, byte_model

GREEDY = Sampling(temperature=0)
LIMITS = Limits(batch=8, queue=100, chunk=64)
SETTINGS = (
    GREEDY,
    Sampling(temperature=1.0, top_p=1.0, seed=3),
    Sampling(temperature=0.8, top_k=20, seed=4, repetition_penalty=1.3),
    Sampling(temperature=1.2, mirostat_tau=3.0, seed=5, dry_multiplier=0.8, dry_breakers=(), xtc_ignore_tokens=()),
)


def generator(pages: int = 16, limits: Limits = LIMITS) -> DynamicGenerator:
    model = byte_model()
    return DynamicGenerator(model, model.new_cache(pages * PAGE), ByteTokenizer(), limits)  # type: ignore[arg-type]


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(32, 127, length).tolist())


def job(ids: Sequence[int], count: int, sampling: Sampling = GREEDY, **more: object) -> Job:
    return Job((tuple(ids),), count, sampling, **more)  # type: ignore[arg-type]


def streamed(
    ids: Sequence[int], count: int, sampling: Sampling = GREEDY, model: Transformer | None = None
) -> list[int]:
    """What the streaming generator replies."""
    model = model or byte_model()
    subject = StreamingGenerator(model, model.new_cache(1024), ByteTokenizer())  # type: ignore[arg-type]
    subject.set_stop_conditions([])
    subject.begin_stream_ex(list(ids), sampling, max_new_tokens=count)
    while not subject.stream_ex().eos:
        pass
    return subject.tokens[len(ids) :]


def nothing(step: int) -> None:
    """What happens before a step."""


def drain(subject: DynamicGenerator, act: Callable[[int], None] = nothing) -> list[Result]:
    """All results until no job is left; act(step) is called before each step."""
    results: list[Result] = []
    for step in itertools.count():
        act(step)
        if not subject.remaining:
            break
        results += subject.iterate()
    return results


def written(subject: DynamicGenerator, ids: Sequence[int], count: int) -> list[int]:
    """The tokens of one job that runs alone."""
    serial = subject.enqueue(job(ids, count))
    return reply(drain(subject), serial)


def reply(results: list[Result], serial: int) -> list[int]:
    """The tokens of a job."""
    streams = [result for result in results if isinstance(result, Streamed) and result.serial == serial]
    return [token.id for result in streams for token in result.tokens]


def final(results: list[Result], serial: int) -> Final:
    return next(r.final for r in results if isinstance(r, Streamed) and r.serial == serial and r.final)


def text(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")
