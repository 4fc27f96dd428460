"""The sampler as a whole: which steps run in which order, the draw, and single tokens that are biased or banned."""

import math
from itertools import pairwise
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl2chat import settings as options
from exl2chat.engine.sampler import STEPS, Sampler, active_steps, draw
from exl2chat.engine.samplers import noise
from exl2chat.engine.samplers.candidates import Candidates
from exl2chat.engine.samplers.noise import coin, gumbel
from exl2chat.engine.samplers.truncation import top_k
from exl2chat.errors import ChatError
from exl2chat.settings import Sampling
from tests.engine.distributions import LOGITS, candidates, chi_square, softmax

NEUTRAL = {"temperature": 1.0, "top_p": 1.0}
VALUES = {
    "top_n_sigma": st.floats(0.01, 5),
    "smoothing_factor": st.floats(0.01, 2),
    "temperature": st.floats(0.01, 5),
    "top_k": st.integers(1, 100),
    "top_p": st.floats(0, 1, exclude_max=True),
    "top_a": st.floats(0.001, 1),
    "min_p": st.floats(0.001, 1),
    "tfs": st.floats(0, 1, exclude_max=True),
    "typical_p": st.floats(0, 1, exclude_max=True),
    "mirostat_tau": st.floats(0.1, 8),
    "max_temperature": st.floats(0.1, 5),
    "xtc_probability": st.floats(0.01, 1),
    "skew": st.floats(-2, 2),
    "temperature_last": st.booleans(),
    "step_order": st.lists(st.sampled_from(options.STEPS), unique=True).map(",".join),
}
FIELDS = {"smoothing": "smoothing_factor", "mirostat": "mirostat_tau", "dynamic_temperature": "max_temperature"}
FIELDS["xtc"] = "xtc_probability"
SETTINGS = st.fixed_dictionaries({}, optional=VALUES).map(lambda values: Sampling(**{**NEUTRAL, **values}))
LOSING_THE_BEST = ("typical_p", "xtc_probability", "skew")
KEEPING_THE_BEST = {name: values for name, values in VALUES.items() if name not in LOSING_THE_BEST}


def select(logits: np.ndarray, settings: Sampling) -> Candidates:
    return Sampler(settings, []).candidates(logits, 0)


def names(**values: object) -> list[str]:
    return [step.name for step in active_steps(Sampling(**{**NEUTRAL, **values}))]


# Which steps run


def test_every_step_has_a_name_to_be_ordered_by_and_values_to_be_tested_with() -> None:
    assert tuple(step.name for step in STEPS) == options.STEPS
    assert {FIELDS.get(step.name, step.name) for step in STEPS} < set(VALUES)


def test_neutral_settings_run_no_step_and_change_nothing() -> None:
    assert names() == []
    logits = np.linspace(-2, 2, 40, dtype=np.float32)
    kept = select(logits, Sampling(**NEUTRAL, seed=0))
    np.testing.assert_array_equal(kept.logits, logits)
    np.testing.assert_array_equal(kept.ids, np.arange(40))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_step_runs_when_its_setting_is_not_neutral(step: object) -> None:
    field = FIELDS.get(step.name, step.name)  # type: ignore[attr-defined]
    assert names(**{field: 7 if field == "top_k" else 0.5}) == [step.name]  # type: ignore[attr-defined]


ALL = {FIELDS.get(step.name, step.name): 0.5 for step in STEPS} | {"top_k": 7}


def test_the_usual_order_is_that_of_the_table() -> None:
    fixed = names(**{**ALL, "max_temperature": 0.0})
    assert fixed == [name for name in options.STEPS if name != "dynamic_temperature"]


def test_a_dynamic_temperature_takes_the_place_of_the_fixed_one() -> None:
    assert names(**ALL) == [name for name in options.STEPS if name != "temperature"]


def test_the_temperature_may_come_last() -> None:
    """After every step that drops tokens by how likely they are, where it no longer changes which."""
    order = names(**{**ALL, "max_temperature": 0.0}, temperature_last=True)
    assert order[order.index("temperature") - 1] == "mirostat"
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    hot = {"temperature": 10.0, "min_p": 0.5}
    assert len(select(logits, Sampling(top_p=1.0, **hot)).ids) == 4
    last = select(logits, Sampling(top_p=1.0, temperature_last=True, **hot))
    assert last.ids.tolist() == [0, 1]
    np.testing.assert_allclose(softmax(last.logits), softmax(logits[:2] / 10), rtol=1e-5)


