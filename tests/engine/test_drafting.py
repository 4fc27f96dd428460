"""Drafters: what they propose, and that they keep in step with a sequence that grows, shrinks and changes."""

import random
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl2chat.engine.drafting import (
    LONGEST,
    RECENT,
    SHORTEST,
    ModelDrafter,
    SuffixDrafter,
    check_draft_tokenizer,
    common_prefix,
)
from exl2chat.engine.embeddings import FIRST_ID
from exl2chat.engine.sampler import Sampler
from exl2chat.errors import UsageError
from exl2chat.settings import Sampling
from tests.engine.fake_model import VOCABULARY, FakeTokenizer
from tests.engine.speculative import RowsCache, RowsModel, plain, results_of, speculating

FEW = st.lists(st.integers(0, 2), max_size=80)


def followers(tokens: list[int], count: int) -> list[int]:
    """What SuffixDrafter should propose, in the plainest way."""
    best, start = 0, 0
    recent = [n for n in range(SHORTEST, len(tokens)) if tokens[n - SHORTEST : n] == tokens[-SHORTEST:]][-RECENT:]
    for end in recent:
        length = SHORTEST
        while length < min(end, LONGEST) and tokens[end - length - 1 : end] == tokens[-length - 1 :]:
            length += 1
        if length >= best:
            best, start = length, end
    going_on = list(tokens)
    if not best:
        return []
    for at in range(start, start + count):
        going_on.append(going_on[at])
    return going_on[len(tokens) :]


@given(FEW, st.integers(1, 9))
def test_the_longest_earlier_occurrence_goes_on(tokens: list[int], count: int) -> None:
    assert SuffixDrafter().propose(tokens, count) == followers(tokens, count)


@given(st.lists(st.tuples(st.integers(0, 10), FEW), max_size=12))
def test_a_sequence_that_grows_is_followed(changes: list[tuple[int, list[int]]]) -> None:
    subject, tokens = SuffixDrafter(), [1, 2]
    for back, added in changes:
        if back > 8:  # another conversation, or an edited one
            del tokens[1:]
        tokens += added
        assert all(token in (0, 1, 2) for token in subject.propose(tokens, 4))
        if back <= 8:
            assert len(subject.propose(tokens, 4)) in (0, 4)
    fresh = [9, 8, 7, *random.Random(1).choices(range(3), k=60)]
    assert subject.propose(fresh, 4) == followers(fresh, 4)
    for end in range(40, 60):
        assert subject.propose([*fresh, *fresh[3:end]], 4) == followers([*fresh, *fresh[3:end]], 4)


