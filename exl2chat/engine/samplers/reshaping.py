"""Steps that change how likely tokens are beside each other."""

import math

import numpy as np
from numpy.typing import NDArray

from exl2chat.engine.samplers.candidates import Candidates

COLDEST = 1e-6  # at this temperature or below float32 logits that differ at all leave one candidate: greedy


def temperature(candidates: Candidates, value: float) -> Candidates:
    """Logits over `value`, which is above `COLDEST`."""
    return Candidates(candidates.logits / np.float32(value), candidates.ids)


def entropy(below: NDArray[np.float32]) -> float:
    """In nats, of softmax(below) [n], whose largest logit is 0."""
    weights = np.exp(below)
    total = weights.sum(dtype=np.float64)
    return float(math.log(total) - np.multiply(weights, below).sum(dtype=np.float64) / total)


def dynamic_temperature(candidates: Candidates, low: float, high: float, exponent: float) -> Candidates:
    """From `low` where the model is certain to `high` where it has no idea: low + (high - low) (H / Hmax)^exponent.

    H is the entropy of the candidates and Hmax that of as many equally likely ones (kalomaze 2023, koboldcpp).
    """
    below = candidates.logits - candidates.logits.max()
    if len(below) == 1:
        return candidates
    share = min(max(entropy(below) / math.log(len(below)), 0.0), 1.0)
    return temperature(candidates, max(low + (high - low) * share**exponent, 2 * COLDEST))


def smoothing(candidates: Candidates, factor: float, curve: float) -> Candidates:
    """Logits at distance d below the best become best - (k d^2 + s d^3), where k = factor (3 - curve) / 2 and
    s = factor (curve - 1) / 2: tokens near the best come closer to it, those far from it fall away (kalomaze 2024,
    text-generation-webui). `curve` is 1 (a parabola) to 3 (a cubic), between which a likelier token stays likelier.
    """
    best = candidates.logits.max()
    distance = best - candidates.logits
    slope = np.float32(factor * (3 - curve) / 2) + np.float32(factor * (curve - 1) / 2) * distance
    return Candidates(best - slope * distance * distance, candidates.ids)


def skew(candidates: Candidates, value: float) -> Candidates:
    """Where the likeliest i tokens weigh C_i together, they weigh C_i^k, k = e^value: above 0 favours unlikely tokens.

    It is what raising the uniform number u of a draw from the cumulative sums to u^(1/k) does, for a draw that has no
    such number. Ties are ranked by id. A token whose share underflows is dropped.
    """
    power = math.exp(value)
    order = np.argsort(-candidates.logits, kind="stable")
    falling = candidates.logits[order].astype(np.float64)
    weights = np.exp(falling - falling[0])
    sums = np.cumsum(weights)
    with np.errstate(divide="ignore"):  # the first weighs all of the sum; one that underflows has no logarithm
        shares = np.log(-np.expm1(power * np.log1p(-weights / sums)))
    skewed = np.empty_like(candidates.logits)
    skewed[order] = power * np.log(sums / sums[-1]) + shares
    return Candidates(skewed, candidates.ids).keep(np.flatnonzero(np.isfinite(skewed)))
