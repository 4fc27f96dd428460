"""Penalties against a walk over the whole history, which is what they mean."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl2chat.engine.penalties import PENALTIES, PenaltyWindow, active, penalize
from exl2chat.engine.sampler import Sampler
from exl2chat.settings import Sampling

VOCABULARY = 12
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=60)
SETTINGS = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 1.1, 2.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.3, -0.2]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.1]),
    penalty_range=st.sampled_from([-1, 0, 1, 3, 10, 100]),
    penalty_decay=st.sampled_from([0, 1, 4, 30]),
)


def oracle(logits: np.ndarray, tokens: list[int], settings: Sampling) -> np.ndarray:
    """Backwards over the history: the first sighting divides or multiplies and subtracts presence, each frequency."""
    out = logits.astype(np.float64)
    met: set[int] = set()
    for distance, token in enumerate(reversed(tokens)):
        strength = 1.0
        if settings.penalty_range >= 0:
            beyond = distance - settings.penalty_range
            if beyond >= settings.penalty_decay:
                break
            strength = 1 - max(0, beyond) / settings.penalty_decay if settings.penalty_decay else 1.0
        if token not in met:
            met.add(token)
            repetition = 1 + (settings.repetition_penalty - 1) * strength
            out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
            out[token] -= settings.presence_penalty * strength
        out[token] -= settings.frequency_penalty * strength
    return out


@given(TOKENS, TOKENS, SETTINGS, st.integers(0, 2**32 - 1))
def test_penalties_equal_a_walk_over_the_history(
    prompt: list[int], reply: list[int], settings: Sampling, seed: int
) -> None:
    logits = (np.random.default_rng(seed).standard_normal(VOCABULARY) * 4).astype(np.float32)
    window = PenaltyWindow(settings.penalty_range, settings.penalty_decay, prompt)
    for length in range(len(reply) + 1):
        history = prompt + reply[:length]
        np.testing.assert_allclose(
            penalize(logits, window.seen(), settings), oracle(logits, history, settings), rtol=1e-5, atol=1e-5
        )
        if length < len(reply):
            window.push(reply[length])


def test_a_window_of_many_distinct_tokens() -> None:
    tokens = np.random.default_rng(0).integers(0, 5000, 6000).tolist()
    seen = PenaltyWindow(-1, 0, tokens).seen()
    counted = dict(zip(seen.ids.tolist(), seen.occurrences.tolist(), strict=True))
    ids, counts = np.unique(tokens, return_counts=True)
    assert counted == dict(zip(ids.tolist(), counts.tolist(), strict=True))


@pytest.mark.parametrize("row", PENALTIES, ids=lambda row: row.name)
def test_a_penalty_at_its_neutral_value_is_the_identity(row: object) -> None:
    logits = np.linspace(-2, 2, VOCABULARY)
    seen = PenaltyWindow(3, 2, [1, 2, 3, 4, 5, 5, 5]).seen()
    np.testing.assert_array_equal(row.apply(logits[seen.ids], seen, row.neutral), logits[seen.ids])  # type: ignore[attr-defined]


def test_neutral_settings_need_no_history() -> None:
    assert not active(Sampling())
    assert not active(Sampling(repetition_penalty=1.2, penalty_range=0))
    assert active(Sampling(repetition_penalty=1.2))
    assert active(Sampling(presence_penalty=-0.5, penalty_range=0, penalty_decay=5))


def test_the_sampler_counts_prompt_and_reply() -> None:
    logits = np.array([1.0, 0.9, 0.8], np.float32)
    sampler = Sampler(Sampling(temperature=0, presence_penalty=0.5), [0])
    assert sampler.sample(logits, 1) == 1
    sampler.observe(1)
    assert sampler.sample(logits, 2) == 2
