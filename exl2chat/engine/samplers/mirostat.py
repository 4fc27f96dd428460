"""Mirostat 2.0 (Basu et al. 2021, arXiv 2007.14966): a limit on surprise, moved by the surprise of what was drawn."""

import math

import numpy as np

from exl2chat.engine.samplers.candidates import Candidates


def mirostat(candidates: Candidates, limit: float) -> Candidates:
    """Those whose surprise -log2(probability) is at most `limit` bits, and the best in any case."""
    logits = candidates.logits
    best = logits.max()
    bits = math.log2(np.exp(logits - best).sum(dtype=np.float64))  # the surprise of the best
    return candidates.keep(np.flatnonzero(logits >= best + np.float32(min((bits - limit) * math.log(2), 0))))


class Target:
    """The limit for the next token of one reply, which keeps the mean surprise near `bits`.

    `limit` begins at twice `bits` unless `start` is given; `rate` is how far an error of one bit moves it.
    """

    def __init__(self, bits: float, rate: float, start: float | None) -> None:
        self._bits, self._rate = bits, rate
        self.limit = 2 * bits if start is None else start

    def observe(self, offered: Candidates, token: int) -> None:
        """`token` was drawn after a truncation of `offered`, by whose probabilities its surprise counts."""
        best = float(offered.logits.max())
        total = best + math.log(np.exp(offered.logits - best).sum(dtype=np.float64))
        surprise = (total - float(offered.logits[offered.ids == token].max(initial=-np.inf))) / math.log(2)
        if math.isfinite(surprise):  # somebody may have put a token there that could not be drawn
            self.limit -= self._rate * (surprise - self._bits)
