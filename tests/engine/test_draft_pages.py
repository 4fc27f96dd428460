"""The pages of a draft model, which go by the same numbers as those of its model; and when pages are put in order."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from exl2chat.engine import batch_drafting
from exl2chat.engine.cache import PAGE
from exl2chat.engine.executor import Executor
from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.pages import PageCopy
from exl2chat.engine.scheduler import Scheduler
from tests.engine.dynamic_jobs import LIMITS, drain, final, generator, job, prompt, reply, streamed, written
from tests.engine.speculative import Always
from tests.engine.tiny_models import ByteTokenizer, byte_model


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_drafting, "Pace", Always)


def test_pages_that_are_put_in_order_are_in_the_draft_model_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its guesses would come from other texts."""
    model = byte_model()
    cache, draft_cache = model.new_cache(16 * PAGE), model.new_cache(16 * PAGE)
    draft_cache.storage.zero_()  # it lacks the last tokens of replies that ended: what lay there must not decide
    subject = DynamicGenerator(
        model,
        cache,
        ByteTokenizer(),  # type: ignore[arg-type]
        replace(LIMITS, drafts=4),
        draft_model=model,
        draft_cache=draft_cache,
    )
    moved: list[PageCopy] = []
    copy = subject._executor.copy

    def copying(copies: Sequence[PageCopy]) -> None:
        moved.extend(copies)
        copy(copies)

    starts = [prompt(240, n) for n in range(3)]
    for start in starts:  # they grow into pages that do not follow their first ones
        subject.enqueue(job(start, 300))
    results = drain(subject)
    monkeypatch.setattr(subject._executor, "copy", copying)
    longer = [(*start, *reply(results, n)) for n, start in enumerate(starts)]
    serials = [subject.enqueue(job(ids, 40)) for ids in longer]
    results = drain(subject)
    assert moved
    for serial, ids in zip(serials, longer, strict=True):
        assert reply(results, serial) == streamed(ids, 40)
        end = final(results, serial)
        assert end.cached_tokens >= 2 * PAGE
        assert end.accepted > 0.8 * end.drafted > 20


@pytest.mark.parametrize("gathers", [False, True])
def test_pages_that_can_be_followed_stay_where_they_are(monkeypatch: pytest.MonkeyPatch, gathers: bool) -> None:
    """To put them in order takes time, and wins some only where they are gathered."""
    asked: list[int] = []

    def defragment(_scheduler: Scheduler) -> list[PageCopy]:
        asked.append(1)
        return []

    monkeypatch.setattr(Executor, "gathers", gathers)
    monkeypatch.setattr(Scheduler, "defragment", defragment)
    written(generator(), prompt(10), 2)
    assert bool(asked) is gathers


def test_what_the_draft_model_lacks_of_a_cached_conversation_spoils_few_drafts() -> None:
    """It has not read the last tokens of a reply; there it has no more than its memory, which may have been NaNs."""
    model = byte_model()
    draft_cache = model.new_cache(16 * PAGE)
    draft_cache.storage.fill_(float("nan"))
    limits = replace(LIMITS, drafts=4)
    subject = DynamicGenerator(
        model, model.new_cache(16 * PAGE), ByteTokenizer(), limits, draft_model=model, draft_cache=draft_cache  # type: ignore[arg-type]
    )  # fmt: skip
    start = prompt(40, 1)
    serial = subject.enqueue(job(start, 300))
    longer = (*start, *reply(drain(subject), serial))
    serial = subject.enqueue(job(longer, 40))
    end = final(drain(subject), serial)
    assert end.cached_tokens == len(longer) - 1
    assert end.accepted > 0.8 * end.drafted > 20
