"""Jobs on a small real model: the tokens are those of the streaming generator, whatever else runs beside."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from exl2chat.engine.cache import PAGE
from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.generators.jobs import Choice, Failed, Final, Job, Prefilled, Result, Started, Streamed
from exl2chat.engine.generators.language import Language
from exl2chat.engine.generators.streaming import StreamingGenerator
from exl2chat.engine.generators.task import Task
from exl2chat.engine.scheduler import Limits
from exl2chat.engine.stopping import StopConditions
from exl2chat.errors import ChatError, ContextError, UsageError
from exl2chat.settings import Sampling
from tests.engine.fake_model import VOCABULARY
from tests.engine.tiny_models import ByteTokenizer, byte_model

GREEDY = Sampling(temperature=0)
LIMITS = Limits(batch=8, queue=100, chunk=64)
SETTINGS = (
    GREEDY,
    Sampling(temperature=1.0, top_p=1.0, seed=3),
    Sampling(temperature=0.8, top_k=20, seed=4, repetition_penalty=1.3),
    Sampling(temperature=1.2, mirostat_tau=3.0, seed=5, dry_multiplier=0.8, dry_breakers=(), xtc_ignore_tokens=()),
)


def generator(pages: int = 16, limits: Limits = LIMITS) -> DynamicGenerator:
    model = byte_model()
    return DynamicGenerator(model, model.new_cache(pages * PAGE), ByteTokenizer(), limits)  # type: ignore[arg-type]


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(32, 127, length).tolist())


def job(ids: Sequence[int], count: int, sampling: Sampling = GREEDY, **more: object) -> Job:
    return Job((tuple(ids),), count, sampling, **more)  # type: ignore[arg-type]


def streamed(ids: Sequence[int], count: int, sampling: Sampling = GREEDY) -> list[int]:
    """What the streaming generator replies."""
    model = byte_model()
    subject = StreamingGenerator(model, model.new_cache(1024), ByteTokenizer())  # type: ignore[arg-type]
    subject.set_stop_conditions([])
    subject.begin_stream_ex(list(ids), sampling, max_new_tokens=count)
    while not subject.stream_ex().eos:
        pass
    return subject.tokens[len(ids) :]


def nothing(step: int) -> None:
    """What happens before a step."""


def drain(subject: DynamicGenerator, act: Callable[[int], None] = nothing) -> list[Result]:
    """All results until no job is left; act(step) is called before each step."""
    results: list[Result] = []
    for step in itertools.count():
        act(step)
        if not subject.remaining:
            return results
        results += subject.iterate()
    return results


def written(subject: DynamicGenerator, ids: Sequence[int], count: int) -> list[int]:
    """The tokens of one job that runs alone."""
    serial = subject.enqueue(job(ids, count))
    return reply(drain(subject), serial)


def reply(results: list[Result], serial: int) -> list[int]:
    """The tokens of a job."""
    streams = [result for result in results if isinstance(result, Streamed) and result.serial == serial]
    return [token.id for result in streams for token in result.tokens]


def final(results: list[Result], serial: int) -> Final:
    return next(r.final for r in results if isinstance(r, Streamed) and r.serial == serial and r.final)


def text(ids: Sequence[int]) -> str:
    return bytes(ids).decode("utf-8", "replace")


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


# How a reply ends


def test_a_stop_id_ends_a_reply_and_is_no_text() -> None:
    ids = prompt(12)
    expected = streamed(ids, 10)
    stop = expected[6]
    subject = generator()
    subject.enqueue(job(ids, 10, stops=StopConditions.of([stop])))
    results = drain(subject)
    at = expected.index(stop)
    assert reply(results, 0) == expected[:at]
    assert (final(results, 0).reason, final(results, 0).token) == ("stop_token", stop)
    assert final(results, 0).new_tokens == at + 1


def test_a_stop_id_is_not_drawn_before_its_time() -> None:
    ids = prompt(12)
    stop = streamed(ids, 1)[0]
    subject = generator()
    subject.enqueue(job(ids, 10, stops=StopConditions.of([stop]), min_new_tokens=3))
    assert final(drain(subject), 0).new_tokens > 3


def test_without_stop_conditions_a_reply_ends_at_its_limit_to_the_token() -> None:
    """exllamav2 stops short by the length of a draft (appendix B-7)."""
    subject = generator()
    for count in (1, 2, 7):
        serial = subject.enqueue(job(prompt(9), count))
        results = drain(subject)
        assert len(reply(results, serial)) == final(results, serial).new_tokens == count


def test_banned_strings_are_taken_back_from_the_cache_too() -> None:
    """Up to the last token. The oracle computes every token from the whole text."""
    model, ids = byte_model(), prompt(250)
    settings = Sampling(temperature=0, allowed_tokens=tuple(b"abcde"))
    plain = text(streamed(ids, 40, settings))
    wanted = job(ids, 40, settings, banned=(plain[3:5], plain[11:14], plain[-2:]))
    task = Task(wanted, Language(ByteTokenizer(), VOCABULARY))  # type: ignore[arg-type]
    rewound, ended = 0, False
    while not ended:
        tokens = torch.tensor([*ids, *task.reply])
        task.draw(model.forward(tokens, model.new_cache(512), last_only=True).numpy())
        advance = task.advance()
        rewound += advance.rewound
        ended = advance.end is not None
    assert rewound > 2
    subject = generator()
    serials = [subject.enqueue(wanted), subject.enqueue(job(ids, 40, settings))]
    results = drain(subject)
    assert reply(results, serials[0]) == task.reply
    assert final(results, serials[0]).new_tokens == 40
    assert reply(results, serials[1]) == list(plain.encode())


def test_what_a_job_lacks_is_said_when_it_is_enqueued() -> None:
    subject = generator(pages=2)
    with pytest.raises(ContextError, match="do not fit"):
        subject.enqueue(job(prompt(500), 100))
    with pytest.raises(UsageError, match="no tokens"):
        subject.enqueue(job((), 1))
    with pytest.raises(UsageError, match="are no tokens"):
        subject.enqueue(job((VOCABULARY,), 1))
    with pytest.raises(UsageError, match="max_new_tokens"):
        subject.enqueue(job((1,), 0))
    with pytest.raises(UsageError, match="2 prompts"):
        Job(((1,), (2,)), 1, GREEDY)
    with pytest.raises(UsageError, match="banned"):
        job((1,), 1, banned=("",))
    assert subject.remaining == 0
    crowded = generator(limits=replace(LIMITS, queue=1))
    crowded.enqueue(job((1,), 1))
    with pytest.raises(ChatError, match="waiting"):
        crowded.enqueue(job((1,), 1))


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


# Hooks, guidance, generate


def test_a_hook_sees_the_draw_and_may_change_it() -> None:
    """exllamav2 ignores hooks here (appendix B-15)."""
    seen: list[Choice] = []

    def shout(choice: Choice) -> None:
        seen.append(replace(choice))
        choice.token = ord("!")

    subject = generator()
    subject.enqueue(job(prompt(10), 3, hooks=(shout,)))
    assert final(drain(subject), 0).text == "!!!"
    assert seen[0].token == streamed(prompt(10), 1)[0] == int(np.argmax(seen[0].logits))


def test_guidance_between_equal_prompts_changes_nothing_and_otherwise_does() -> None:
    ids, other = prompt(30), prompt(45, 1)
    subject = generator()
    subject.enqueue(Job((ids, ids), 20, SETTINGS[1], guidance=3.0))
    subject.enqueue(Job((ids, other), 20, SETTINGS[1], guidance=1.0))
    subject.enqueue(Job((ids, other), 20, SETTINGS[1], guidance=3.0))
    results = drain(subject)
    expected = streamed(ids, 20, SETTINGS[1])
    assert reply(results, 0) == reply(results, 1) == expected != reply(results, 2)


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