def test_steps_that_are_named_come_first() -> None:
    order = names(**{**ALL, "max_temperature": 0.0}, step_order="min_p, xtc temperature")
    assert order[:3] == ["min_p", "xtc", "temperature"]
    assert order[3:] == [n for n in options.STEPS if n not in ("min_p", "xtc", "temperature", "dynamic_temperature")]
    assert names(temperature=0.5, min_p=0.5, step_order="temperature", temperature_last=True)[0] == "temperature"


def test_the_order_changes_what_is_kept() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    settings = {"temperature": 10.0, "top_p": 1.0, "min_p": 0.5}
    assert select(logits, Sampling(**settings, step_order="min_p")).ids.tolist() == [0, 1]


# What every selection has in common


@given(LOGITS, SETTINGS)
def test_a_selection_is_some_of_the_tokens_and_leaves_the_logits_alone(logits: np.ndarray, settings: Sampling) -> None:
    """Unlike exllamav2, where the caller's logits are changed in place."""
    before = logits.copy()
    logits.flags.writeable = False
    kept = select(logits, settings)
    assert 1 <= len(kept.ids) == len(kept.logits) <= len(logits)
    assert set(kept.ids.tolist()) <= set(range(len(logits)))
    assert (np.diff(kept.ids) > 0).all()
    assert np.isfinite(kept.logits).all()
    np.testing.assert_array_equal(logits, before)


@given(LOGITS, SETTINGS, st.sets(st.integers(0, 300), max_size=50))
def test_a_masked_token_is_as_good_as_none(logits: np.ndarray, settings: Sampling, places: set[int]) -> None:
    settings = msgspec.structs.replace(settings, seed=0)
    masked = logits
    for place in sorted(places):
        masked = np.insert(masked, min(place, len(masked)), -np.inf)
    others = np.flatnonzero(masked > -np.inf)
    kept, expected = select(masked, settings), select(logits, settings)
    assert kept.ids.tolist() == others[expected.ids].tolist()
    np.testing.assert_array_equal(kept.logits, expected.logits)


@given(LOGITS, st.fixed_dictionaries({}, optional=KEEPING_THE_BEST))
def test_all_but_typical_sampling_xtc_and_skew_keep_the_best_token(
    logits: np.ndarray, values: dict[str, object]
) -> None:
    assert int(np.argmax(logits)) in select(logits, Sampling(**{**NEUTRAL, **values})).ids


RESHAPING = ("smoothing", "temperature", "dynamic_temperature", "skew")
DROPPING = [FIELDS.get(step.name, step.name) for step in STEPS if step.name not in RESHAPING]


@given(LOGITS, st.sampled_from(DROPPING).flatmap(lambda name: st.fixed_dictionaries({name: VALUES[name]})))
def test_the_probabilities_of_the_kept_are_theirs_over_their_sum(logits: np.ndarray, value: dict[str, object]) -> None:
    kept = select(logits, Sampling(**{**NEUTRAL, **value}))
    share = softmax(logits)[kept.ids]
    np.testing.assert_allclose(softmax(kept.logits), share / share.sum(), rtol=1e-6)


@given(LOGITS, SETTINGS, st.randoms(use_true_random=False))
def test_a_selection_does_not_depend_on_the_order_of_the_vocabulary(
    logits: np.ndarray, settings: Sampling, random: Random
) -> None:
    logits = np.unique(logits)
    shuffled = list(range(len(logits)))
    random.shuffle(shuffled)
    settings = msgspec.structs.replace(settings, seed=0)
    straight = select(logits, settings)
    permuted = select(logits[shuffled], settings)
    order = np.argsort([shuffled[i] for i in permuted.ids])
    assert [shuffled[permuted.ids[i]] for i in order] == straight.ids.tolist()
    np.testing.assert_allclose(permuted.logits[order], straight.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "top_a", "typical_p", "skew"])
def test_a_step_next_to_its_neutral_value_keeps_nearly_everything(name: str) -> None:
    logits = np.linspace(-3, 3, 101, dtype=np.float32)
    above = {"temperature": 1, "skew": 0, "min_p": 0, "top_a": 0}
    near = above[name] + 1e-7 if name in above else 1 - 1e-9
    kept = select(logits, Sampling(**{**NEUTRAL, name: near}))
    np.testing.assert_allclose(softmax(kept.logits), softmax(logits), rtol=1e-5)


# The draw


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


def test_the_coin_of_a_position_is_fair_and_knows_nothing_of_its_tokens() -> None:
    coins = np.array([coin(9, position) for position in range(20_000)])
    counts = np.histogram(coins, 10, (0, 1))[0]
    assert chi_square(counts, np.full(10, 2000)) < 29.7  # 9 degrees of freedom: p = 0.0005
    tokens = np.array([draw(candidates(np.zeros(2, np.float32)), 9, position) for position in range(20_000)])
    both = np.bincount(2 * (coins < 0.5) + tokens, minlength=4)
    assert chi_square(both, np.full(4, 5000)) < 17.8  # 3 degrees of freedom: p = 0.0005
    assert coin(9, 5) == coin(9, 5) != coin(8, 5)


