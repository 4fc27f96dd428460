"""DRY, don't repeat yourself (Weidmann 2024, text-generation-webui): against repeating whole passages."""

from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from exl2chat.settings import Sampling

# A token 100 nats less likely is never drawn. More would say no more, and distort the deviation for top-n-sigma.
HEAVIEST = 100.0


class Passages:
    """The tokens of one conversation, and which of them would go on repeating what was said before.

    A breaker is part of no passage: no match reaches across one, and none is penalised. There is no other state than
    the tokens, so that a conversation that was edited is simply another one.
    """

    def __init__(self, settings: Sampling, breakers: frozenset[int], tokens: Iterable[int]) -> None:
        self._settings, self._breakers = settings, breakers
        self._tokens = array("q", tokens)

    def push(self, token: int) -> None:
        """Append `token` to the conversation."""
        self._tokens.append(token)

    def penalties(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Distinct ids [n] and what to subtract from their logits [n]: multiplier * base^(length - allowed length) for
        a token that followed the same last `length` tokens before, where length is the longest such, at most
        `dry_max_length` and at least the allowed length. 100 at most.
        """
        settings = self._settings
        tokens = np.frombuffer(self._tokens, np.int64)[-settings.dry_range :]  # no limit: from -0, the first
        following, lengths = repeats(tokens, self._breakers, settings.dry_max_length)
        long = lengths >= settings.dry_allowed_length
        ids, where = np.unique(following[long], return_inverse=True)
        longest = np.zeros(len(ids))
        np.maximum.at(longest, where, lengths[long])
        penalised = np.array([int(token) not in self._breakers for token in ids], bool)
        with np.errstate(over="ignore"):
            amounts = settings.dry_multiplier * settings.dry_base ** (longest - settings.dry_allowed_length)
        return ids[penalised], np.minimum(amounts, HEAVIEST)[penalised]


def repeats(
    tokens: NDArray[np.int64], breakers: frozenset[int], longest: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tokens [n] that followed an earlier occurrence of the end of `tokens` [T], and how many tokens match there.

    One pass over T for the last token, then one over the matches for each token further back: 0.05 ms for T = 8192.
    """
    if not len(tokens) or int(tokens[-1]) in breakers:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    lengths = np.ones(len(ends), np.int64)
    alive = np.arange(len(ends))
    for length in range(1, min(longest, len(tokens))):
        previous = tokens[-1 - length]
        if int(previous) in breakers:
            break
        alive = alive[ends[alive] >= length]
        alive = alive[tokens[ends[alive] - length] == previous]
        if not len(alive):
            break
        lengths[alive] += 1
    return tokens[ends + 1], lengths
