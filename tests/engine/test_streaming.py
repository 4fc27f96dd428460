"""The streaming generator over a model of hashes: a fault in cache or sequence changes every later token."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exl2chat.engine.generators.streaming import StreamingGenerator, StreamResult
from exl2chat.engine.sampler import Candidates, draw
from exl2chat.engine.transformer import PREFILL_CHUNK
from exl2chat.errors import ChatError, ContextError, UsageError
from exl2chat.settings import Sampling
from tests.engine.fake_model import END, MARK, OTHER_END, FakeCache, FakeModel, FakeTokenizer, saying

GREEDY = Sampling(temperature=0)
PROMPTS = st.lists(st.integers(0, 3), min_size=1, max_size=12)


def generator(model: FakeModel | None = None, capacity: int = 1000) -> StreamingGenerator:
    return StreamingGenerator(model or FakeModel(), FakeCache(capacity), FakeTokenizer())  # type: ignore[arg-type]


def stream(subject: StreamingGenerator) -> Iterator[StreamResult]:
    while True:
        result = subject.stream_ex()
        yield result
        if result.eos:
            return


def text_of(results: list[StreamResult]) -> str:
    return "".join(result.text for result in results)


def tokens_of(results: list[StreamResult]) -> list[int]:
    return [token for result in results for token in result.tokens]


def reply(subject: StreamingGenerator, prompt: list[int], count: int, settings: Sampling = GREEDY) -> list[int]:
    subject.begin_stream_ex(prompt, settings, max_new_tokens=count)
    return tokens_of(list(stream(subject)))


# Tokens and the cache


def test_a_greedy_reply_is_the_argmax_of_every_step() -> None:
    model, prompt = FakeModel(), [5, 6, 7]
    expected = list(prompt)
    for _ in range(20):
        expected.append(int(model.logits(expected).argmax()))
    assert reply(generator(), prompt, 20) == expected[3:]


@given(PROMPTS, PROMPTS, st.integers(1, 6))
def test_a_second_prompt_reuses_the_longest_common_prefix_and_nothing_else(
    first: list[int], second: list[int], count: int
) -> None:
    model = FakeModel()
    subject = generator(model)
    before = [*first, *reply(subject, first, count)][:-1]
    shared = 0
    while shared < min(len(before), len(second) - 1) and before[shared] == second[shared]:
        shared += 1
    model.calls.clear()
    start = subject.begin_stream_ex(second, GREEDY, max_new_tokens=count)
    assert (start.prompt_tokens, start.cached_tokens) == (len(second), shared)
    assert sum(model.calls) == len(second) - 1 - shared
    assert tokens_of(list(stream(subject))) == reply(generator(), second, count)


def test_every_token_of_a_conversation_is_computed_once() -> None:
    model = FakeModel()
    subject = generator(model)
    conversation = [1, 2, 3]
    for turn in range(5):
        conversation += reply(subject, conversation, 10)
        conversation += [turn, 9, 9]
    assert sum(model.calls) == len(conversation) - 4


def test_a_step_adds_to_the_sequence_and_copies_nothing() -> None:
    subject = generator()
    subject.begin_stream_ex([1, 2, 3], GREEDY)
    sequence = subject.tokens
    for _ in range(5):
        subject.stream_ex()
    assert subject.tokens is sequence
    assert len(sequence) == 8


@pytest.mark.parametrize("steps", range(8))
def test_an_abort_at_any_step_leaves_a_cache_to_go_on_from(steps: int) -> None:
    subject, prompt = generator(), [5, 6, 7]
    whole = reply(generator(), prompt, 20)
    stopped = False
    subject.begin_stream_ex(prompt, GREEDY, abort=lambda: stopped)
    got = [token for _ in range(steps) for token in subject.stream_ex().tokens]
    stopped = True
    last = subject.stream_ex()
    assert (last.stop_reason, last.text, last.reply_tokens) == ("stopped", "", steps)
    assert got == whole[:steps]
    start = subject.begin_stream_ex([*prompt, *got], GREEDY, max_new_tokens=20 - steps)
    assert start.cached_tokens >= len(prompt) + steps - 1
    assert [*got, *tokens_of(list(stream(subject)))] == whole


@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_an_abort_while_the_prompt_is_read_keeps_what_was_read(chunks: int) -> None:
    prompt = [random.Random(1).randrange(256) for _ in range(3 * PREFILL_CHUNK)]
    model = FakeModel()
    subject = generator(model, capacity=4 * PREFILL_CHUNK)
    subject.begin_stream_ex(prompt, GREEDY, abort=lambda: len(model.calls) >= chunks)
    assert subject.stream_ex().stop_reason == "stopped"
    start = subject.begin_stream_ex(prompt, GREEDY, max_new_tokens=3)
    assert start.cached_tokens == chunks * PREFILL_CHUNK
    assert tokens_of(list(stream(subject))) == reply(generator(capacity=4 * PREFILL_CHUNK), prompt, 3)


@pytest.mark.parametrize("failing_call", [1, 2, 3])
def test_a_failure_in_the_model_costs_one_reply_and_no_more(failing_call: int) -> None:
    class Failing(FakeModel):
        def forward(self, tokens: torch.Tensor, cache: FakeCache, last_only: bool = False) -> torch.Tensor:
            if len(self.calls) + 1 == failing_call:
                self.calls.append(0)
                raise RuntimeError("out of memory")
            return super().forward(tokens, cache, last_only)

    subject = generator(Failing())
    with pytest.raises(RuntimeError):
        reply(subject, [1, 2, 3], 5)
    assert reply(subject, [1, 2, 4], 5) == reply(generator(), [1, 2, 4], 5)


@pytest.mark.parametrize("others", [[], [7, 7], [7] * 30])
def test_a_cache_that_others_used_is_not_trusted(others: list[int]) -> None:
    cache = FakeCache()
    cache.tokens = [7, 7, 7]
    subject = StreamingGenerator(FakeModel(), cache, FakeTokenizer())  # type: ignore[arg-type]
    for _ in range(2):
        assert reply(subject, [1, 2, 9], 5) == reply(generator(), [1, 2, 9], 5)
        cache.tokens = list(others)


def test_streams_of_two_generators_take_turns_on_one_cache_at_every_token() -> None:
    model, cache = FakeModel(), FakeCache()
    prompts = [1, 2, 3], [4, 5, 6]
    both = [StreamingGenerator(model, cache, FakeTokenizer()) for _ in prompts]  # type: ignore[arg-type]
    for subject, prompt in zip(both, prompts, strict=True):
        subject.begin_stream_ex(prompt, GREEDY, max_new_tokens=5)
    for _ in range(5):
        for subject in both:
            subject.stream_ex()
    for subject, prompt in zip(both, prompts, strict=True):
        assert subject.tokens[3:] == reply(generator(), prompt, 5)
        assert reply(subject, prompt, 5) == reply(generator(), prompt, 5)


def test_progress_is_told_after_every_chunk() -> None:
    told: list[tuple[int, int, int]] = []
    subject = generator(capacity=3 * PREFILL_CHUNK)
    total = 2 * PREFILL_CHUNK + 100
    prompt = [7] * total
    subject.begin_stream_ex(prompt[:11], GREEDY, on_prefill=lambda *step: told.append(step))
    subject.begin_stream_ex(prompt, GREEDY, on_prefill=lambda *step: told.append(step))
    ends = [10 + PREFILL_CHUNK, 10 + 2 * PREFILL_CHUNK, total - 1]
    assert told == [(10, 11, 0), *((end, total, 10) for end in ends)]


# Seeds


def test_a_seed_gives_the_same_reply_from_any_cache() -> None:
    settings = Sampling(temperature=1.0, top_p=1.0, seed=11)
    prompt = [1, 2, 3, 4]
    subject = generator()
    first = reply(subject, prompt, 15, settings)
    assert reply(subject, prompt, 15, settings) == first
    assert reply(generator(), prompt, 15, settings) == first
    assert reply(generator(), prompt, 15, Sampling(temperature=1.0, top_p=1.0, seed=12)) != first


def test_an_unseeded_reply_reports_the_seed_that_repeats_it() -> None:
    subject, settings = generator(), Sampling(temperature=1.0)
    start = subject.begin_stream_ex([1, 2], settings, max_new_tokens=15)
    first = tokens_of(list(stream(subject)))
    assert reply(generator(), [1, 2], 15, Sampling(temperature=1.0, seed=start.seed)) == first


def test_every_token_is_the_draw_at_its_absolute_position() -> None:
    model, expected = FakeModel(), [1, 2, 3]
    for position in range(3, 18):
        chosen = Candidates(model.logits(expected) / np.float32(0.7), np.arange(260))
        expected.append(draw(chosen, seed=21, position=position))
    assert reply(generator(), [1, 2, 3], 15, Sampling(temperature=0.7, top_p=1.0, seed=21)) == expected[3:]


def test_penalties_count_the_reply() -> None:
    wanted = [100, 50, 20, 10]

    class Ranked(FakeModel):
        def logits(self, tokens: list[int]) -> np.ndarray:  # noqa: ARG002
            logits = np.zeros(260, np.float32)
            logits[wanted] = [4.0, 3.9, 3.8, 3.7]
            return logits

    settings = Sampling(temperature=0, presence_penalty=1.0)
    assert reply(generator(Ranked()), [1, 50], 3, settings) == [100, 20, 10]


def test_rows_of_the_head_that_are_no_tokens_are_never_drawn() -> None:
    subject = StreamingGenerator(FakeModel(lambda _tokens: 230), FakeCache(), FakeTokenizer(230))  # type: ignore[arg-type]
    assert reply(subject, [1], 1)[0] < 230
    with pytest.raises(UsageError, match="no tokens"):
        subject.begin_stream_ex([230], GREEDY)


# How a reply ends


@pytest.mark.parametrize("end", [END, OTHER_END])
def test_a_stop_id_ends_the_reply_and_is_no_text(end: int) -> None:
    subject = generator(saying("fine", 2, then=end))
    subject.set_stop_conditions([END, OTHER_END])
    subject.begin_stream_ex([1, 2], GREEDY)
    results = list(stream(subject))
    assert text_of(results) == "fine"
    assert tokens_of(results) == list(b"fine")
    assert (results[-1].stop_reason, results[-1].reply_tokens) == ("eos", 5)


def test_until_told_otherwise_the_tokenizers_eos_ids_stop() -> None:
    subject = generator(saying("x", 1))
    subject.begin_stream_ex([1], GREEDY)
    assert [result.stop_reason for result in stream(subject)] == [None, "eos"]


def test_stop_conditions_hold_from_the_next_reply() -> None:
    subject = generator(saying("x", 1))
    subject.begin_stream_ex([1], GREEDY)
    subject.set_stop_conditions([ord("x")])
    assert subject.stream_ex().text == "x"
    subject.begin_stream_ex([1], GREEDY)
    assert subject.stream_ex().stop_reason == "eos"


def test_stop_conditions_replace_the_default() -> None:
    subject = generator(saying("x", 1))
    subject.set_stop_conditions([OTHER_END])
    subject.begin_stream_ex([1], GREEDY, max_new_tokens=4)
    assert list(stream(subject))[-1].stop_reason == "max_tokens"


@pytest.mark.parametrize("bad", [None, "", 2.5])
def test_a_stop_condition_of_another_kind_is_a_value_error(bad: object) -> None:
    with pytest.raises(ValueError):
        generator().set_stop_conditions([END, bad])  # type: ignore[list-item]


def test_a_stop_string_ends_the_text_before_it() -> None:
    subject = generator(saying("one two\nUser: three", 1))
    subject.set_stop_conditions([END, "\nUser:"])
    subject.begin_stream_ex([1], GREEDY)
    results = list(stream(subject))
    assert text_of(results) == "one two"
    assert tokens_of(results) == list(b"one two")
    assert results[-1].stop_reason == "stop_string"


def test_text_that_only_began_like_a_stop_string_is_not_lost() -> None:
    subject = generator(saying("a\nUse of it\nUs", 1))
    subject.set_stop_conditions([END, "\nUser:"])
    subject.begin_stream_ex([1], GREEDY)
    results = list(stream(subject))
    assert text_of(results) == "a\nUse of it\nUs"
    assert tokens_of(results) == list(b"a\nUse of it\nUs")
    assert results[-1].stop_reason == "eos"


def test_a_limit_releases_what_was_held() -> None:
    subject = generator(saying("ab###", 1))
    subject.set_stop_conditions(["####"])
    subject.begin_stream_ex([1], GREEDY, max_new_tokens=5)
    results = list(stream(subject))
    assert (text_of(results), tokens_of(results)) == ("ab###", list(b"ab###"))
    assert (results[-1].stop_reason, results[-1].reply_tokens) == ("max_tokens", 5)


def test_characters_arrive_whole_and_a_broken_one_is_shown_as_such() -> None:
    subject = generator(saying("é€😀".encode() + b"\xf0\x9f", 1))
    subject.begin_stream_ex([1], GREEDY)
    pieces = [result.text for result in stream(subject)]
    assert pieces == ["", "é", "", "", "€", "", "", "", "😀", "", "", "�"]


def test_special_tokens_are_text_only_on_request() -> None:
    for special, text in ((False, ""), (True, "<mark>")):
        subject = generator(saying(b"", 1, then=MARK))
        subject.begin_stream_ex([1], GREEDY, max_new_tokens=1, decode_special_tokens=special)
        assert text_of(list(stream(subject))) == text


def test_a_continued_text_keeps_its_first_space() -> None:
    for continuing, text in ((False, "and"), (True, " and")):
        subject = generator(saying(" and", 1))
        subject.begin_stream_ex([1], GREEDY, continuing=continuing)
        assert text_of(list(stream(subject))) == text


def test_the_context_ends_a_reply_when_it_is_full() -> None:
    subject = generator(capacity=10)
    subject.begin_stream_ex([1, 2, 3], GREEDY)
    results = list(stream(subject))
    assert (results[-1].stop_reason, results[-1].reply_tokens) == ("context", 7)
    assert tokens_of(results) == reply(generator(), [1, 2, 3], 7)


@pytest.mark.parametrize(("length", "over"), [(10, 1), (25, 16)])
def test_a_prompt_too_long_says_by_how_much(length: int, over: int) -> None:
    subject = generator(capacity=10)
    subject.begin_stream_ex([1], GREEDY)
    with pytest.raises(ContextError, match=f"prompt has {length} tokens, {over} too many for a context of 10"):
        subject.begin_stream_ex([1] * length, GREEDY)
    with pytest.raises(ChatError, match="no reply"):
        subject.stream_ex()
    assert reply(subject, [1] * 9, 1) == reply(generator(), [1] * 9, 1)


@pytest.mark.parametrize(("capacity", "offered"), [(10, True), (100, False)])
def test_a_larger_context_is_proposed_only_where_the_model_has_one(capacity: int, offered: bool) -> None:
    with pytest.raises(ContextError) as caught:
        generator(capacity=capacity).begin_stream_ex([1] * (capacity + 1), GREEDY)
    assert ("--ctx" in caught.value.remedy) is offered


def test_after_the_end_the_reason_is_repeated() -> None:
    subject = generator(saying("", 1))
    subject.begin_stream_ex([1], GREEDY)
    assert subject.stream_ex() == StreamResult("", (), 1, "eos")
    assert subject.stream_ex() == StreamResult("", (), 1, "eos")


# Input


def test_a_tensor_of_one_row_is_a_prompt() -> None:
    expected = reply(generator(), [1, 2, 3], 5)
    for shape in ((1, 3), (3,)):
        subject = generator()
        subject.begin_stream_ex(torch.tensor([1, 2, 3]).reshape(shape), GREEDY, max_new_tokens=5)
        assert tokens_of(list(stream(subject))) == expected


@pytest.mark.parametrize("bad", [[], [-1], [260], torch.zeros(2, 3, dtype=torch.int64)])
def test_what_is_no_prompt_is_refused(bad: "list[int] | torch.Tensor") -> None:
    with pytest.raises(UsageError):
        generator().begin_stream_ex(bad, GREEDY)


def test_a_limit_below_one_token_is_refused() -> None:
    with pytest.raises(UsageError, match="max_new_tokens"):
        generator().begin_stream_ex([1], GREEDY, max_new_tokens=0)


def test_a_stream_must_be_begun() -> None:
    with pytest.raises(ChatError, match="begin_stream_ex"):
        generator().stream_ex()
