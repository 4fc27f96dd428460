"""Logits computed before it is certain that they are needed, several rows at a time.

The sampler takes no part in it. It draws every token of a reply from the logits of the tokens before it, as it does
without drafts, with noise that depends on nothing but seed, position and token. A guess that the next tokens will be
these computes the logits after each of them in one step; as long as the sampler does draw them, the logits are there.
So the reply for a seed is the same with and without drafts, whatever they are, at every temperature, with every
setting, constraint or stop condition, as far as the logits of a token are the same in a step of one row and of several.

kernels/gemv.cu is made to give the same bits for up to 8 rows. The products of torch on the CPU do not: measured logits
of SmolLM2 135M after random tokens differ by up to 2e-3 in float32, so that a token whose lead is smaller than that may
come out differently, and by up to 1.5 in bfloat16 (7 from five rows on), where replies may part sooner or later.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from exl2chat.engine.cache import KVCache
from exl2chat.engine.paced_drafts import PacedDrafts
from exl2chat.engine.step_logits import StepLogits


class SpeculativeLogits:
    """The logits of one reply, like those of `StepLogits`, computed in rounds: a step with drafts, and then what the
    step left for as long as they come true."""

    def __init__(self, steps: StepLogits, cache: KVCache, drafts: PacedDrafts, longest: int) -> None:
        """The sequence gets `longest` tokens at most: no draft is made for what lies beyond, or beyond the cache."""
        self._steps, self._cache, self._paced = steps, cache, drafts
        self._longest = min(longest, cache.capacity)
        self._rows = torch.empty(0, 0)
        self._drafts: list[int] = []
        self._start = 0  # length of the sequence at the round's step
        self._length = -1  # of the cache, as it was left
        self._started: float | None = None  # when the step began that is queued
        self._seconds: float | None = None  # what it took

    def queue(self, tokens: Sequence[int]) -> None:
        """Have the logits of what follows `tokens`. The cache held the first of them, then it holds them all."""
        if self._came_true(tokens):
            self._paced.accept()
        else:
            self._begin_round(tokens)
        self._cache.length = self._length = len(tokens)

    def take(self) -> NDArray[np.float32]:
        """The logits [V] that were asked for, until the next step."""
        logits = self._steps.on_host(self._rows[self._length - self._start])
        if self._started is not None:
            self._seconds = time.perf_counter() - self._started
            self._started = None
        return logits

    def _came_true(self, tokens: Sequence[int]) -> bool:
        """Whether `tokens` goes on where this round was left, with the token that was drafted there."""
        at = len(tokens) - self._start - 1
        goes_on = self._cache.length == self._length == len(tokens) - 1
        return goes_on and 0 <= at < len(self._drafts) and tokens[-1] == self._drafts[at]

    def _begin_round(self, tokens: Sequence[int]) -> None:
        """Tell how the last round ended, and queue the step of the next."""
        if self._seconds is not None:
            self._paced.took(len(self._drafts), self._length - self._start, self._seconds)
        self._drafts, self._length, self._seconds = [], -1, None  # until the step is queued
        self._started = time.perf_counter()
        drafts = self._propose(tokens)
        self._rows = self._steps.rows(tokens, drafts)
        self._start, self._drafts = len(tokens), drafts

    def _propose(self, tokens: Sequence[int]) -> list[int]:
        """Drafts, unless more than the last token is yet to be read."""
        if self._cache.length < len(tokens) - 1:
            return []
        return self._paced.propose(tokens, self._longest - len(tokens) - 1)
