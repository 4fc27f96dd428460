"""Every sampler step against a float64 oracle that says what the step means, in the plainest way."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from exl2chat.engine.samplers.mirostat import mirostat
from exl2chat.engine.samplers.reshaping import dynamic_temperature, skew, smoothing, temperature
from exl2chat.engine.samplers.truncation import min_p, tfs, top_a, top_k, top_n_sigma, top_p, typical_p
from exl2chat.engine.samplers.xtc import xtc
from tests.engine.distributions import LOGITS, candidates, of_probabilities, ranked, softmax

NOBODY = np.zeros(0, np.int64)


# Reshaping


@given(LOGITS, st.floats(0.05, 10))
def test_temperature_scales_the_log_odds(logits: np.ndarray, value: float) -> None:
    result = temperature(candidates(logits), value)
    expected = softmax(logits.astype(np.float64) / value)
    np.testing.assert_allclose(softmax(result.logits), expected, rtol=1e-4, atol=1e-12)


@given(LOGITS, st.floats(0.01, 3), st.floats(1, 3))
def test_smoothing_bends_the_logits_around_the_best(logits: np.ndarray, factor: float, curve: float) -> None:
    best = float(logits.max())
    expected = []
    for logit in logits.tolist():
        d = logit - best
        expected.append(best - factor * (3 - curve) / 2 * d**2 + factor * (curve - 1) / 2 * d**3)
    result = smoothing(candidates(logits), factor, curve).logits
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    assert [result[i] for i in ranked(logits)] == sorted(result, reverse=True)


def test_smoothing_does_the_same_every_time() -> None:
    """B-14: there the factor divides the temperature again for every row of a batch, so that row two differs."""
    row = candidates(np.linspace(-3, 2, 20, dtype=np.float32))
    first, second = smoothing(row, 0.4, 1), smoothing(row, 0.4, 1)
    np.testing.assert_array_equal(first.logits, second.logits)


@given(LOGITS, st.floats(0.05, 3), st.floats(0.05, 3), st.floats(0.05, 5))
def test_dynamic_temperature_follows_the_entropy(logits: np.ndarray, low: float, high: float, power: float) -> None:
    probabilities = softmax(logits)
    entropy = -sum(p * math.log(p) for p in probabilities.tolist())
    share = entropy / math.log(len(logits)) if len(logits) > 1 else 0.0
    value = low + (high - low) * min(max(share, 0), 1) ** power
    result = dynamic_temperature(candidates(logits), low, high, power)
    np.testing.assert_allclose(softmax(result.logits), softmax(logits.astype(np.float64) / value), rtol=2e-3, atol=1e-9)


def test_dynamic_temperature_of_certainty_and_of_ignorance() -> None:
    certain = candidates(np.array([0, 90, 0, 0], np.float32))
    np.testing.assert_allclose(dynamic_temperature(certain, 0.5, 4, 1).logits, certain.logits / 0.5, rtol=1e-6)
    ignorant = candidates(np.full(50, 3, np.float32))
    np.testing.assert_allclose(dynamic_temperature(ignorant, 0.5, 4, 1).logits, ignorant.logits / 4, rtol=1e-6)
    frozen = dynamic_temperature(certain, 0, 1, 1).logits
    assert np.isfinite(frozen).all()
    assert softmax(frozen)[1] == 1


@given(LOGITS, st.floats(-3, 3))
def test_skew_raises_the_cumulative_sums_to_a_power(logits: np.ndarray, value: float) -> None:
    order = ranked(logits)
    sums = np.minimum(np.cumsum(softmax(logits)[order]), 1) ** math.exp(value)
    expected = np.diff(sums, prepend=0)
    np.testing.assert_allclose(softmax(skew(candidates(logits), value).logits)[order], expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("value", [-1.5, -0.2, 0.7, 2.0])
def test_skew_is_what_a_skewed_uniform_number_draws(value: float) -> None:
    chosen = of_probabilities(0.1, 0.45, 0.05, 0.3, 0.1)
    order = ranked(chosen.logits)
    uniform = ((np.arange(200_000) + 0.5) / 200_000) ** math.exp(-value)
    picks = np.searchsorted(np.cumsum(softmax(chosen.logits)[order]), uniform)
    frequencies = np.bincount(picks, minlength=5) / 200_000
    np.testing.assert_allclose(softmax(skew(chosen, value).logits)[order], frequencies, atol=1e-4)


# Truncation


@given(LOGITS, st.integers(1, 400))
def test_top_k_keeps_the_k_best_and_the_lowest_ids_of_ties(logits: np.ndarray, k: int) -> None:
    assert top_k(candidates(logits), k).ids.tolist() == sorted(ranked(logits)[:k])


@pytest.mark.parametrize("k", [1, 2, 50, 767, 768, 769, 5000])
def test_top_k_of_a_large_vocabulary(k: int) -> None:
    logits = np.random.default_rng(k).integers(-800, 800, 49_152).astype(np.float32) / 64
    assert top_k(candidates(logits), k).ids.tolist() == sorted(ranked(logits)[:k])


def fewest(order: list[int], probabilities: np.ndarray, mass: float) -> list[int]:
    """The first of `order` whose probabilities reach `mass`, the one that crosses it included."""
    kept, reached = [], 0.0
    for token in order:
        kept.append(token)
        reached += float(probabilities[token])
        assume(abs(reached - mass) > 1e-6)
        if reached >= mass:
            break
    return sorted(kept)


@given(LOGITS, st.floats(0, 1, exclude_max=True))
def test_top_p_is_the_smallest_set_that_reaches_p(logits: np.ndarray, p: float) -> None:
    expected = fewest(ranked(logits), softmax(logits), p)
    assert top_p(candidates(logits), p).ids.tolist() == expected


@pytest.mark.parametrize(
    ("probabilities", "p", "kept"),
    [
        ([0.5, 0.4, 0.06, 0.04], 0.8, [0, 1]),
        ([0.6, 0.25, 0.15], 0.8, [0, 1]),
        ([0.04, 0.5, 0.06, 0.4], 0.95, [1, 2, 3]),
    ],
)
def test_top_p_keeps_the_token_that_crosses_and_none_less_likely(
    probabilities: list[float], p: float, kept: list[int]
) -> None:
    """B-2: there the token that crosses is dropped, and less likely ones are let in as long as the sum fits."""
    assert top_p(of_probabilities(*probabilities), p).ids.tolist() == kept


@given(LOGITS, st.floats(0.001, 1))
def test_min_p_is_relative_to_the_best(logits: np.ndarray, p: float) -> None:
    probabilities = softmax(logits)
    relative = probabilities / probabilities.max()
    assume(np.abs(relative - p).min() > 1e-6 * p or p == 1)
    assert min_p(candidates(logits), p).ids.tolist() == np.flatnonzero(relative >= p).tolist()


@given(LOGITS, st.floats(0.001, 1))
def test_top_a_is_relative_to_the_square_of_the_best(logits: np.ndarray, a: float) -> None:
    probabilities = softmax(logits)
    least = a * probabilities.max() ** 2
    assume(np.abs(probabilities / least - 1).min() > 1e-5 or len(logits) == 1)
    assert top_a(candidates(logits), a).ids.tolist() == np.flatnonzero(probabilities >= least).tolist()


@given(LOGITS, st.floats(0.01, 5))
def test_top_n_sigma_is_a_distance_in_standard_deviations(logits: np.ndarray, n: float) -> None:
    exact = logits.astype(np.float64)
    mean = sum(exact.tolist()) / len(exact)
    least = exact.max() - n * math.sqrt(sum((x - mean) ** 2 for x in exact.tolist()) / len(exact))
    assume(np.abs(exact - least).min() > 1e-4 or exact.std() == 0)
    assert top_n_sigma(candidates(logits), n).ids.tolist() == np.flatnonzero(exact >= least).tolist()


@given(LOGITS, st.floats(0.01, 5), st.floats(0.1, 5))
def test_top_n_sigma_keeps_the_same_tokens_at_every_temperature(logits: np.ndarray, n: float, heat: float) -> None:
    exact = logits.astype(np.float64)
    assume(np.abs(exact - exact.max() + n * exact.std()).min() > 1e-4)
    hot = top_n_sigma(temperature(candidates(logits), heat), n)
    assert hot.ids.tolist() == top_n_sigma(candidates(logits), n).ids.tolist()


@given(LOGITS, st.floats(0.01, 0.999))
def test_tail_free_sampling_keeps_tokens_until_the_curve_has_bent_enough(logits: np.ndarray, z: float) -> None:
    order = ranked(logits)
    falling = softmax(logits)[order].tolist()
    slopes = [b - a for a, b in pairwise(falling)]
    bends = [abs(b - a) for a, b in pairwise(slopes)]
    total = sum(bends)
    assume(total > 1e-4 or not bends)
    count, spent = 0 if bends else len(order), 0.0
    while spent <= z and count < len(bends):
        spent += bends[count] / total
        count += 1
        assume(abs(spent - z) > 1e-6)
    assert tfs(candidates(logits), z).ids.tolist() == sorted(order[:count])


def test_tail_free_sampling_cuts_nothing_off_a_curve_that_does_not_bend() -> None:
    assert len(tfs(candidates(np.zeros(20, np.float32)), 0.5).ids) == 20


@given(LOGITS, st.floats(0, 1, exclude_max=True))
def test_typical_sampling_takes_the_surprises_nearest_to_the_entropy(logits: np.ndarray, mass: float) -> None:
    probabilities = softmax(logits)
    entropy = -sum(p * math.log(p) for p in probabilities.tolist())
    distance = np.abs(-np.log(probabilities) - entropy)
    apart = np.diff(np.unique(distance))
    assume(not len(apart) or apart.min() > 1e-5)
    expected = fewest(sorted(range(len(logits)), key=lambda i: (distance[i], i)), probabilities, mass)
    assert typical_p(candidates(logits), mass).ids.tolist() == expected


@pytest.mark.parametrize(
    ("probabilities", "mass", "kept"),
    [([0.5, 0.4, 0.1], 0.8, [0, 1]), ([0.5, 0.4, 0.1], 0.3, [1]), ([0.9, 0.05, 0.05], 0.5, [0])],
)
def test_typical_sampling_keeps_the_token_that_crosses(
    probabilities: list[float], mass: float, kept: list[int]
) -> None:
    """B-2: there it is dropped, and the distance is computed from the probability plus its logarithm.

    The entropy of (0.5, 0.4, 0.1) is 0.943; the surprises 0.693, 0.916 and 2.303 are 0.25, 0.03 and 1.36 away.
    """
    assert typical_p(of_probabilities(*probabilities), mass).ids.tolist() == kept


@given(LOGITS, st.floats(-2, 20))
def test_mirostat_limits_the_surprise_in_bits(logits: np.ndarray, limit: float) -> None:
    surprise = -np.log2(softmax(logits))
    assume(np.abs(surprise - limit).min() > 1e-4)
    expected = np.flatnonzero(surprise <= max(limit, surprise.min()))
    assert mirostat(candidates(logits), limit).ids.tolist() == expected.tolist()


@given(LOGITS, st.floats(0, 1), st.sets(st.integers(0, 300), max_size=40))
def test_xtc_keeps_the_last_of_the_top_choices(logits: np.ndarray, threshold: float, protected: set[int]) -> None:
    probabilities = softmax(logits)
    assume(np.abs(probabilities - threshold).min() > 1e-6)
    top = [i for i in ranked(logits) if probabilities[i] >= threshold and i not in protected]
    result = xtc(candidates(logits), threshold, np.array(sorted(protected), np.int64))
    assert result.ids.tolist() == sorted(set(range(len(logits))) - set(top[:-1]))


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_xtc_drops_the_top_choices_in_whatever_order_the_vocabulary_has_them(order: list[int]) -> None:
    """B-2: there the neighbour's probability decides, so that rising probabilities leave the top token alone."""
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])[order]
    result = xtc(of_probabilities(*probabilities.tolist()), 0.1, NOBODY)
    left = dict(zip(probabilities[result.ids].tolist(), softmax(result.logits).tolist(), strict=True))
    assert left == pytest.approx({0.15: 0.75, 0.05: 0.25})


@given(LOGITS, st.floats(3, 9))
def test_a_strong_skew_drops_what_underflows(logits: np.ndarray, value: float) -> None:
    kept = skew(candidates(logits), value)
    assert len(kept.ids) >= 1
    assert np.isfinite(kept.logits).all()


# Order where it must not matter


@given(LOGITS, st.integers(1, 50), st.floats(0.01, 1), st.floats(0.1, 4))
def test_steps_that_look_at_ranks_and_ratios_commute(logits: np.ndarray, k: int, p: float, heat: float) -> None:
    start = candidates(logits)
    assert top_k(min_p(start, p), k).ids.tolist() == min_p(top_k(start, k), p).ids.tolist()
    hot, kept = top_k(temperature(start, heat), k), temperature(top_k(start, k), heat)
    np.testing.assert_array_equal(hot.ids, kept.ids)
    np.testing.assert_array_equal(hot.logits, kept.logits)
