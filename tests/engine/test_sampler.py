"""Every sampler step against a float64 oracle that says what the step means, in the plainest way."""

import math
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from exl2chat.engine import sampler
from exl2chat.engine.sampler import STEPS, Candidates, Sampler, draw, gumbel, min_p, select, temperature, top_k, top_p
from exl2chat.errors import ChatError
from exl2chat.settings import Sampling

# Sixteenths up to 20 in magnitude: the ties of half-precision logits, and differences that float32 holds exactly.
LOGITS = hnp.arrays(np.int32, st.integers(1, 300), elements=st.integers(-320, 320)).map(
    lambda sixteenths: (sixteenths / 16).astype(np.float32)
)


def candidates(logits: np.ndarray) -> Candidates:
    return Candidates(logits, np.arange(len(logits)))


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - float(logits.max()))
    return weights / weights.sum()


def ranked(logits: np.ndarray) -> list[int]:
    """Ids by falling logit, ties by rising id."""
    return sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))


@given(LOGITS, st.floats(0.05, 10))
def test_temperature_scales_the_log_odds(logits: np.ndarray, value: float) -> None:
    result = temperature(candidates(logits), value)
    expected = softmax(logits.astype(np.float64) / value)
    np.testing.assert_allclose(softmax(result.logits), expected, rtol=1e-4, atol=1e-12)


@given(LOGITS, st.integers(1, 400))
def test_top_k_keeps_the_k_best_and_the_lowest_ids_of_ties(logits: np.ndarray, k: int) -> None:
    assert top_k(candidates(logits), k).ids.tolist() == sorted(ranked(logits)[:k])


@pytest.mark.parametrize("k", [1, 2, 50, 767, 768, 769, 5000])
def test_top_k_of_a_large_vocabulary(k: int) -> None:
    logits = np.random.default_rng(k).integers(-800, 800, 49_152).astype(np.float32) / 64
    assert top_k(candidates(logits), k).ids.tolist() == sorted(ranked(logits)[:k])


@given(LOGITS, st.floats(0, 1, exclude_max=True))
def test_top_p_is_the_smallest_set_that_reaches_p(logits: np.ndarray, p: float) -> None:
    order = ranked(logits)
    reached = np.cumsum(softmax(logits)[order])
    assume(np.abs(reached - p).min() > 1e-6)
    count = int((reached < p).sum()) + 1
    assert top_p(candidates(logits), p).ids.tolist() == sorted(order[:count])


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
    assert top_p(candidates(np.log(np.array(probabilities, np.float32))), p).ids.tolist() == kept


@given(LOGITS, st.floats(0.001, 1))
def test_min_p_is_relative_to_the_best(logits: np.ndarray, p: float) -> None:
    probabilities = softmax(logits)
    relative = probabilities / probabilities.max()
    assume(np.abs(relative - p).min() > 1e-6 * p or p == 1)
    assert min_p(candidates(logits), p).ids.tolist() == np.flatnonzero(relative >= p).tolist()


VALUES = {
    "temperature": st.floats(0.01, 5),
    "top_k": st.integers(1, 100),
    "top_p": st.floats(0, 1, exclude_max=True),
    "min_p": st.floats(0.001, 1),
}
SETTINGS = st.fixed_dictionaries({}, optional=VALUES).map(lambda values: Sampling(**{"top_p": 1.0, **values}))


def test_every_step_has_values_to_be_tested_with() -> None:
    assert {step.name for step in STEPS} == set(VALUES)


@given(LOGITS, SETTINGS)
def test_a_selection_keeps_the_best_token_and_leaves_the_logits_alone(logits: np.ndarray, settings: Sampling) -> None:
    before = logits.copy()
    kept = select(candidates(logits), settings)
    assert int(np.argmax(logits)) in kept.ids
    assert len(kept.logits) == len(kept.ids)
    assert (np.diff(kept.ids) > 0).all()
    np.testing.assert_array_equal(logits, before)


@given(LOGITS, SETTINGS, st.randoms(use_true_random=False))
def test_a_selection_does_not_depend_on_the_order_of_the_vocabulary(
    logits: np.ndarray, settings: Sampling, random: Random
) -> None:
    logits = np.unique(logits)
    shuffled = list(range(len(logits)))
    random.shuffle(shuffled)
    straight = select(candidates(logits), settings)
    permuted = select(candidates(logits[shuffled]), settings)
    assert sorted(shuffled[i] for i in permuted.ids) == straight.ids.tolist()


@given(LOGITS)
def test_neutral_settings_change_nothing(logits: np.ndarray) -> None:
    neutral = Sampling(**{step.name: step.neutral for step in STEPS})
    kept = select(candidates(logits), neutral)
    np.testing.assert_array_equal(kept.logits, logits)
    np.testing.assert_array_equal(kept.ids, np.arange(len(logits)))


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p"])
def test_a_step_next_to_its_neutral_value_keeps_nearly_everything(name: str) -> None:
    logits = np.linspace(-3, 3, 101, dtype=np.float32)
    near = {"temperature": 1 + 1e-7, "top_p": 1 - 1e-9, "min_p": 1e-9}[name]
    kept = select(candidates(logits), Sampling(**{"temperature": 1.0, "top_p": 1.0, name: near}))
    np.testing.assert_allclose(softmax(kept.logits), softmax(logits), rtol=1e-5)