@given(LOGITS, st.integers(0, 2**63 - 1), st.integers(0, 100_000))
def test_a_truncated_draw_is_the_full_draw_where_its_token_survives(logits: np.ndarray, seed: int, at: int) -> None:
    chosen = candidates(logits)
    token = draw(chosen, seed, at)
    survivors = top_k(chosen, 5)
    assert token not in survivors.ids or draw(survivors, seed, at) == token


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_noise_is_finite_whatever_the_bits(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "_splitmix", lambda *_: np.array([bits], np.uint64))
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


@given(LOGITS, SETTINGS, st.integers(0, 2**63 - 1), st.integers(0, 5000))
def test_a_draw_is_a_function_of_seed_position_and_logits(
    logits: np.ndarray, settings: Sampling, seed: int, position: int
) -> None:
    settings = msgspec.structs.replace(settings, seed=seed)
    used = Sampler(settings, [])
    for earlier in range(3):
        used.sample(logits[::-1].copy(), earlier)
    assert used.sample(logits, position) == Sampler(settings, []).sample(logits, position)


# Single tokens


def test_a_bias_is_added_after_the_penalties_and_before_everything_else() -> None:
    logits = np.array([4, 3, 2, 1], np.float32)
    settings = Sampling(**NEUTRAL, repetition_penalty=2.0, logit_bias=((0, 0.5), (3, 2.5), (99, 7)), min_p=0.9, seed=0)
    kept = Sampler(settings, [0]).candidates(logits, 0)
    assert (kept.ids.tolist(), kept.logits.tolist()) == ([3], [3.5])


@pytest.mark.parametrize("allowed", [(2, 0, 30, 99), (99, 30, 2, 2, 0), (0, 2, 30)])
def test_only_allowed_tokens_are_drawn_in_whatever_order_they_are_listed(allowed: tuple[int, ...]) -> None:
    """Unlike exllamav2, where a list of allowed tokens that is not sorted allows others than it says."""
    logits = np.zeros(50, np.float32)
    sampler = Sampler(Sampling(**NEUTRAL, allowed_tokens=allowed, seed=1), [])
    assert {sampler.sample(logits, position) for position in range(100)} == {0, 2, 30}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_tokens_are_never_drawn(temperature: float) -> None:
    logits = np.array([9, 1, 2, 9], np.float32)
    settings = Sampling(temperature=temperature, allowed_tokens=(0, 1, 2), banned_tokens=(0, 3, 77), top_p=1.0)
    sampler = Sampler(settings, [])
    assert {sampler.sample(logits, position) for position in range(100)} == ({1, 2} if temperature else {2})


def test_logits_may_become_fewer_and_more() -> None:
    sampler = Sampler(Sampling(**NEUTRAL, banned_tokens=(0,), seed=2), [])
    for size in (20, 3, 50):
        drawn = {sampler.sample(np.zeros(size, np.float32), position) for position in range(400)}
        assert drawn == set(range(1, size))


@pytest.mark.parametrize("settings", [Sampling(allowed_tokens=()), Sampling(allowed_tokens=(7,), banned_tokens=(7,))])
def test_allowing_no_token_is_an_error(settings: Sampling) -> None:
    """Unlike exllamav2, where an empty list of allowed tokens is read beyond its end."""
    with pytest.raises(ChatError, match="no token may be drawn"):
        Sampler(settings, []).sample(np.zeros(10, np.float32), 0)


def test_the_noise_of_a_token_is_the_same_whoever_else_takes_part() -> None:
    logits = np.linspace(0, 1, 64, dtype=np.float32)
    free, bound = (Sampler(Sampling(**NEUTRAL, seed=3, banned_tokens=banned), []) for banned in ((), (1, 2, 3)))
    for position in range(200):
        token = free.sample(logits, position)
        assert token in (1, 2, 3) or bound.sample(logits, position) == token


def test_logits_that_are_all_masked_are_told_from_those_that_are_not_numbers() -> None:
    logits = np.full(10, -np.inf, np.float32)
    with pytest.raises(ChatError, match="no token is left to draw") as caught:
        Sampler(Sampling(), []).sample(logits, 0)
    assert "block fewer tokens" in caught.value.remedy
    logits[4] = np.nan
    with pytest.raises(ChatError, match="not numbers"):
        Sampler(Sampling(), []).sample(logits, 0)
