"""Jobs on a small real model: the tokens are those of the streaming generator, whatever else runs beside."""

import random
from dataclasses import replace

import pytest

from exl2chat.engine.cache import PAGE
from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.generators.streaming import StreamingGenerator
from exl2chat.engine.replies.jobs import Choice, Failed, Prefilled, Result, Started, Streamed
from exl2chat.engine.scheduler import Limits
from exl2chat.errors import UsageError
from exl2chat.settings import Sampling
from tests.engine.dynamic_jobs import (
    GREEDY,
    LIMITS,
    SETTINGS,
    drain,
    final,
    generator,
    job,
    prompt,
    reply,
    streamed,
    text,
    written,
)
from tests.engine.tiny_models import ByteTokenizer, byte_model

# Token identity


@pytest.mark.parametrize("sampling", SETTINGS)
def test_a_job_writes_what_the_streaming_generator_writes(sampling: Sampling) -> None:
    ids = prompt(40)
    subject = generator()
    serial = subject.enqueue(job(ids, 30, sampling))
    assert reply(drain(subject), serial) == streamed(ids, 30, sampling)


def test_jobs_of_every_kind_write_in_one_batch_what_they_would_alone() -> None:
    """Of different lengths and settings, arriving while others are being written, in a cache that they crowd."""
    subject = generator(pages=5, limits=Limits(batch=4, queue=100, chunk=30))
    wanted = [(prompt(length, n), 20 + n, SETTINGS[n % 4]) for n, length in enumerate((10, 300, 60, 5, 250, 120, 33))]
    serials: list[int] = []

    def act(step: int) -> None:
        if step % 3 == 0 and len(serials) < len(wanted):
            serials.append(subject.enqueue(job(*wanted[len(serials)])))

    results = drain(subject, act)
    assert len(serials) == len(wanted)
    for serial, (ids, count, sampling) in zip(serials, wanted, strict=True):
        assert reply(results, serial) == streamed(ids, count, sampling)
        assert final(results, serial).new_tokens == count


def test_a_job_that_gives_up_its_pages_writes_the_same() -> None:
    """Three replies that outgrow a cache of four pages: the youngest waits again, and nobody notices."""
    subject = generator(pages=4, limits=Limits(batch=3, queue=9, chunk=300))
    wanted = [prompt(240, n) for n in range(3)]
    serials = [subject.enqueue(job(ids, 40, SETTINGS[1])) for ids in wanted]
    results = drain(subject)
    assert [reply(results, serial) for serial in serials] == [streamed(ids, 40, SETTINGS[1]) for ids in wanted]
    assert len([result for result in results if isinstance(result, Started)]) == 3


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_and_goes_every_job_writes_its_own_reply(seed: int) -> None:
    """Jobs that share beginnings, in any order, some of them cancelled, in a cache that is too small for all."""
    choose = random.Random(seed)
    subject = generator(choose.randint(3, 6), Limits(choose.randint(1, 5), 100, choose.choice([40, 300, 600]), skips=1))
    starts = [prompt(choose.choice([30, 256, 300]), n) for n in range(3)]
    wanted: dict[int, tuple[tuple[int, ...], int, Sampling]] = {}

    results: list[Result] = []
    for _ in range(40):
        if choose.random() < 0.3:
            ids = (*choose.choice(starts), *prompt(choose.randint(1, 60), choose.randrange(3)))
            each = (ids, choose.randint(1, 40), choose.choice(SETTINGS))
            wanted[subject.enqueue(job(*each))] = each
        if wanted and choose.random() < 0.05:
            serial = choose.choice(list(wanted))
            if subject.cancel(serial):
                del wanted[serial]
        results += subject.iterate()
    results += drain(subject)
    assert len(wanted) > 3
    for serial, each in wanted.items():
        assert reply(results, serial) == streamed(*each)


def test_two_jobs_of_one_prompt_differ_by_their_seeds_alone() -> None:
    ids = prompt(300)
    subject = generator(limits=replace(LIMITS, chunk=512))
    serials = [subject.enqueue(job(ids, 20, Sampling(temperature=1.0, seed=seed))) for seed in (1, 2, 1)]
    results = drain(subject)
    first, second, third = (reply(results, serial) for serial in serials)
    assert first == third != second
    assert final(results, serials[1]).cached_tokens >= PAGE


