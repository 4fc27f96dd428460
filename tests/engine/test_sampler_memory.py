"""What a sampler remembers of its own conversation and of no other: DRY, mirostat; and when XTC strikes."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl2chat.engine.sampler import Sampler
from exl2chat.engine.samplers.dry import Passages
from exl2chat.engine.samplers.vocabulary import Vocabulary
from exl2chat.model.folder import open_folder
from exl2chat.model.tokenizer import open_tokenizer
from exl2chat.settings import Sampling
from tests.engine.distributions import of_probabilities, softmax

MODEL = Path(__file__).parents[1] / "data" / "golden" / "llama-6.0bpw-exl2"
NEUTRAL = Sampling(temperature=1.0, top_p=1.0, seed=0)
TOKENS = st.lists(st.integers(0, 5), max_size=60)
DRY = st.builds(
    Sampling,
    dry_multiplier=st.sampled_from([0.5, 0.8, 3.0]),
    dry_base=st.sampled_from([1.0, 1.2, 1.75]),
    dry_allowed_length=st.integers(1, 4),
    dry_range=st.sampled_from([0, 1, 5, 20, 1000]),
    dry_max_length=st.sampled_from([1, 3, 20]),
)


def with_settings(**values: object) -> Sampling:
    return msgspec.structs.replace(NEUTRAL, **values)


# DRY


def dry_oracle(tokens: list[int], breakers: set[int], settings: Sampling) -> dict[int, float]:
    """Every token that came after an earlier copy of the end of the text, and its penalty for the longest such copy."""
    tokens = tokens[-settings.dry_range :] if settings.dry_range else tokens
    longest: dict[int, int] = {}
    for start in range(1, len(tokens)):
        length = 0
        while length < min(start, settings.dry_max_length):
            before, end = tokens[start - 1 - length], tokens[len(tokens) - 1 - length]
            if before != end or before in breakers:
                break
            length += 1
        if tokens[start] not in breakers:
            longest[tokens[start]] = max(longest.get(tokens[start], 0), length)
    return {
        token: min(settings.dry_multiplier * settings.dry_base ** (length - settings.dry_allowed_length), 100)
        for token, length in longest.items()
        if length >= settings.dry_allowed_length
    }


def penalties(settings: Sampling, tokens: list[int], breakers: set[int] = frozenset()) -> dict[int, float]:  # type: ignore[assignment]
    ids, amounts = Passages(settings, frozenset(breakers), tokens).penalties()
    return dict(zip(ids.tolist(), amounts.tolist(), strict=True))


@given(TOKENS, TOKENS, st.sets(st.integers(0, 5), max_size=2), DRY)
def test_dry_equals_a_search_through_the_whole_text(
    prompt: list[int], reply: list[int], breakers: set[int], settings: Sampling
) -> None:
    passages = Passages(settings, frozenset(breakers), prompt)
    for length in range(len(reply) + 1):
        ids, amounts = passages.penalties()
        found = dict(zip(ids.tolist(), amounts.tolist(), strict=True))
        assert found == pytest.approx(dry_oracle(prompt + reply[:length], breakers, settings))
        if length < len(reply):
            passages.push(reply[length])


def test_a_passage_that_was_said_often_is_penalised_for_its_length_alone() -> None:
    """B-4: there the penalty is multiplied by how often the passage was continued in this way."""
    settings = Sampling(dry_multiplier=0.8, dry_base=2.0, dry_allowed_length=2)
    once, often = [1, 2, 3, 4, 9, 1, 2, 3], [1, 2, 3, 4, 9] * 5 + [1, 2, 3]
    assert penalties(settings, once) == {4: 0.8 * 2}
    assert penalties(msgspec.structs.replace(settings, dry_max_length=3), often) == {4: 0.8 * 2}


def test_dry_knows_nothing_of_another_conversation_with_the_same_settings() -> None:
    """B-4: there it remembers in the settings, and penalises what another or an edited conversation said."""
    settings = with_settings(temperature=0.0, dry_multiplier=5.0)
    logits = np.array([0, 0, 0, 0, 2, 1], np.float32)
    first = Sampler(settings, [1, 2, 3, 4, 1, 2, 3])
    assert first.sample(logits, 7) == 5
    for token in (1, 2, 3, 4, 1, 2, 3):
        first.observe(token)
    assert Sampler(settings, [1, 2, 3]).sample(logits, 3) == 4
    assert Sampler(settings, [1, 2, 0, 4, 1, 2, 3]).sample(logits, 7) == 4


def test_dry_counts_the_prompt_and_the_reply() -> None:
    logits = np.array([0, 0, 0, 0, 2, 1], np.float32)
    sampler = Sampler(with_settings(temperature=0.0, dry_multiplier=5.0), [1, 2, 3, 4, 1, 2])
    sampler.observe(3)
    assert sampler.sample(logits, 7) == 5


def test_a_passage_of_any_length_leaves_something_to_draw() -> None:
    settings = with_settings(dry_multiplier=100.0, dry_base=10.0, dry_max_length=1000)
    token = Sampler(settings, [1] * 900).sample(np.array([0, 5], np.float32), 900)
    assert token == 0
    assert (
        Sampler(msgspec.structs.replace(settings, allowed_tokens=(1,)), [1] * 900).sample(np.zeros(2, np.float32), 9)
        == 1
    )


def test_tokens_beyond_the_logits_do_no_harm() -> None:
    assert Sampler(with_settings(dry_multiplier=1.0), [1, 2, 9, 1, 2]).sample(np.array([0, 5], np.float32), 5) in (0, 1)


@pytest.mark.parametrize("tokens", [[], [1]])
def test_dry_of_a_text_that_hardly_began(tokens: list[int]) -> None:
    assert penalties(Sampling(dry_multiplier=1.0, dry_allowed_length=1), tokens) == {}


# Which tokens are special to DRY and XTC


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(open_tokenizer(open_folder(MODEL)))


def test_breakers_and_structure_are_found_in_the_texts_of_the_tokens(vocabulary: Vocabulary) -> None:
    tokenizer = open_tokenizer(open_folder(MODEL))
    ids = {text: tokenizer.encode(text)[-1] for text in ("a", ".", '"', "\n", "(", " the")}
    assert {ids["."], ids['"'], ids["\n"], ids["("], *tokenizer.special_ids} <= vocabulary.breakers
    assert not {ids["a"], ids[" the"]} & vocabulary.breakers
    assert {ids["\n"], *tokenizer.special_ids} <= vocabulary.structure
    assert not {ids["."], ids["a"]} & vocabulary.structure


def test_the_settings_say_what_breaks_a_passage_else_the_vocabulary_does(vocabulary: Vocabulary) -> None:
    full_stop = min(vocabulary.breakers - vocabulary.structure)
    words = sorted(set(range(200)) - vocabulary.breakers)[:3]
    text = [words[0], full_stop, words[1], words[2], words[0], full_stop, words[1]]
    logits = np.zeros(300, np.float32)
    logits[words[2]] = 1

    def best(**values: object) -> int:
        return Sampler(with_settings(temperature=0.0, dry_multiplier=9.0, **values), text, vocabulary).sample(logits, 7)

    assert best() == words[2]
    assert best(dry_breakers=()) != words[2]
    assert best(dry_breakers=(words[1],)) == words[2]


# XTC


def test_xtc_strikes_as_often_as_it_should_and_never_twice_differently() -> None:
    logits = of_probabilities(0.4, 0.35, 0.2, 0.05).logits
    sampler = Sampler(with_settings(xtc_probability=0.3, seed=5), [])
    struck = [len(sampler.candidates(logits, position).ids) == 2 for position in range(4000)]
    assert abs(sum(struck) - 1200) < 4 * math.sqrt(4000 * 0.3 * 0.7)
    assert struck == [len(sampler.candidates(logits, position).ids) == 2 for position in range(4000)]


def test_xtc_leaves_line_feeds_and_special_tokens_alone_unless_told_otherwise(vocabulary: Vocabulary) -> None:
    end = min(vocabulary.structure)
    others = sorted(set(range(100)) - vocabulary.structure)[:2]
    logits = np.full(300, -50, np.float32)
    logits[[end, *others]] = np.log([0.5, 0.3, 0.2]).astype(np.float32)
    settings = with_settings(xtc_probability=1.0)

    def left(settings: Sampling) -> set[int]:
        kept = Sampler(settings, [], vocabulary).candidates(logits, 0)
        return set(kept.ids[softmax(kept.logits) > 0.01].tolist())

    assert left(settings) == {end, others[1]}
    assert left(msgspec.structs.replace(settings, xtc_ignore_tokens=())) == {others[1]}
    assert left(msgspec.structs.replace(settings, xtc_ignore_tokens=(others[0],))) == {others[0], others[1]}


# Mirostat


@pytest.mark.parametrize("start", [None, 1.5])
def test_mirostat_moves_its_limit_by_the_error_of_the_surprise(start: float | None) -> None:
    rng = np.random.default_rng(0)
    bits, rate = 2.0, 0.3
    limit = 2 * bits if start is None else start
    sampler = Sampler(with_settings(mirostat_tau=bits, mirostat_eta=rate, mirostat_mu=start), [])
    for position in range(50):
        logits = (rng.standard_normal(40) * 2).astype(np.float32)
        surprise = -np.log2(softmax(logits))
        kept = sampler.candidates(logits, position)
        assert kept.ids.tolist() == np.flatnonzero(surprise <= max(limit, surprise.min())).tolist()
        token = sampler.sample(logits, position)
        sampler.observe(token)
        limit -= rate * (surprise[token] - bits)


def test_mirostat_holds_the_mean_surprise() -> None:
    logits = np.sort(np.random.default_rng(1).standard_normal(500) * 2).astype(np.float32)
    surprise = -np.log2(softmax(logits))
    for bits in (3.5, 5.0):
        sampler, total = Sampler(with_settings(mirostat_tau=bits, seed=4), []), 0.0
        for position in range(2000):
            token = sampler.sample(logits, position)
            sampler.observe(token)
            total += surprise[token]
        assert total / 2000 == pytest.approx(bits, abs=0.1)


def test_mirostat_begins_every_reply_alike() -> None:
    """B-4's kin: there the limit is kept in the settings, so that a reply depends on the one before."""
    settings, logits = with_settings(mirostat_tau=4.0, mirostat_eta=1.0), np.linspace(0, 1, 64, dtype=np.float32)
    used = Sampler(settings, [])
    for position in range(4):
        used.observe(used.sample(logits, position))
    assert len(used.candidates(logits, 4).ids) < 64
    assert len(Sampler(settings, []).candidates(logits, 4).ids) == 64


def test_mirostat_does_not_learn_from_tokens_that_it_was_not_asked_for() -> None:
    sampler = Sampler(with_settings(mirostat_tau=4.0, mirostat_eta=1.0), [])
    logits = np.linspace(0, 1, 64, dtype=np.float32)
    token = sampler.sample(logits, 0)
    for _ in range(20):
        sampler.observe(token)
    assert len(sampler.candidates(logits, 21).ids) > 1


def test_mirostat_survives_a_token_that_it_did_not_offer() -> None:
    sampler = Sampler(with_settings(mirostat_tau=2.0, banned_tokens=(3,)), [])
    logits = np.array([1, 0, -np.inf, 9], np.float32)
    for token in (3, 2, 99):
        sampler.sample(logits, 0)
        sampler.observe(token)
    assert sampler.candidates(logits, 1).ids.tolist() == [0, 1]
