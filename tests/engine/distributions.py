"""Logits to sample from, and what the sampler's tests say about distributions, in float64 and the plainest way."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from exl2chat.engine.samplers.candidates import Candidates

# Sixteenths up to 20 in magnitude: the ties of half-precision logits, and differences that float32 holds exactly.
LOGITS = hnp.arrays(np.int32, st.integers(1, 300), elements=st.integers(-320, 320)).map(
    lambda sixteenths: (sixteenths / 16).astype(np.float32)
)


def candidates(logits: np.ndarray) -> Candidates:
    return Candidates(logits, np.arange(len(logits)))


def of_probabilities(*probabilities: float) -> Candidates:
    return candidates(np.log(np.array(probabilities, np.float32)))


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    return weights / weights.sum()


def ranked(logits: np.ndarray) -> list[int]:
    """Ids by falling logit, ties by rising id."""
    return sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())
