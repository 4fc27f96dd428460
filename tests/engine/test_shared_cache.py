"""Generators that take turns over one cache, token by token: each finds overwritten what it left there, and says what
it would have said alone."""

import pytest

from exl2chat.engine.cache import PAGE
from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.generators.streaming import StreamingGenerator
from exl2chat.engine.replies.jobs import Result
from tests.engine.dynamic_jobs import LIMITS, SETTINGS, job, prompt, reply, streamed
from tests.engine.fake_model import FakeTokenizer
from tests.engine.speculative import Guided, RowsModel, plain, results_of, speculating
from tests.engine.tiny_models import ByteTokenizer, byte_model

NEW = 6
TURNS = 50


@pytest.mark.parametrize("length", [5, 64, 150])  # of the last, a step reads a part
def test_two_dynamic_generators_take_turns(length: int) -> None:
    model = byte_model()
    cache = model.new_cache(8 * PAGE)
    subjects = [DynamicGenerator(model, cache, ByteTokenizer(), LIMITS) for _ in range(2)]  # type: ignore[arg-type]
    results: list[list[Result]] = [[], []]
    for number, subject in enumerate(subjects):
        subject.enqueue(job(prompt(length, number), NEW, SETTINGS[1]))
    for _ in range(TURNS):
        for subject, brought in zip(subjects, results, strict=True):
            brought += subject.iterate()
    for number, brought in enumerate(results):
        assert reply(brought, 0) == streamed(prompt(length, number), NEW, SETTINGS[1])


def test_a_stream_and_a_dynamic_generator_take_turns() -> None:
    model = byte_model()
    cache = model.new_cache(8 * PAGE)
    jobs = DynamicGenerator(model, cache, ByteTokenizer(), LIMITS)  # type: ignore[arg-type]
    stream = StreamingGenerator(model, cache, ByteTokenizer())  # type: ignore[arg-type]
    stream.set_stop_conditions([])
    jobs.enqueue(job(prompt(150), NEW))
    stream.begin_stream_ex(prompt(150, 1), SETTINGS[1], max_new_tokens=TURNS)
    results: list[Result] = []
    for _ in range(TURNS):
        stream.stream_ex()
        results += jobs.iterate()
    assert reply(results, 0) == streamed(prompt(150), NEW)
    assert stream.tokens[150:] == streamed(prompt(150, 1), TURNS, SETTINGS[1])


@pytest.mark.parametrize("taken", range(1, 9))
def test_drafts_that_come_true_are_read_again_where_another_used_the_cache(
    monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """Their logits may be at hand: but what the cache held of them is gone."""
    start, settings = [1, 2, 3, 1, 2], SETTINGS[1]
    alone = plain(RowsModel())
    alone.begin_stream_ex(start, settings, max_new_tokens=20)
    expected = results_of(alone)
    drafter = Guided(lambda token: token)
    drafter.sequence = alone.tokens
    subject = speculating(monkeypatch, drafter, RowsModel())
    other = StreamingGenerator(RowsModel(), subject._cache, FakeTokenizer(), speculate="off")  # type: ignore[arg-type]
    subject.begin_stream_ex(start, settings, max_new_tokens=20)
    results = [subject.stream_ex() for _ in range(taken)]
    other.begin_stream_ex([9] * 12, settings)
    assert [*results, *results_of(subject)] == expected


@pytest.mark.parametrize("capacity", range(7, 16))
def test_drafts_never_reach_beyond_the_cache(monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    start, settings = [1, 2, 3, 1, 2], SETTINGS[1]
    alone = plain(RowsModel(), capacity)
    alone.begin_stream_ex(start, settings)
    expected = results_of(alone)
    drafter = Guided(lambda token: token)
    drafter.sequence = [*alone.tokens, *range(50)]
    subject = speculating(monkeypatch, drafter, RowsModel(), capacity)
    subject.begin_stream_ex(start, settings)
    assert results_of(subject) == expected
