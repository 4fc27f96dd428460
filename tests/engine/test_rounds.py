"""How many drafts the rows of a step get, and what is learned from it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from exl2chat.engine import batch_drafting
from exl2chat.engine.batch_drafting import Choosers, Rounds
from exl2chat.engine.scheduler import Row, StepPlan
from tests.engine.dynamic_jobs import LIMITS, drain, generator, job, prompt
from tests.engine.speculative import Always
from tests.engine.told import MOST, Constrained, Told, heard_rounds, row


def test_rounds_are_timed_by_the_size_of_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of many rows says nothing about one of few, and a step with prompts, or the end of one, nothing at all."""
    rounds, told = heard_rounds(monkeypatch, Told({n: [7, 7] for n in range(5)}, 1.0))
    for serials, read, tokens in (((0,), 0, 1), ((0, 1, 2), 0, 1), ((0,), 1, 1), ((0,), 0, 5), ((3, 4), 0, 1)):
        plan = StepPlan((), (), (), (row(9),) * read, tuple(row(n, 2, tokens) for n in serials))
        rounds.begin(plan, {n: Constrained() for n in serials})  # type: ignore[misc]
        rounds.computed()
        rounds.end(plan, dict.fromkeys(serials, 2), dict.fromkeys(serials, 1))
    assert told == [[(2, [1], 1.0)], [(2, [1, 1, 1], 1.0), (2, [1, 1], 1.0)]]


def test_what_is_forced_and_what_is_guessed_have_paces_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, told = heard_rounds(monkeypatch, Told({1: [7], 2: []}, 1.0))
    choosers = {0: Constrained(5, 6), 1: Constrained(), 2: Constrained()}
    plan = StepPlan((), (), (), (), tuple(row(n, MOST) for n in choosers))
    step = rounds.begin(plan, choosers)  # type: ignore[arg-type]
    assert [each.tokens for each in step.decode] == [(1, 5, 6), (1, 7), (1,)]
    rounds.computed()
    rounds.end(plan, {0: 2, 1: 1, 2: 0}, {0: 2, 1: 1, 2: 0})
    assert told == [[(2, [2, 0], 1.0)], [(1, [1, 0], 1.0)]]
    rounds.begin(plan, choosers)  # type: ignore[arg-type]
    rounds.computed()
    rounds.end(plan, dict.fromkeys(choosers, 0), dict.fromkeys(choosers, 0))
    assert [each[1:] for each in told] == [[(1.0,)], [(1.0,)]]


def test_so_many_sequences_get_no_more_drafts_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_drafting, "Pace", Always)
    rounds = Rounds(Told({n: [7] * 9 for n in range(5)}, 1.0), MOST, limit=lambda count: 4 - count)
    for count in range(1, 5):
        plan = StepPlan((), (), (), (), tuple(row(n, MOST) for n in range(count)))
        step = rounds.begin(plan, {n: Constrained() for n in range(count)})  # type: ignore[misc]
        assert {len(each.tokens) for each in step.decode} == {5 - count}


def test_a_step_takes_no_longer_for_jobs_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where thousands do, to look at each took a third of a step."""
    monkeypatch.setattr(batch_drafting, "Pace", Always)
    seen: list[int] = []

    class Asked(Told):
        def propose(self, rows: Sequence[Row], choosers: Choosers, count: int) -> Mapping[int, Sequence[int]]:
            seen.append(len(choosers))
            return super().propose(rows, choosers, count)

    subject = generator(limits=replace(LIMITS, batch=2, drafts=MOST))
    subject._rounds = Rounds(Asked(dict.fromkeys(range(6), ()), 1.0), MOST)
    for number in range(6):
        subject.enqueue(job(prompt(10, number), 5))
    drain(subject)
    assert max(seen) == 2
