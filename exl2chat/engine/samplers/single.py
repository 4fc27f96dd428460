"""What changes the logits of single tokens, and which tokens take part at all."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from exl2chat.engine import penalties
from exl2chat.engine.samplers.candidates import Candidates
from exl2chat.engine.samplers.dry import Passages
from exl2chat.errors import ChatError
from exl2chat.settings import Sampling


class SingleTokens:
    """Penalties, then the bias, then DRY, for one conversation; tokens that are banned or not allowed are left out.

    Ids that the model lacks have no effect.
    """

    def __init__(self, settings: Sampling, breakers: frozenset[int], tokens: Iterable[int]) -> None:
        tokens = list(tokens)
        self._settings = settings
        self._window: penalties.PenaltyWindow | None = None
        if penalties.active(settings):
            self._window = penalties.PenaltyWindow(settings.penalty_range, settings.penalty_decay, tokens)
        self._passages = Passages(settings, breakers, tokens) if settings.dry_multiplier else None
        bias = dict(settings.logit_bias)
        self._bias = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float64)
        self._size = -1
        self._ids = np.zeros(0, np.int64)

    def apply(self, logits: NDArray[np.float32]) -> Candidates:
        """The candidates among `logits` [V], which are left as they are. ChatError when there are none."""
        size = len(logits)
        if self._window is not None:
            logits = penalties.penalize(logits, self._window.seen(), self._settings)
        if self._settings.logit_bias:
            logits = _added(logits, *self._bias)
        if self._passages is not None:
            ids, amounts = self._passages.penalties()
            logits = _added(logits, ids, -amounts)
        if self._size != size:
            self._size, self._ids = size, self._drawable(size)
        return Candidates(logits if len(self._ids) == size else logits[self._ids], self._ids)

    def observe(self, token: int) -> None:
        """`token` has become part of the sequence."""
        if self._window is not None:
            self._window.push(token)
        if self._passages is not None:
            self._passages.push(token)

    def _drawable(self, size: int) -> NDArray[np.int64]:
        """The ids below `size` that the settings allow and do not ban, ascending."""
        settings = self._settings
        drawable = np.ones(size, bool)
        if settings.allowed_tokens is not None:
            allowed = np.array(settings.allowed_tokens, np.int64)
            drawable[:] = False
            drawable[allowed[allowed < size]] = True
        banned = np.array(settings.banned_tokens, np.int64)
        drawable[banned[banned < size]] = False
        if not drawable.any():
            raise ChatError("no token may be drawn", "ban fewer tokens or allow more")
        return np.flatnonzero(drawable)


def _added(logits: NDArray[np.float32], ids: NDArray[np.int64], amounts: NDArray[np.float64]) -> NDArray[np.float32]:
    """A copy of `logits` [V] with `amounts` [n] added at the distinct `ids` [n] that are below V."""
    changed = logits.copy()
    known = ids < len(logits)
    changed[ids[known]] += amounts[known]
    return changed
