"""Repetition, presence and frequency penalties over a sliding window of tokens, kept up to date in O(1) per token."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from exl2chat.settings import Sampling

Floats = NDArray[np.float32] | NDArray[np.float64]
FIRST_SLOTS = 256


class Seen(NamedTuple):
    """The distinct tokens of the window: all arrays are [D].

    `recency` is the strength at which the latest occurrence counts, 1 inside the range and fading to 0; `occurrences`
    sums the strengths of all of them.
    """

    ids: NDArray[np.int64]
    recency: NDArray[np.float64]
    occurrences: NDArray[np.float64]


class PenaltyWindow:
    """The tokens that penalties look at: the last `reach` (-1: all) at full strength, `decay` more fading.

    A token at distance d from the newest (itself at 0) has strength 1 for d < reach, 1 - (d - reach) / decay up to
    d = reach + decay, and 0 from there. The fading occurrences of a token at positions q sum to a linear function of
    their number and of the sum of q, so that a push moves at most three counts whatever the length of the window.
    """

    def __init__(self, reach: int, decay: int, tokens: Iterable[int] = ()) -> None:
        self._reach, self._decay = reach, decay
        self._tokens: list[int] = []
        self._slots: dict[int, int] = {}
        self._ids = np.zeros(FIRST_SLOTS, np.int64)
        self._counts = np.zeros((4, FIRST_SLOTS), np.float64)
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        """Append `token` to the window."""
        slot = self._slot(token)
        full, fading, positions, latest = self._counts
        newest = len(self._tokens)
        self._tokens.append(token)
        full[slot] += 1
        latest[slot] = newest
        if self._reach < 0:
            return
        if (leaving := newest - self._reach) >= 0:
            slot = self._slots[self._tokens[leaving]]
            full[slot] -= 1
            if self._decay:
                fading[slot] += 1
                positions[slot] += leaving
        if self._decay and (gone := newest - self._reach - self._decay) >= 0:
            slot = self._slots[self._tokens[gone]]
            fading[slot] -= 1
            positions[slot] -= gone

    def _slot(self, token: int) -> int:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)), axis=1)
        self._ids[slot] = token
        return slot

    def seen(self) -> Seen:
        """The window as it stands."""
        used = len(self._slots)
        full, fading, positions, latest = self._counts[:, :used]
        beyond = len(self._tokens) - 1 - self._reach
        if self._reach < 0:
            recency = np.ones(used)
            occurrences = full.copy()
        elif self._decay:
            recency = np.clip(1 - (beyond - latest) / self._decay, 0, 1)
            occurrences = full + fading * (1 - beyond / self._decay) + positions / self._decay
        else:
            recency = (latest > beyond).astype(np.float64)
            occurrences = full.copy()
        return Seen(self._ids[:used].copy(), recency, occurrences)


def repetition(logits: Floats, seen: Seen, value: float) -> Floats:
    """Positive logits are divided by the penalty, others multiplied; a penalty that fades approaches 1."""
    strength = 1 + (value - 1) * seen.recency
    return np.where(logits > 0, logits / strength, logits * strength)


def presence(logits: Floats, seen: Seen, value: float) -> Floats:
    """Subtracted once from every token in the window."""
    return logits - value * seen.recency


def frequency(logits: Floats, seen: Seen, value: float) -> Floats:
    """Subtracted for every occurrence in the window."""
    return logits - value * seen.occurrences


@dataclass(frozen=True, slots=True)
class Penalty:
    """A row: the field of `Sampling`, the value that changes nothing, and the function of the logits [D] of `Seen`."""

    name: str
    neutral: float
    apply: Callable[[Floats, Seen, float], Floats]


PENALTIES = (
    Penalty("repetition_penalty", 1.0, repetition),
    Penalty("presence_penalty", 0.0, presence),
    Penalty("frequency_penalty", 0.0, frequency),
)


def active(settings: Sampling) -> bool:
    """True when a penalty would change anything."""
    return any(getattr(settings, row.name) != row.neutral for row in PENALTIES) and (
        settings.penalty_range != 0 or settings.penalty_decay > 0
    )


def penalize(logits: NDArray[np.float32], seen: Seen, settings: Sampling) -> NDArray[np.float32]:
    """A copy of `logits` [V] with the penalties of `settings` applied to the tokens of `seen`, in table order. Ids of
    V and more are no tokens."""
    known = seen.ids < len(logits)
    seen = seen if known.all() else Seen(seen.ids[known], seen.recency[known], seen.occurrences[known])
    penalized = logits.copy()
    values: Floats = penalized[seen.ids]
    for row in PENALTIES:
        value: float = getattr(settings, row.name)
        if value != row.neutral:
            values = row.apply(values, seen, value)
    penalized[seen.ids] = values
    return penalized
