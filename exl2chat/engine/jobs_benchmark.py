"""How fast the dynamic generator writes many replies at once, and how soon a cached conversation goes on."""

import time
from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np

from exl2chat.engine.cache import PAGE, KVCache
from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.replies.jobs import Job, Streamed
from exl2chat.engine.reply_benchmark import OneLetter
from exl2chat.engine.transformer import Transformer
from exl2chat.ops.kernel_benchmark import KernelRow
from exl2chat.progress import Progress
from exl2chat.settings import Sampling

PROMPT = 128
WARM_UP, STEPS = 8, 40
LONGEST = PAGE - PROMPT  # tokens of a reply: each job has one page
CONVERSATION, TURN, ROUNDS = 4096, 24, 5
ROOM = CONVERSATION + PAGE  # tokens of a cache for a conversation and its next turn


def measure_jobs(
    model: Transformer, cache: KVCache, counts: Sequence[int], bandwidth: float, progress: Progress
) -> list[KernelRow]:
    """The median time of a step in which so many jobs get a token each, drawn with top-k and top-p after prompts of
    PROMPT tokens, beside a read of the weights and of all their caches at `bandwidth`. `cache`: a page for each."""
    subject = DynamicGenerator(model, cache, OneLetter())  # type: ignore[arg-type]
    subject.warm_up()
    prompts = _prompts(model.config.vocab_size, PROMPT)
    result = []
    for count in counts:
        name = _name(count)
        progress(name)
        seconds = _step_seconds(subject, [next(prompts) for _ in range(count)])
        seen = cache.storage[..., 0, 0, :].nbytes * PROMPT * count
        ceiling = (model.weights.read_bytes + seen) / bandwidth
        result.append(
            KernelRow(name, count, seconds * 1e6, ceiling * 1e6, "a read of the weights and the cache", _name(1))
        )
    return result


def measure_turns(
    model: Transformer, cache: KVCache, ceilings: tuple[float, float], progress: Progress
) -> list[KernelRow]:
    """The median time to the first token of a conversation of CONVERSATION tokens that nobody has seen, and to that of
    its next turn after a reply and TURN more. ceilings: seconds of the prompt's products and attention, and of a step.
    `cache` has ROOM."""
    progress(f"first token of {CONVERSATION} tokens")
    subject = DynamicGenerator(model, cache, OneLetter())  # type: ignore[arg-type]
    prompts, turns = _prompts(model.config.vocab_size, CONVERSATION), _prompts(model.config.vocab_size, TURN)
    cold, cached = [], []
    for prompt, turn in zip((next(prompts) for _ in range(1 + ROUNDS)), turns, strict=False):
        seconds, reply = _first_token(subject, prompt)
        cold.append(seconds)
        cached.append(_first_token(subject, (*prompt, *reply, *turn))[0])
    first = f"first token of {CONVERSATION} tokens"
    products, step = (ceiling * 1e6 for ceiling in ceilings)
    return [
        KernelRow(first, CONVERSATION, median(cold[1:]) * 1e6, products, "torch.mm and torch's attention"),
        KernelRow(
            f"first token of its next turn, {TURN} tokens", TURN, median(cached[1:]) * 1e6, step,
            "a read of the weights and the cache", first,
        ),
    ]  # fmt: skip


def _name(jobs: int) -> str:
    return f"{jobs} {'job' if jobs == 1 else 'jobs'} at context {PROMPT}"


def _prompts(vocabulary: int, length: int) -> Iterator[tuple[int, ...]]:
    """Prompts of random tokens."""
    random = np.random.default_rng(1)
    while True:
        yield tuple(random.integers(vocabulary, size=length).tolist())


def _job(prompt: tuple[int, ...], longest: int, seed: int = 1) -> Job:
    return Job((prompt,), longest, Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=seed))


def _step_seconds(subject: DynamicGenerator, prompts: Sequence[tuple[int, ...]]) -> float:
    """Seconds of a step once every prompt is read."""
    waiting = {subject.enqueue(_job(prompt, LONGEST, seed)) for seed, prompt in enumerate(prompts)}
    while waiting:
        waiting -= {result.serial for result in subject.iterate() if isinstance(result, Streamed)}
    seconds = []
    for _ in range(WARM_UP + STEPS):
        started = time.perf_counter()
        subject.iterate()
        seconds.append(time.perf_counter() - started)
    subject.clear()
    return median(seconds[WARM_UP:])


def _first_token(subject: DynamicGenerator, prompt: tuple[int, ...]) -> tuple[float, list[int]]:
    """Seconds until a reply to `prompt` begins, and the reply."""
    started = time.perf_counter()
    subject.enqueue(_job(prompt, TURN))
    first, reply = 0.0, []
    while subject.remaining:
        for result in subject.iterate():
            if isinstance(result, Streamed):
                first = first or time.perf_counter() - started
                reply += [token.id for token in result.tokens]
    return first, reply
