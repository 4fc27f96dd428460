"""What scripts ask of the generators, as the engine is asked: settings, filters, prompts."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Event
from typing import Any

from torch import Tensor

from exl2chat.engine.constraints import Constraint
from exl2chat.engine.generators.jobs import Choice
from exl2chat.errors import UsageError
from exl2chat.exllamav2.generator.filters import constraint_of
from exl2chat.exllamav2.generator.hooks import engine_hook
from exl2chat.exllamav2.generator.sampler import ExLlamaV2Sampler
from exl2chat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exl2chat.settings import Sampling

Hooks = tuple[Callable[[Choice], None], ...]


def engine_settings(settings: ExLlamaV2Sampler.Settings, seed: int | None) -> tuple[Sampling, float | None, Hooks]:
    """The engine's settings, guidance and hooks. Without a seed one comes from Python's `random`, so that
    `random.seed(n)` makes replies repeat."""
    plain = replace(settings, cfg_scale=None, post_sampling_hooks=[])
    sampling = plain.sampling(random.getrandbits(63) if seed is None else seed)
    return sampling, settings.cfg_scale, tuple(map(engine_hook, settings.post_sampling_hooks))


def engine_constraint(filters: Sequence[Any] | None, tokenizer: ExLlamaV2Tokenizer) -> Constraint | None:
    """All filters at once, of which every job has copies of its own. None without filters."""
    return constraint_of(tokenizer, filters or ())


def row_of(ids: Tensor) -> tuple[int, ...]:
    """A prompt [1, n] or [n]. UsageError for a batch."""
    if ids.dim() > 2 or (ids.dim() == 2 and ids.shape[0] != 1):
        raise UsageError(f"input_ids has shape {list(ids.shape)}", "it is [1, n]: a job has one row")
    return tuple(ids.flatten().tolist())


def is_set(event: Event | None) -> Callable[[], bool]:
    """Whether an event that may be missing is set."""
    return lambda: event is not None and event.is_set()