@given(FEW, st.lists(FEW, min_size=1, max_size=4))
def test_drafts_come_from_the_text_before_every_sequence_too(known: list[int], sequences: list[list[int]]) -> None:
    subject = SuffixDrafter(known)
    for tokens in sequences:
        for end in (len(tokens) // 2, len(tokens)):
            assert subject.propose(tokens[:end], 4) == followers([*known, *tokens[:end]], 4)


@given(st.lists(st.tuples(st.integers(0, 100), FEW), max_size=12), FEW)
def test_what_was_taken_back_is_forgotten(changes: list[tuple[int, list[int]]], known: list[int]) -> None:
    """As the tokens of a round are that came behind the end of a reply."""
    subject, tokens = SuffixDrafter(known), [1, 2]
    for kept, added in changes:
        tokens = [*tokens[:kept], 3 + len(tokens) % 2, *added]  # another token than there was
        assert subject.propose(tokens, 4) == followers([*known, *tokens], 4)


def test_the_text_before_every_sequence_is_not_copied_for_each_draft() -> None:
    tokens = list(range(1000))
    subject = SuffixDrafter(range(40_000))
    subject.propose(tokens, 4)
    tracemalloc.start()
    assert subject.propose([*tokens, 1000], 4) == [1001, 1002, 1003, 1004]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40_000  # bytes; a list of the text has eight times as many


def test_embeddings_are_no_drafts() -> None:
    """Their ids stand in a prompt, and nobody draws them."""
    drafter = SuffixDrafter()
    assert drafter.propose([1, 2, 3, 4, FIRST_ID, 5, 1, 2, 3], 4) == [4]
    assert drafter.propose([1, 2, 3, FIRST_ID, 5, 1, 2, 3], 4) == []


@given(FEW, FEW)
def test_common_prefixes(first: list[int], second: list[int]) -> None:
    plainly = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    assert common_prefix(first, second) == (min(len(first), len(second)) if plainly is None else plainly)


# The draft model


class Blurred(RowsModel):
    """The logits of RowsModel with some noise."""

    def logits(self, tokens: list[int]) -> np.ndarray:
        exact = super().logits(tokens)
        noise = np.random.default_rng(tokens[-1] + len(tokens)).standard_normal(len(exact)).astype(np.float32)
        return exact + 0.3 * noise


def accepted_of(monkeypatch: pytest.MonkeyPatch, draft: RowsModel, settings: Sampling, greedy: bool = False) -> float:
    """The share of the drafts that came true."""

    class Greedy(ModelDrafter):
        def begin(self, chooser: object) -> bool:  # noqa: ARG002
            likeliest = SimpleNamespace(guess=lambda logits, _position: int(logits.argmax()))
            return super().begin(likeliest)  # type: ignore[arg-type]

    drafter = (Greedy if greedy else ModelDrafter)(draft, RowsCache(), VOCABULARY)  # type: ignore[arg-type]
    subject = speculating(monkeypatch, drafter, RowsModel(), most=4)
    drafted = accepted = 0
    for prompt in range(10):
        subject.begin_stream_ex([prompt, 2, 3], settings, max_new_tokens=30)
        results_of(subject)
        drafted += subject.speculated.drafted
        accepted += subject.speculated.accepted
    return accepted / drafted


@pytest.mark.parametrize(
    "settings",
    [
        Sampling(temperature=1.5, top_p=1, seed=4),
        Sampling(mirostat_tau=3.0, xtc_probability=0.5, xtc_ignore_tokens=(), seed=5),
    ],
)
def test_a_draft_model_that_agrees_is_always_right(monkeypatch: pytest.MonkeyPatch, settings: Sampling) -> None:
    assert accepted_of(monkeypatch, RowsModel(), settings) > 0.93  # not the last of a reply


def test_drafts_with_the_replys_noise_come_true_more_often_than_the_likeliest_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Sampling(temperature=1.5, top_p=1, seed=4)
    coupled = accepted_of(monkeypatch, Blurred(), settings)
    greedy = accepted_of(monkeypatch, Blurred(), settings, greedy=True)
    assert coupled > 0.5
    assert coupled > 1.5 * greedy


@pytest.mark.parametrize("draft", [RowsModel(), Blurred()])
def test_the_draft_cache_holds_the_sequence_without_a_hole(monkeypatch: pytest.MonkeyPatch, draft: RowsModel) -> None:
    cache, settings = RowsCache(), Sampling(temperature=1.0, seed=8)
    drafter = ModelDrafter(draft, cache, VOCABULARY)  # type: ignore[arg-type]
    subject = speculating(monkeypatch, drafter, RowsModel(), most=3)
    for prompt in ([1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 9]):
        off = plain(RowsModel())
        for generator in (off, subject):
            generator.begin_stream_ex(prompt, settings, max_new_tokens=25)
            results_of(generator)
        assert subject.tokens == off.tokens
        shared = common_prefix(cache.memory[: cache.length], subject.tokens)
        assert shared > len(subject.tokens) - 6
        # The next drafts begin with the logits of the whole sequence: nothing of it is missing or stale.
        drafter.propose(subject.tokens, 2)
        assert cache.memory[: len(subject.tokens)] == subject.tokens


def test_every_token_goes_through_the_draft_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = RowsModel()
    drafter = ModelDrafter(draft, RowsCache(), VOCABULARY)  # type: ignore[arg-type]
    subject = speculating(monkeypatch, drafter, RowsModel(), most=3)
    tokens = list(range(1200))
    subject.begin_stream_ex([token % 256 for token in tokens[:700]], Sampling(temperature=1, seed=2), max_new_tokens=30)
    results_of(subject)
    assert sum(draft.calls) <= 730
    assert max(draft.calls) == 512


def test_a_draft_cache_that_is_full_or_that_others_used_spoils_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, settings = RowsCache(12), Sampling(temperature=1.0, seed=8)
    subject = speculating(monkeypatch, ModelDrafter(RowsModel(), cache, VOCABULARY), RowsModel(), most=3)  # type: ignore[arg-type]
    off = plain(RowsModel())
    for used in (None, 4):
        if used is not None:
            cache.length, cache.memory[:used] = used, [77] * used
        for generator in (off, subject):
            generator.begin_stream_ex([1, 2, 3], settings, max_new_tokens=25)
            results_of(generator)
        assert subject.tokens == off.tokens
        assert 5 < subject.speculated.accepted < 12


def test_draft_logits_that_are_no_numbers_end_the_drafts_and_not_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(RowsModel):
        def logits(self, tokens: list[int]) -> np.ndarray:
            return super().logits(tokens) if len(tokens) < 10 else np.full(VOCABULARY, np.nan, np.float32)

    settings = Sampling(temperature=1.0, seed=8)
    subject = speculating(monkeypatch, ModelDrafter(Broken(), RowsCache(), VOCABULARY), RowsModel())  # type: ignore[arg-type]
    off = plain(RowsModel())
    for generator in (off, subject):
        generator.begin_stream_ex([1, 2, 3], settings, max_new_tokens=25)
        results_of(generator)
    assert subject.tokens == off.tokens
    assert 3 <= subject.speculated.drafted <= 8


# The vocabulary


def test_a_draft_model_with_other_tokens_is_refused_by_name() -> None:
    class Other(FakeTokenizer):
        def token_of(self, token: int) -> str:
            return "other" if token == 17 else super().token_of(token)

    for tokenizer in (FakeTokenizer(), Other(), FakeTokenizer(100)):
        tokenizer.vocab_size = tokenizer.size  # type: ignore[attr-defined]
    ours, larger = FakeTokenizer(100), FakeTokenizer()
    ours.vocab_size = 100  # type: ignore[attr-defined]
    check_draft_tokenizer(larger, ours, "small")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="small has another vocabulary: its token 17 is 'other', not '<17>'"):
        check_draft_tokenizer(Other(), ours, "small")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="its token 50 is '', not '<50>'"):
        check_draft_tokenizer(FakeTokenizer(50), ours, "small")  # type: ignore[arg-type]


def test_a_sampler_that_drafted_draws_what_it_would_have_drawn() -> None:
    """The drafts come from the reply's own sampler: it must not remember them."""
    settings = Sampling(temperature=1.0, mirostat_tau=2.0, repetition_penalty=1.2, seed=1)
    logits = np.random.default_rng(1).standard_normal((8, 50)).astype(np.float32)
    quiet, drafting = Sampler(settings, [1]), Sampler(settings, [1])
    for position, row in enumerate(logits, 1):
        drafting.sample(-row, position)
        expected = quiet.sample(row, position)
        assert drafting.sample(row, position) == expected
        for sampler in (quiet, drafting):
            sampler.observe(expected)
