"""Steps that change how likely tokens are beside each other and drop none."""

import math

import numpy as np
from numpy.typing import NDArray

from exl2chat.engine.samplers.candidates import Candidates

LOWEST = np.float32(-1e4)  # exp of it is 0, and 0 times it is 0, unlike 0 times minus infinity
COLDEST = 1e-6  # at this temperature or below float32 logits that differ at all leave one candidate: greedy


def temperature(candidates: Candidates, value: float) -> Candidates:
    """Logits over `value`, which is above `COLDEST`."""
    return Candidates(candidates.logits / np.float32(value), candidates.ids)


def entropy(below: NDArray[np.float32]) -> float:
    """In nats, of the distribution whose logits are `below` [n] the best."""
    weights = np.exp(below)
    total = weights.sum(dtype=np.float64)
    return float(math.log(total) - np.multiply(weights, np.maximum(below, LOWEST)).sum(dtype=np.float64) / total)


def dynamic_temperature(candidates: Candidates, low: float, high: float, exponent: float) -> Candidates:
    """A temperature from `low` to `high`, higher the less certain the model is: low + (high - low) (H / Hmax)^exponent.

    H is the entropy of the candidates and Hmax that of as many equally likely ones (kalomaze 2023, koboldcpp).
    """
    below = candidates.logits - candidates.logits.max()
    count = np.count_nonzero(below > -np.inf)
    if count == 1:
        return candidates
    share = min(max(entropy(below) / math.log(count), 0.0), 1.0)
    return temperature(candidates, max(low + (high - low) * share**exponent, 2 * COLDEST))


def smoothing(candidates: Candidates, factor: float, curve: float) -> Candidates:
    """Logits at distance d below the best become best - (k d^2 + s d^3), where k = factor (3 - curve) / 2 and
    s = factor (curve - 1) / 2: tokens near the best come closer to it, those far from it fall away (kalomaze 2024,
    text-generation-webui). `curve` is 1 (a parabola) to 3 (a cubic), between which a likelier token stays likelier.
    """
    best = candidates.logits.max()
    distance = best - candidates.logits
    slope = np.float32(factor * (3 - curve) / 2) + np.float32(factor * (curve - 1) / 2) * np.minimum(distance, 1e8)
    return Candidates(best - slope * distance * distance, candidates.ids)


def skew(candidates: Candidates, value: float) -> Candidates:
    """Where the likeliest i tokens weigh C_i together, they weigh C_i^k, k = e^value: above 0 favours unlikely tokens.

    It is what raising the uniform number u of a draw from the cumulative sums to u^(1/k) does, for a draw that has no
    such number. Ties are ranked by id.
    """
    power = math.exp(value)
    order = np.argsort(-candidates.logits, kind="stable")
    falling = candidates.logits[order].astype(np.float64)
    weights = np.exp(falling - falling[0])
    sums = np.cumsum(weights)
    with np.errstate(divide="ignore"):  # a weight that underflows has no logarithm: such a token is not drawn
        shares = np.log(-np.expm1(power * np.log1p(-weights / sums)))
    skewed = np.empty_like(candidates.logits)
    skewed[order] = power * np.log(sums / sums[-1]) + shares
    return Candidates(skewed, candidates.ids)
