"""Decoding steps kept in flight on a device that draws its tokens itself."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from exl2chat.engine.cache import KVCache
from exl2chat.engine.device_steps import RESULTS, Steps, Take
from exl2chat.engine.drafting import common_prefix
from exl2chat.engine.paced_drafts import PacedDrafts
from exl2chat.errors import ChatError
from exl2chat.settings import Sampling

# Steps that are queued or running while a token is read: 2 hide what the host takes for one (8B on an H200: 2.18 to
# 1.91 ms), and one more a host that is late by a step. A stop wastes all but one of them.
DEPTH = 3


def checked(token: int) -> int:
    """A token that a device drew. ChatError for -1: the logits were not numbers."""
    if token < 0:
        raise ChatError("the model computed logits that are not numbers", "try --dtype float32")
    return token


class _Flight(NamedTuple):
    """A step that was queued."""

    drafts: Sequence[int]
    take: Take


class DeviceDecoder:
    """Draws tokens on a device, which never waits for the host to have read a token, but where there are drafts: when
    their drafter has an idea, no more steps are queued. What is in flight is right in any case, and shows what the idea
    was worth; then a step with drafts is queued, alone.

    The cache holds what was read (`cache.length`). The steps ahead of that have written behind its end, where nothing
    reads, and what uses the cache next overwrites it: all work on a cache is queued on one stream.
    """

    def __init__(
        self,
        steps: Steps,
        cache: KVCache,
        settings: Sampling,
        longest: int,
        drafts: PacedDrafts,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """The sequence gets `longest` tokens at most: no step is queued that would draw more. settings.seed is not
        None. No drafts where there are penalties."""
        self._steps, self._cache, self._settings, self._longest = steps, cache, settings, longest
        self._drafts, self._clock = drafts, clock
        self._flying: deque[_Flight] = deque()
        self._known: list[int] = []  # the sequence, with tokens that have arrived and that nobody has asked for yet
        self._drafted = 0  # up to here these are drafts
        self._arrived: float | None = None  # when the last of them did; none since the start
        self._length: int | None = None  # of the cache, as the last token left it

    def next(self, tokens: Sequence[int]) -> int:
        """The token after `tokens`. The cache held the first of them, then it holds them all. ChatError when the logits
        are not numbers."""
        # else it is the first token, or the first since a failure or another's use, or asked for again
        if not self._length == self._cache.length == len(tokens) - 1:
            self._start(tokens)
        self._length = None
        if len(self._known) == len(tokens):
            self._go_on()
            self._arrive()
        if len(tokens) < self._drafted:
            self._drafts.accept()
        self._length = self._cache.length = len(tokens)
        return self._known[len(tokens)]

    def interrupt(self) -> None:
        """The next token comes from somebody else: the steps in flight are of no use."""
        self._length = None

    def _start(self, tokens: Sequence[int]) -> None:
        self._flying.clear()
        self._known, self._drafted, self._arrived = list(tokens), 0, None
        self._steps.start(tokens, self._settings)

    def _go_on(self) -> None:
        """Queue what comes next: nothing behind a round, nor behind steps for whose end an idea is waiting."""
        left = self._longest - len(self._known)
        room = min(left, RESULTS) - 1
        if self._flying and (self._flying[0].drafts or self._drafts.expected(self._known, room)):
            return
        # the first step's time is unknown, as it waits for the prompt: no drafts before the second
        ready = not self._flying and self._arrived is not None
        drafts = self._drafts.propose(self._known, room) if ready else []
        if ready:
            self._steps.follow(self._known)
        if drafts:
            self._flying.append(_Flight(drafts, self._steps.queue(drafts)))
        while not drafts and len(self._flying) < min(DEPTH, left):
            self._flying.append(_Flight((), self._steps.queue()))

    def _arrive(self) -> None:
        """Wait for what is in flight the longest. Where nothing is after it, go on before anybody asks."""
        drafts, take = self._flying.popleft()
        drawn = take()
        now = self._clock()
        right = common_prefix(drawn, drafts)
        checked(drawn[right])
        self._drafted = len(self._known) + right
        self._known += drawn[: right + 1]
        if self._arrived is not None:  # from one arrival to the next, so that a round counts what it waited for too
            self._drafts.took(len(drafts), right, now - self._arrived)
        self._arrived = now
        if not self._flying:
            self._go_on()
