"""A step that is broken off, by Ctrl-C or by an error, costs no result: nothing that a job said is missing or wrong."""

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import pytest

from exl2chat.engine.executor import Executor
from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.pages import PageCopy
from exl2chat.engine.replies.jobs import Choice, Job, Result, Started, Streamed
from tests.engine.dynamic_jobs import SETTINGS, drain, final, generator, job, prompt, reply, streamed, text

NEW = 20

P = ParamSpec("P")
T = TypeVar("T")


def drain_on(subject: DynamicGenerator, error: type[BaseException]) -> tuple[list[Result], int]:
    """All results until no job is left, whatever is raised meanwhile; how often that was."""
    results: list[Result] = []
    raised = 0
    for _ in range(300):
        try:
            results += subject.iterate()
        except error:
            raised += 1
        if not subject.remaining:
            break
    return results, raised


def once(call: Callable[P, T], when: Callable[P, bool], error: type[BaseException]) -> Callable[P, T]:
    """`call`, but the first time that `when` is true, `error` instead."""
    raised: list[bool] = []

    def failing(*args: P.args, **more: P.kwargs) -> T:
        if not raised and when(*args, **more):
            raised.append(True)
            raise error
        return call(*args, **more)

    return failing


def with_hook(at: int, jobs: Sequence[tuple[int, int]]) -> DynamicGenerator:
    """Jobs of so many tokens, and one whose hook is interrupted at its token `at`."""
    subject = generator()

    def press(choice: Choice) -> None:
        """A hook sees the draw, before the token is added."""

    def now(choice: Choice) -> bool:  # noqa: ARG001
        return subject._jobs[len(jobs)].task.chooser.count == at

    for seed, count in jobs:
        subject.enqueue(job(prompt(10, seed), count))
    hooks = (once(press, now, KeyboardInterrupt),)
    subject.enqueue(job(prompt(10, 9), NEW, hooks=hooks))
    return subject


def test_tokens_of_an_interrupted_step_are_streamed_with_the_next_one() -> None:
    subject = with_hook(7, [(0, NEW), (1, 8)])  # the second one ends in that very step
    results, raised = drain_on(subject, KeyboardInterrupt)
    assert raised == 1
    for serial, (seed, count) in enumerate([(0, NEW), (1, 8), (9, NEW)]):
        assert reply(results, serial) == streamed(prompt(10, seed), count)
        said = [result.text for result in results if isinstance(result, Streamed) and result.serial == serial]
        assert "".join(said) == final(results, serial).text


def test_a_job_whose_last_result_was_not_brought_yet_remains_unless_it_is_cancelled() -> None:
    for cancelled in (False, True):
        subject = with_hook(7, [(1, 8)])
        with pytest.raises(KeyboardInterrupt):
            drain(subject)
        subject.cancel(1)
        assert subject.remaining == 1
        if cancelled:
            subject.cancel(0)
        results = drain(subject)
        assert len(results) == (not cancelled)
    assert subject.remaining == 0


@pytest.mark.parametrize("at", [1, 7, NEW])
def test_a_token_is_known_to_the_scheduler_where_its_text_was_interrupted(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = generator()
    serial = subject.enqueue(job(prompt(10), NEW, SETTINGS[1]))
    task = subject._jobs[serial].task
    push = once(task._gate.push, lambda _: task.chooser.count == at, KeyboardInterrupt)
    monkeypatch.setattr(task._gate, "push", push)
    results, raised = drain_on(subject, KeyboardInterrupt)
    assert raised == 1
    assert task.chooser.reply == reply(results, serial) == streamed(prompt(10), NEW, SETTINGS[1])
    assert final(results, serial).reason == "max_new_tokens"
    assert final(results, serial).text == text(task.chooser.reply)


def test_a_job_whose_first_step_failed_has_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = generator()
    serial = subject.enqueue(job(prompt(10), 3))
    run = once(subject._executor.run, lambda *_: True, MemoryError)
    monkeypatch.setattr(subject._executor, "run", run)
    results, raised = drain_on(subject, MemoryError)
    assert raised == 1
    assert [result for result in results if isinstance(result, Started)] == [Started(serial)]


def test_pages_that_cannot_be_put_in_order_cost_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = generator()
    copied: list[PageCopy] = []
    copy = subject._executor.copy

    def copying(copies: Sequence[PageCopy]) -> None:
        copied.extend(copies)
        copy(copies)

    monkeypatch.setattr(subject._executor, "copy", once(copying, bool, MemoryError))
    starts = [prompt(240, n) for n in range(3)]
    for start in starts:  # they grow into pages that do not follow their first ones
        subject.enqueue(job(start, 40))
    results, _ = drain_on(subject, MemoryError)
    assert [final(results, n).new_tokens for n in range(3)] == [40] * 3
    longer = [(*start, *reply(results, n)) for n, start in enumerate(starts)]
    for _ in range(2):
        serials = [subject.enqueue(Job((ids,), 40, SETTINGS[0])) for ids in longer]
        results, _ = drain_on(subject, MemoryError)
        assert [reply(results, serial) for serial in serials] == [streamed(ids, 40) for ids in longer]
    assert copied


def test_pages_are_not_put_in_order_where_none_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels follow page tables: a copy would only delay the first token."""
    for gathers in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(Executor, "gathers", gathers)
            subject = generator()
            copied: list[PageCopy] = []
            patch.setattr(subject._executor, "copy", copied.extend)
            for n in range(3):
                subject.enqueue(job(prompt(240, n), 40))
            drain(subject)
            written = subject.enqueue(job(prompt(10, 7), 1))
            drain(subject)
            assert bool(copied) == gathers
            assert not subject.cancel(written)
