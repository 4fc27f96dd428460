"""XTC, exclude top choices (Weidmann 2024, text-generation-webui)."""

import math

import numpy as np
from numpy.typing import NDArray

from exl2chat.engine.samplers.candidates import Candidates


def xtc(candidates: Candidates, threshold: float, protected: NDArray[np.int64]) -> Candidates:
    """Of the tokens with a probability of at least `threshold` only the least likely stays; if that is all, all stay.

    The ids `protected` are neither dropped nor counted. Among equally likely tokens the highest id is the least likely.
    """
    logits = candidates.logits
    best = logits.max()
    total = np.exp(logits - best).sum(dtype=np.float64)
    least = best + np.float32(math.log(threshold * total)) if threshold else -np.inf
    top = np.flatnonzero(logits >= least)
    top = top[np.isin(candidates.ids[top], protected, invert=True)]
    if len(top) < 2:
        return candidates
    least_likely = len(top) - 1 - int(np.argmin(logits[top][::-1]))
    kept = np.ones(len(logits), bool)
    kept[np.delete(top, least_likely)] = False
    return candidates.keep(np.flatnonzero(kept))