def test_an_unseeded_job_tells_the_seed_that_repeats_it() -> None:
    subject = generator()
    settings = Sampling(temperature=1.0)
    serial = subject.enqueue(job(prompt(5), 20, settings))
    results = drain(subject)
    repeated = Sampling(temperature=1.0, seed=final(results, serial).seed)
    assert reply(results, serial) == streamed(prompt(5), 20, repeated)


@pytest.mark.parametrize("bits", [8, 4])
def test_jobs_over_a_quantised_cache_write_what_the_streaming_generator_does(bits: int) -> None:
    model = replace(byte_model(), cache_bits=bits)
    subject = DynamicGenerator(model, model.new_cache(4 * PAGE), ByteTokenizer(), LIMITS)  # type: ignore[arg-type]
    start = prompt(300)
    wanted = [(start, 20, SETTINGS[1]), ((*start[:280], *prompt(9, 1)), 20, GREEDY), (prompt(9, 2), 20, SETTINGS[1])]
    serials = [subject.enqueue(job(*each)) for each in wanted]
    results = drain(subject)
    assert [reply(results, serial) for serial in serials] == [streamed(*each, model) for each in wanted]
    assert final(results, serials[1]).cached_tokens > 0


# The prompt cache


def test_a_later_job_finds_what_an_earlier_one_computed() -> None:
    subject = generator()
    ids = prompt(600)
    subject.enqueue(job(ids, 20))
    first = drain(subject)
    longer = (*ids, *reply(first, 0), *prompt(50, 1))
    serial = subject.enqueue(job(longer, 10))
    second = drain(subject)
    assert final(first, 0).cached_tokens == 0
    assert final(second, serial).cached_tokens >= 600 + 19
    assert reply(second, serial) == streamed(longer, 10)


def test_a_cache_that_others_used_is_not_trusted() -> None:
    model = byte_model()
    cache = model.new_cache(2048)
    subject = DynamicGenerator(model, cache, ByteTokenizer(), LIMITS)  # type: ignore[arg-type]
    other = StreamingGenerator(model, cache, ByteTokenizer())  # type: ignore[arg-type]
    ids, between = prompt(300), prompt(500, 1)
    for _ in range(2):
        serial = subject.enqueue(job(ids, 8))
        subject.iterate()
        other.begin_stream_ex(list(between), GREEDY, max_new_tokens=4)
        said = [other.stream_ex().tokens for _ in range(2)]
        results = drain(subject)
        said += [other.stream_ex().tokens for _ in range(2)]
        assert reply(results, serial) == streamed(ids, 8)
        assert [token for tokens in said for token in tokens] == streamed(between, 4)


# Stages


def test_the_stages_of_a_job_come_in_their_order() -> None:
    subject = generator()
    serial = subject.enqueue(job(prompt(150), 5))
    results = drain(subject)
    assert results[0] == Started(serial)
    assert [(r.done, r.total) for r in results if isinstance(r, Prefilled)] == [(64, 150), (128, 150), (149, 150)]
    assert sum(isinstance(result, Streamed) for result in results) == 5
    end = final(results, serial)
    assert (end.reason, end.new_tokens, end.prompt_tokens) == ("max_new_tokens", 5, 150)
    assert end.text == text(streamed(prompt(150), 5))
    assert min(end.waited, end.read, end.wrote) >= 0
    assert subject.iterate() == []


def test_long_prompts_are_read_between_the_tokens_of_replies() -> None:
    subject = generator()
    first = subject.enqueue(job(prompt(5), 60))
    subject.iterate()
    subject.enqueue(job(prompt(640), 1))
    for _ in range(10):
        assert any(isinstance(result, Streamed) and result.serial == first for result in subject.iterate())