# The draw


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_draws_follow_the_softmax(seed: int) -> None:
    probabilities = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01])
    chosen = candidates(np.log(probabilities).astype(np.float32))
    draws = 20_000
    counts = np.bincount([draw(chosen, seed, position) for position in range(draws)], minlength=7)
    assert chi_square(counts, probabilities * draws) < 24.1  # 6 degrees of freedom: p = 0.0005


def test_draws_at_one_position_follow_the_softmax_over_seeds() -> None:
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    chosen = candidates(np.log(probabilities).astype(np.float32))
    counts = np.bincount([draw(chosen, seed, 17) for seed in range(20_000)], minlength=4)
    assert chi_square(counts, probabilities * 20_000) < 17.8  # 3 degrees of freedom: p = 0.0005


def test_successive_draws_are_independent() -> None:
    chosen = candidates(np.zeros(4, np.float32))
    drawn = [draw(chosen, 5, position) for position in range(20_001)]
    pairs = np.bincount([4 * a + b for a, b in pairwise(drawn)], minlength=16)
    assert chi_square(pairs, np.full(16, 20_000 / 16)) < 39.7  # 15 degrees of freedom: p = 0.0005


def test_the_noise_of_a_token_depends_on_nothing_but_seed_position_and_id() -> None:
    everything = gumbel(3, 100, np.arange(1000))
    np.testing.assert_array_equal(gumbel(3, 100, np.array([7, 400, 999])), everything[[7, 400, 999]])
    assert not np.array_equal(gumbel(4, 100, np.arange(1000)), everything)
    assert not np.array_equal(gumbel(3, 101, np.arange(1000)), everything)
    assert not np.array_equal(gumbel(3, 101, np.arange(1000)), gumbel(4, 100, np.arange(1000)))


def test_the_noise_is_the_same_on_every_machine() -> None:
    """Published SplitMix64 vector: the first output for seed 0 is e220a8397b1dcdaf."""
    first = 0xE220A8397B1DCDAF
    mask = 2**64 - 1
    z = (first + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    uniform = (((z ^ z >> 31) >> 12) + 0.5) / 2**52
    assert gumbel(0, 0, np.array([0]))[0] == pytest.approx(-math.log(-math.log(uniform)), rel=1e-12)


@given(LOGITS, st.integers(0, 2**63 - 1), st.integers(0, 100_000))
def test_a_truncated_draw_is_the_full_draw_where_its_token_survives(logits: np.ndarray, seed: int, at: int) -> None:
    chosen = candidates(logits)
    token = draw(chosen, seed, at)
    survivors = top_k(chosen, 5)
    assert token not in survivors.ids or draw(survivors, seed, at) == token


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_noise_is_finite_whatever_the_bits(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_splitmix", lambda *_: np.array([bits], np.uint64))
    assert np.isfinite(gumbel(0, 0, np.array([0]))).all()


# The sampler


def test_temperature_zero_takes_the_first_of_the_best() -> None:
    logits = np.array([1, 5, 2, 5, 5], np.float32)
    assert Sampler(Sampling(temperature=0), []).sample(logits, 0) == 1


@pytest.mark.parametrize("cold", [0.0, 1e-300, 1e-7, 1e-3])
def test_a_cold_sampler_is_greedy(cold: float) -> None:
    logits = np.array([1, 5, 2, 6], np.float32)
    assert {Sampler(Sampling(temperature=cold, seed=s), []).sample(logits, s) for s in range(50)} == {3}


def test_a_seed_reproduces_and_none_draws_another() -> None:
    logits = np.zeros(1000, np.float32)
    first, again, other = (Sampler(Sampling(seed=seed), []) for seed in (7, 7, 8))
    drawn = [first.sample(logits, position) for position in range(20)]
    assert drawn == [again.sample(logits, position) for position in range(20)]
    assert drawn != [other.sample(logits, position) for position in range(20)]
    unseeded = Sampler(Sampling(), [])
    reported = Sampler(Sampling(seed=unseeded.seed), [])
    assert [unseeded.sample(logits, p) for p in range(20)] == [reported.sample(logits, p) for p in range(20)]
    assert len({Sampler(Sampling(), []).seed for _ in range(10)}) > 1


def test_tokens_masked_out_by_the_model_are_never_drawn() -> None:
    logits = np.full(100, -np.inf, np.float32)
    logits[[3, 60]] = 1.0
    sampler = Sampler(Sampling(temperature=5, top_p=1.0, seed=1, repetition_penalty=1.3), [3, 4])
    assert {sampler.sample(logits, position) for position in range(100)} == {3, 60}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_numbers_are_an_error(bad: float) -> None:
    logits = np.ones(10, np.float32)
    logits[4] = bad
    with pytest.raises(ChatError, match="not numbers"):
        Sampler(Sampling(), []).sample(logits, 0)


def test_the_callers_logits_are_never_changed() -> None:
    logits = np.arange(50, dtype=np.float32)
    logits.flags.writeable = False
    settings = Sampling(top_k=5, min_p=0.1, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.1)
    assert 0 <= Sampler(settings, [49, 48, 49]).sample(logits, 3) < 50
