"""Speculation changes how many steps a reply takes, and nothing about the reply."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exl2chat.engine.cache import KVCache
from exl2chat.engine.drafting import Drafter, ForcedDrafter, SuffixDrafter
from exl2chat.engine.generators import streaming
from exl2chat.engine.generators.streaming import StreamingGenerator
from exl2chat.engine.paced_drafts import PacedDrafts, Source
from exl2chat.engine.sampler import Sampler
from exl2chat.engine.speculation import SpeculativeLogits
from exl2chat.engine.step_logits import StepLogits
from exl2chat.engine.transformer import Transformer
from exl2chat.errors import UsageError
from exl2chat.model.checkpoint import open_checkpoint
from exl2chat.progress import silent
from exl2chat.settings import Sampling
from tests.engine.distributions import chi_square, softmax
from tests.engine.fake_model import END, FakeTokenizer, saying
from tests.engine.speculative import (
    DRAFTERS,
    Always,
    Guided,
    RowsCache,
    RowsModel,
    plain,
    results_of,
    speculating,
)

SETTINGS = {
    "greedy": Sampling(temperature=0),
    "warm": Sampling(temperature=0.8, top_k=40, top_p=0.9, seed=3),
    "hot": Sampling(temperature=2.0, top_p=1.0, seed=4),
    "penalties": Sampling(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5, penalty_range=9, seed=5),
    "mirostat": Sampling(temperature=1.0, mirostat_tau=3.0, seed=6),
    "dry and xtc": Sampling(temperature=1.0, dry_multiplier=1.0, dry_breakers=(), xtc_probability=0.5,
                            xtc_ignore_tokens=(), seed=7),
}  # fmt: skip
GOLDEN = Path(__file__).parent.parent / "data" / "golden"
PROMPT = [1, 2, 3, 1, 2]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_result_is_what_it_is_without_drafts(
    monkeypatch: pytest.MonkeyPatch, kind: str, settings: Sampling
) -> None:
    for most in (1, 2, 5):
        off = plain(RowsModel())
        off.begin_stream_ex(PROMPT, settings, max_new_tokens=40)
        expected = results_of(off)
        drafter = DRAFTERS[kind]()
        drafter.sequence = off.tokens
        on = speculating(monkeypatch, drafter, RowsModel(), most=most)
        on.begin_stream_ex(PROMPT, settings, max_new_tokens=40)
        assert results_of(on) == expected
        assert (on.speculated.accepted > 0) is (kind != "wrong")


@given(seed=st.integers(0, 2**32), drafted=st.integers(0, 2**32), most=st.integers(1, 8))
def test_the_reply_of_a_seed_does_not_depend_on_what_is_drafted(seed: int, drafted: int, most: int) -> None:
    chance, settings = random.Random(drafted), Sampling(temperature=1.0, top_k=2, seed=seed)

    class Chance(Guided):
        def propose(self, tokens: list[int], count: int) -> list[int]:  # type: ignore[override]
            return [chance.choice((t, 255 - t)) for t in super().propose(tokens, chance.randint(0, count))]

    off, drafter = plain(RowsModel()), Chance(lambda token: token)
    off.begin_stream_ex(PROMPT, settings, max_new_tokens=20)
    expected = results_of(off)
    drafter.sequence = off.tokens
    with pytest.MonkeyPatch.context() as monkeypatch:
        on = speculating(monkeypatch, drafter, RowsModel(), most=most)
        on.begin_stream_ex(PROMPT, settings, max_new_tokens=20)
        assert results_of(on) == expected


@pytest.mark.parametrize("most", [1, 3, 7])
def test_right_drafts_save_steps_and_wrong_ones_cost_none(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    off = plain(RowsModel())
    off.begin_stream_ex(PROMPT, SETTINGS["warm"], max_new_tokens=48)
    results_of(off)
    for kind, steps in (("right", 48 // (1 + most)), ("wrong", 48)):
        model, drafter = RowsModel(), DRAFTERS[kind]()
        drafter.sequence = off.tokens
        on = speculating(monkeypatch, drafter, model, most=most)
        on.begin_stream_ex(PROMPT, SETTINGS["warm"], max_new_tokens=48)
        model.calls.clear()
        results_of(on)
        assert len(model.calls) == steps
        right = kind == "right"
        assert on.speculated.accepted == (48 - steps if right else 0)
        assert on.speculated.drafted >= on.speculated.accepted


@pytest.mark.parametrize("limit", range(1, 12))
@pytest.mark.parametrize("capacity", [9, 14, 100])
def test_limit_and_context_end_a_reply_within_a_run_of_drafts(
    monkeypatch: pytest.MonkeyPatch, limit: int, capacity: int
) -> None:
    off = plain(RowsModel(), capacity)
    off.begin_stream_ex(PROMPT, SETTINGS["hot"], max_new_tokens=limit)
    expected = results_of(off)
    drafter = Guided(lambda token: token)
    drafter.sequence = [*off.tokens, *range(50)]
    on = speculating(monkeypatch, drafter, RowsModel(), capacity)
    on.begin_stream_ex(PROMPT, SETTINGS["hot"], max_new_tokens=limit)
    assert results_of(on) == expected
    assert on.tokens == off.tokens


@pytest.mark.parametrize("text", ["", "a", "abc stop more", "one stop", "fiveX", "abcdefgh"])
def test_stop_ids_and_stop_strings_end_it_too(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    def model() -> RowsModel:
        return RowsModel(saying(text, len(PROMPT))._reply)

    streams = []
    drafter = Guided(lambda token: token)
    drafter.sequence = [*PROMPT, *text.encode(), END, *b"never said"]
    for subject in (plain(model()), speculating(monkeypatch, drafter, model())):
        subject.set_stop_conditions([END, "stop"])
        subject.begin_stream_ex(PROMPT, SETTINGS["greedy"])
        streams.append(results_of(subject))
    assert streams[0] == streams[1]


@pytest.mark.parametrize("steps", range(10))
def test_an_abort_at_any_step_leaves_a_cache_to_go_on_from(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    off = plain(RowsModel())
    off.begin_stream_ex(PROMPT, SETTINGS["warm"], max_new_tokens=20)
    results_of(off)
    drafter, model, stopped = Guided(lambda token: token), RowsModel(), False
    drafter.sequence = off.tokens
    on = speculating(monkeypatch, drafter, model)
    on.begin_stream_ex(PROMPT, SETTINGS["warm"], abort=lambda: stopped)
    for _ in range(steps):
        on.stream_ex()
    stopped = True
    assert on.stream_ex().stop_reason == "stopped"
    model.calls.clear()
    start = on.begin_stream_ex(on.tokens, SETTINGS["warm"], max_new_tokens=20 - steps)
    assert start.cached_tokens == len(PROMPT) + steps - 1
    assert not model.calls
    results_of(on)
    assert on.tokens == off.tokens


def test_tokens_that_were_taken_back_are_computed_again() -> None:
    """What a banned string does: the sequence shrinks in the middle of a run, and another token takes its place."""
    model, cache, drafter = RowsModel(), RowsCache(), Guided(lambda token: token)
    drafter.sequence = [*PROMPT, 10, 11, 12, 13, 14]
    drafts = PacedDrafts([Source(drafter, Always(4))])  # type: ignore[arg-type]
    logits = SpeculativeLogits(StepLogits(model, cache, 260), cache, drafts, 100)  # type: ignore[arg-type]
    for tokens in (PROMPT, [*PROMPT, 10], [*PROMPT, 10, 11], [*PROMPT, 10], [*PROMPT, 20], [*PROMPT, 20, 11]):
        cache.truncate(len(tokens) - 1)
        logits.queue(tokens)
        np.testing.assert_array_equal(logits.take(), model.logits(list(tokens)))
        assert cache.length == len(tokens)


def test_a_failure_within_a_round_costs_one_reply_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(RowsModel):
        def forward(self, tokens: torch.Tensor, cache: RowsCache, last_only: bool = False) -> torch.Tensor:
            if len(self.calls) == 3:
                self.calls.append(0)
                raise RuntimeError("out of memory")
            return super().forward(tokens, cache, last_only)

    off = plain(RowsModel())
    off.begin_stream_ex(PROMPT, SETTINGS["warm"], max_new_tokens=20)
    results_of(off)
    drafter = DRAFTERS["random"]()
    drafter.sequence = off.tokens
    on = speculating(monkeypatch, drafter, Failing())
    on.begin_stream_ex(PROMPT, SETTINGS["warm"], max_new_tokens=20)
    with pytest.raises(RuntimeError):
        results_of(on)
    on.begin_stream_ex(PROMPT, SETTINGS["warm"], max_new_tokens=20)
    results_of(on)
    assert on.tokens == off.tokens


@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_the_distribution_of_every_token_is_that_of_the_model(kind: str) -> None:
    """Three tokens of five, each with the probabilities of its model, over 4,000 seeds: 124 degrees of freedom, whose
    chi-square exceeds 201 once in 100,000 times. The wrong drafter always proposes token 0, the right one the reply."""

    class Small(RowsModel):
        def logits(self, tokens: list[int]) -> np.ndarray:
            return np.sin(np.arange(5) * (1.0 + len(tokens)) + tokens[-1]).astype(np.float32) * 2

    def joint() -> np.ndarray:
        expected, model = np.zeros((5, 5, 5)), Small()
        for a, b, c in np.ndindex(5, 5, 5):
            rows = [softmax(model.logits(tokens)) for tokens in ([1], [1, a], [1, a, b])]
            expected[a, b, c] = rows[0][a] * rows[1][b] * rows[2][c]
        return expected

    counts, accepted = np.zeros((5, 5, 5)), 0
    for seed in range(4000):
        sampler = Sampler(Sampling(temperature=1.0, top_p=1.0, seed=seed), [1])
        tokens, cache = [1], RowsCache(4)
        drafter = Guided(lambda token: token)
        drafter.sequence = [1, 0, 0, 0] if kind == "wrong" else [1, seed % 5, seed // 5 % 5, 0]
        drafts = PacedDrafts([Source(drafter, Always(3))])  # type: ignore[arg-type]
        logits = SpeculativeLogits(StepLogits(Small(), cache, 5), cache, drafts, 4)  # type: ignore[arg-type]
        while len(tokens) < 4:
            logits.queue(tokens)
            tokens.append(sampler.sample(logits.take(), len(tokens)))
        counts[tuple(tokens[1:])] += 1
        accepted += drafts.statistics.accepted
    assert accepted > 400
    assert chi_square(counts, joint() * 4000) < 201


# On a real model


@pytest.fixture(scope="module")
def model() -> Transformer:
    checkpoint = open_checkpoint(GOLDEN / "llama-fp16")
    return Transformer.load(checkpoint, torch.device("cpu"), torch.float32, silent)


class Numbers(FakeTokenizer):
    """A tokenizer whose every id is a token."""

    eos_ids = frozenset[int]()


def made(model: Transformer, **options: object) -> StreamingGenerator:
    return StreamingGenerator(model, model.new_cache(256), Numbers(model.config.vocab_size), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("speculate", ["ngram", "draft"])
def test_a_transformer_in_float32_says_the_same_with_drafts(
    monkeypatch: pytest.MonkeyPatch, model: Transformer, speculate: str
) -> None:
    monkeypatch.setattr("exl2chat.engine.decoders.Pace", Always)
    accepted = 0
    off, drafts = made(model, speculate="off"), {"draft_model": model} if speculate == "draft" else {}
    on = made(model, speculate=speculate, num_speculative_tokens=4, **drafts)
    for seed in range(12):
        settings = Sampling(temperature=0.3 * (seed % 4), seed=seed, allowed_tokens=(5, 6, 7))
        for subject in (off, on):
            subject.begin_stream_ex([5, 6, 7, 5, 6, 7, 5], settings, max_new_tokens=40)
            results_of(subject)
        assert on.tokens == off.tokens
        accepted += on.speculated.accepted
    assert accepted > 12


def test_rows_of_one_step_are_those_of_single_steps_within_rounding(model: Transformer) -> None:
    """On the CPU torch sums one row and several in another order: what 'identical' may mean here."""
    ids = torch.arange(20) % model.config.vocab_size
    single, several = (KVCache(model.config, 32, model.device, model.dtype) for _ in range(2))
    rows = torch.cat([model.forward(ids[n : n + 1], single) for n in range(20)])
    together = torch.cat([model.forward(chunk, several) for chunk in torch.split(ids, 5)])
    torch.testing.assert_close(together, rows, rtol=1e-4, atol=1e-4)


# Which drafter


def test_ngrams_are_drafted_by_default_only_where_rows_come_cheap(
    monkeypatch: pytest.MonkeyPatch, model: Transformer
) -> None:
    chosen: list[tuple[Drafter, ...]] = []
    usual = streaming.choose_drafters
    monkeypatch.setattr(streaming, "choose_drafters", lambda *given: chosen.append(usual(*given)) or chosen[-1])  # type: ignore[func-returns-value]
    made(model)
    plain(RowsModel())
    StreamingGenerator(RowsModel(), RowsCache(), FakeTokenizer())  # type: ignore[arg-type]
    assert [type(drafter) for drafter in chosen[0]] == [ForcedDrafter, SuffixDrafter]
    assert chosen[1:] == [(), ()]


def test_a_draft_model_must_know_every_token(model: Transformer) -> None:
    with pytest.raises(UsageError, match=f"draft model has 260 tokens and the model {model.config.vocab_size}"):
        made(model, draft_model=RowsModel(), draft_cache=RowsCache())


def test_to_speculate_with_a_draft_model_takes_one(model: Transformer) -> None:
    with pytest.raises(UsageError, match="no draft model"):
        made(model, speculate="draft")


@pytest.mark.parametrize("count", [0, -1])
def test_to_speculate_takes_a_token(model: Transformer, count: int) -> None:
    with pytest.raises(UsageError, match="num_speculative_tokens"):
        made(model, num_speculative_tokens=count)