def test_a_cancelled_job_has_no_more_results_and_leaves_the_others_alone() -> None:
    subject = generator()
    serials = [subject.enqueue(job(prompt(20, n), 20)) for n in range(3)]
    results = [result for _ in range(5) for result in subject.iterate()]
    assert subject.cancel(serials[1])
    results += drain(subject)
    assert len(reply(results, serials[1])) < 20
    assert [reply(results, n) for n in (serials[0], serials[2])] == [streamed(prompt(20, n), 20) for n in (0, 2)]
    assert not subject.cancel(serials[1])


def test_a_hook_may_cancel_another_job() -> None:
    subject = generator()
    subject.enqueue(job(prompt(10), 5, hooks=(lambda _: subject.cancel(1),)))  # type: ignore[arg-type, return-value]
    subject.enqueue(job(prompt(10, 1), 20))
    subject.enqueue(job(prompt(10, 2), 5))
    results = drain(subject)
    assert [reply(results, n) for n in range(3)] == [streamed(prompt(10), 5), [], streamed(prompt(10, 2), 5)]


def test_all_pages_are_free_again_when_all_jobs_have_ended() -> None:
    subject = generator(pages=4)
    for n in range(4):
        subject.enqueue(job(prompt(200, n), 100))
    for _ in range(30):
        subject.iterate()
    subject.cancel(2)
    drain(subject)
    pages = subject._scheduler._pages
    assert (pages.available, subject.remaining) == (pages.total, 0)


# Failures


def test_a_job_that_fails_fails_alone() -> None:
    def refuse(choice: Choice) -> None:
        raise ValueError(choice.token)

    subject = generator()
    subject.enqueue(job(prompt(10), 20, hooks=(refuse,)))
    subject.enqueue(job(prompt(10, 1), 20))
    results = drain(subject)
    (failed,) = [result for result in results if isinstance(result, Failed)]
    assert failed.serial == 0
    assert isinstance(failed.error, ValueError)
    assert reply(results, 1) == streamed(prompt(10, 1), 20)


def test_after_an_error_of_the_model_the_jobs_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = generator()
    serial = subject.enqueue(job(prompt(100), 20, SETTINGS[2]))
    results = subject.iterate() + subject.iterate() + subject.iterate()
    run = subject._executor.run

    def fail(*step: object) -> object:
        run(*step)  # type: ignore[arg-type]
        raise MemoryError

    monkeypatch.setattr(subject._executor, "run", fail)
    with pytest.raises(MemoryError):
        subject.iterate()
    monkeypatch.setattr(subject._executor, "run", run)
    subject._cache.storage.fill_(float("nan"))
    assert reply(results + drain(subject), serial) == streamed(prompt(100), 20, SETTINGS[2])


def test_the_same_loras_are_no_new_executor() -> None:
    """Which would record its graphs anew: a generator is told of them before every job."""
    subject = generator()
    executor = subject._executor
    subject.set_adapters(())
    assert subject._executor is executor


# Many jobs at once


def test_generate_runs_jobs_to_their_ends_in_order() -> None:
    subject = generator()
    finals = subject.generate([job(prompt(10, n), 12 - 3 * n) for n in range(3)])
    assert finals is not None
    assert [end.text for end in finals] == [text(streamed(prompt(10, n), 12 - 3 * n)) for n in range(3)]
    assert subject.generate([job(prompt(10), 5)], abort=lambda: True) is None
    assert subject.remaining == 0
    subject.enqueue(job(prompt(10), 5))
    with pytest.raises(UsageError, match="not ended"):
        subject.generate([job(prompt(10), 5)])


def test_generate_raises_the_error_of_a_job() -> None:
    def refuse(choice: Choice) -> None:
        raise ValueError(choice.token)

    subject = generator()
    with pytest.raises(ValueError):
        subject.generate([job(prompt(10), 5), job(prompt(10), 5, hooks=(refuse,))])
    assert subject.remaining == 0


def test_what_is_read_from_the_cache_was_not_overwritten_by_another_generator() -> None:
    model, ids = byte_model(), prompt(600, 1)
    cache = model.new_cache(4 * PAGE)
    first, second = (DynamicGenerator(model, cache, ByteTokenizer(), LIMITS) for _ in range(2))  # type: ignore[arg-type]
    written(first, ids, 8)
    written(second, prompt(600, 2), 8)
    assert written(first, ids, 8) == streamed(ids, 8)
