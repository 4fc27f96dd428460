"""Decoding steps kept in flight on a device that draws its tokens itself."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from exl2chat.engine.cache import KVCache
from exl2chat.errors import ChatError
from exl2chat.settings import Sampling

# Steps that are queued or running while a token is read: 2 hide what the host takes for one (8B on an H200: 2.18 to
# 1.91 ms), and one more a host that is late by a step. A stop wastes all but one of them.
DEPTH = 3

Take = Callable[[], int]


def checked(token: int) -> int:
    """A token that a device drew. ChatError for -1: the logits were not numbers."""
    if token < 0:
        raise ChatError("the model computed logits that are not numbers", "try --dtype float32")
    return token


class Steps(Protocol):
    """Decoding steps on a device, each of which begins with the token that the one before drew."""

    def start(self, tokens: Sequence[int], settings: Sampling) -> None:
        """Go on after `tokens`, of which the cache holds the first. `settings.seed` is not None."""

    def queue(self) -> Take:
        """One more step. What comes back waits for its token, which is -1 where the logits are not numbers."""


class DeviceDecoder:
    """Draws tokens on a device, which never waits for the host to have read a token.

    The cache holds what was read (`cache.length`). The steps ahead of that have written behind its end, where nothing
    reads, and what uses the cache next overwrites it: all work on a cache is queued on one stream.
    """

    def __init__(self, steps: Steps, cache: KVCache, settings: Sampling, longest: int) -> None:
        """The sequence gets `longest` tokens at most: no step is queued that would draw more. settings.seed is not
        None."""
        self._steps, self._cache, self._settings, self._longest = steps, cache, settings, longest
        self._flying: deque[Take] = deque()
        self._length: int | None = None  # of the cache, as the last token left it

    def next(self, tokens: Sequence[int]) -> int:
        """The token after `tokens`. The cache held the first of them, then it holds them all. ChatError when the logits
        are not numbers."""
        # else it is the first token, or the first since a failure or another's use, or asked for again
        if not self._length == self._cache.length == len(tokens) - 1:
            self._flying.clear()
            self._steps.start(tokens, self._settings)
        self._length = None
        while len(self._flying) < min(DEPTH, self._longest - len(tokens)):
            self._flying.append(self._steps.queue())
        token = checked(self._flying.popleft()())
        self._length = self._cache.length = len(tokens)
        return token

    def interrupt(self) -> None:
        """The next token comes from somebody else: the steps in flight are of no use."""
        self._length = None
