"""Hooks that meddle with the generator which calls them."""

from collections.abc import Callable

import pytest

from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.replies.jobs import Choice, Failed
from exl2chat.settings import Sampling
from tests.engine.dynamic_jobs import drain, generator, job, prompt, reply, streamed, text

AT = 5  # the draw at which a hook does something; it is in the next step, for the first reads the prompt


def at_its_fifth_draw(act: Callable[[], object]) -> Callable[[Choice], None]:
    """A hook that does nothing else."""
    draws: list[int] = []

    def hook(choice: Choice) -> None:
        draws.append(choice.token)
        if len(draws) == AT:
            act()

    return hook


def fail(subject: DynamicGenerator) -> None:
    subject.cancel(0)
    raise ValueError("and it raises something, too")


@pytest.mark.parametrize("act", [lambda subject: subject.cancel(0), fail])
def test_a_hook_may_cancel_its_own_job(act: Callable[[DynamicGenerator], object]) -> None:
    subject = generator()
    subject.enqueue(job(prompt(10), 20, hooks=(at_its_fifth_draw(lambda: act(subject)),)))
    subject.enqueue(job(prompt(10, 1), 20))
    results = [result for _ in range(AT) for result in subject.iterate()]
    assert reply(results, 0) == streamed(prompt(10), AT - 1)
    after = drain(subject)
    assert all(result.serial == 1 for result in after)
    assert reply([*results, *after], 1) == streamed(prompt(10, 1), 20)
    assert subject._scheduler._pages.available == subject._scheduler._pages.total


def test_a_hook_may_cancel_all_jobs() -> None:
    subject = generator()
    subject.enqueue(job(prompt(10), 20, hooks=(at_its_fifth_draw(subject.clear),)))
    subject.enqueue(job(prompt(10, 1), 20))
    results = [result for _ in range(AT) for result in subject.iterate()]
    assert len(reply(results, 1)) == AT - 1
    assert drain(subject) == []


def test_a_hook_may_cancel_a_job_whose_tokens_were_just_taken_back() -> None:
    subject = generator()
    letters = Sampling(temperature=0, allowed_tokens=tuple(range(97, 123)))
    banned = text(streamed(prompt(10), AT, letters)[2:])  # complete at the fifth draw of both
    subject.enqueue(job(prompt(10), 20, letters, banned=(banned,)))
    subject.enqueue(job(prompt(10, 1), 20, hooks=(at_its_fifth_draw(lambda: subject.cancel(0)),)))
    assert reply(drain(subject), 1) == streamed(prompt(10, 1), 20)


def test_a_hook_may_enqueue_a_job() -> None:
    subject = generator()
    subject.enqueue(job(prompt(10), 20, hooks=(at_its_fifth_draw(lambda: subject.enqueue(job(prompt(9), 8))),)))
    results = drain(subject)
    assert reply(results, 0) == streamed(prompt(10), 20)
    assert reply(results, 1) == streamed(prompt(9), 8)


def test_a_hook_that_insists_on_a_banned_string_is_an_error() -> None:
    """Its token would be taken back for ever."""

    def insist(choice: Choice) -> None:
        choice.token = ord("x")

    subject = generator()
    subject.enqueue(job(prompt(10), 20, hooks=(insist,), banned=("xxx",)))
    results = [result for _ in range(20) for result in subject.iterate()]
    (failed,) = [result for result in results if isinstance(result, Failed)]
    assert "banned at this place" in str(failed.error)
    assert subject.remaining == 0
