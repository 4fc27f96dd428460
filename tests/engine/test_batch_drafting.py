"""Drafts change how many steps the jobs of a dynamic generator take, and nothing about their replies."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from exl2chat.engine import batch_drafting
from exl2chat.engine.batch_drafting import Rounds, SuffixDrafts
from exl2chat.engine.cache import PAGE
from exl2chat.engine.compile_grammar import compile_regex
from exl2chat.engine.executor import Executor
from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.replies.choosing import Chooser
from exl2chat.engine.replies.jobs import Choice, Job, Result, Streamed
from exl2chat.engine.replies.language import Language
from exl2chat.engine.scheduler import Limits
from exl2chat.engine.stopping import StopConditions
from exl2chat.engine.token_table import TokenTable
from exl2chat.errors import UsageError
from exl2chat.settings import Sampling
from tests.engine.dynamic_jobs import LIMITS, SETTINGS, drain, final, generator, job, prompt, reply, streamed, text
from tests.engine.fake_model import END, VOCABULARY
from tests.engine.speculative import Always, RowsModel
from tests.engine.test_dynamic_draws import Device
from tests.engine.tiny_models import ByteTokenizer, byte_model
from tests.engine.told import MOST, Told, heard_rounds, row

LANGUAGE = Language(ByteTokenizer(), VOCABULARY)  # type: ignore[arg-type]
DRAFTING = replace(LIMITS, drafts=MOST)


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_drafting, "Pace", Always)


def told(jobs: Sequence[Job], right: float, pages: int = 16, limits: Limits = DRAFTING) -> list[list[Result]]:
    """The results of jobs without drafts, and with those that are right with a probability."""
    plain = generator(pages, replace(limits, drafts=0))
    expected = run(plain, jobs)
    subject = generator(pages, limits)
    replies = {serial: [*reply(expected, serial), *[END] * MOST] for serial in range(len(jobs))}
    subject._rounds = Rounds(Told(replies, right), MOST)
    return [expected, run(subject, jobs)]


def run(subject: DynamicGenerator, jobs: Sequence[Job]) -> list[Result]:
    for each in jobs:
        subject.enqueue(each)
    return drain(subject)


def same(jobs: Sequence[Job], expected: list[Result], results: list[Result]) -> tuple[int, int]:
    """Whether the jobs ended alike; how many tokens were drafted and accepted."""
    drafted = accepted = 0
    for serial in range(len(jobs)):
        end, wanted = final(results, serial), final(expected, serial)
        assert reply(results, serial) == reply(expected, serial)
        assert (end.text, end.reason, end.new_tokens) == (wanted.text, wanted.reason, wanted.new_tokens)
        assert (end.token, end.string, end.withheld_text) == (wanted.token, wanted.string, wanted.withheld_text)
        drafted, accepted = drafted + end.drafted, accepted + end.accepted
    return drafted, accepted


# Token identity


@pytest.mark.parametrize("right", [0.0, 0.8, 1.0])
def test_replies_are_those_without_drafts(right: float) -> None:
    jobs = [job(prompt(20 + 30 * n, n), 25 + n, sampling) for n, sampling in enumerate(SETTINGS)]
    expected, results = told(jobs, right)
    drafted, accepted = same(jobs, expected, results)
    assert drafted > 50
    assert (accepted == 0, accepted == drafted) == (right == 0, right == 1)


@pytest.mark.parametrize("count", range(1, 9))
def test_a_limit_is_kept_to_the_token(count: int) -> None:
    """exllamav2 stops short by the length of a draft (appendix B-7)."""
    jobs = [job(prompt(9), count)]
    expected, results = told(jobs, 1.0)
    same(jobs, expected, results)
    assert final(results, 0).new_tokens == count


def test_stop_conditions_banned_strings_and_constraints_hold_within_a_run_of_drafts() -> None:
    letters = Sampling(temperature=0, allowed_tokens=tuple(b"abcde"))
    plain = text(streamed(prompt(30), 40, letters))
    rule = compile_regex(TokenTable(ByteTokenizer(), VOCABULARY, {END}), "[a-c]{20}")  # type: ignore[arg-type]
    jobs = [
        job(prompt(30), 40, letters, stops=StopConditions.of([plain[17:20]])),
        job(prompt(30), 40, letters, stops=StopConditions.of([ord(plain[30])]), min_new_tokens=5),
        job(prompt(30), 40, letters, banned=(plain[3:5], plain[11:14], plain[-2:])),
        job(prompt(30), 40, SETTINGS[1], constraint=rule),
        job(prompt(30), 40, SETTINGS[3], heal=True, hooks=(exclaim,)),
    ]
    expected, results = told(jobs, 1.0)
    assert same(jobs, expected, results)[1] > 60


def exclaim(choice: Choice) -> None:
    """A hook that now and then takes another token."""
    if choice.token % 5 == 0:
        choice.token = ord("!")


@pytest.mark.parametrize("right", [0.7, 1.0])
def test_a_pair_is_drafted_for_as_one(right: float) -> None:
    """exllamav2 takes batches of two sizes (appendix B-7)."""
    jobs = [Job((prompt(30), prompt(45, 1)), 20, SETTINGS[1], guidance=2.0), job(prompt(10), 20)]
    expected, results = told(jobs, right)
    assert same(jobs, expected, results)[1] > 15


def test_jobs_that_lose_their_pages_are_drafted_for_all_the_same() -> None:
    jobs = [job(prompt(240, n), 40, SETTINGS[1]) for n in range(3)]
    for right in (0.6, 1.0):
        expected, results = told(jobs, right, pages=4, limits=replace(DRAFTING, chunk=300))
        assert same(jobs, expected, results)[1] > 20


def test_right_drafts_save_steps() -> None:
    steps = []
    for right in (0.0, 1.0):
        jobs = [job(prompt(10), 1 + 5 * (1 + MOST))]
        subject = generator(limits=DRAFTING)
        subject._rounds = Rounds(Told({0: streamed(prompt(10), 50)}, right), MOST)
        subject.enqueue(jobs[0])
        count = 0
        while subject.remaining:
            subject.iterate()
            count += 1
        steps.append(count)
    assert steps[0] - steps[1] == 5 * MOST


def test_what_a_reply_has_is_cached_when_a_hook_breaks_off_a_step() -> None:
    """Not only for errors, which end a job: a user who presses Ctrl-C goes on with every one."""
    pressed: list[int] = []

    def press(choice: Choice) -> None:
        if subject._jobs[1].task.chooser.count == 7 and not pressed:
            pressed.append(choice.token)
            raise KeyboardInterrupt

    jobs = [job(prompt(10), 20, SETTINGS[1]), job(prompt(10, 1), 20, hooks=(press,)), job(prompt(10, 2), 20)]
    subject = generator(limits=DRAFTING)
    wanted = [streamed(each.prompts[0], 20, each.sampling) for each in jobs]
    subject._rounds = Rounds(Told(dict(enumerate(wanted)), 1.0), MOST)
    results: list[Result] = []
    for each in jobs:
        subject.enqueue(each)
    while subject.remaining:
        try:
            results += subject.iterate()
        except KeyboardInterrupt:
            continue
    assert pressed
    assert [final(results, serial).text for serial in range(3)] == [text(ids) for ids in wanted]


# A draft model


def with_model(pages: int = 16, limits: Limits = DRAFTING) -> DynamicGenerator:
    """A generator whose draft model is the model: a guess is right unless something is missing in its cache."""
    model = byte_model()
    return DynamicGenerator(model, model.new_cache(pages * PAGE), ByteTokenizer(), limits, draft_model=model)  # type: ignore[arg-type]


class Whims:
    """A pace that changes its mind."""

    step = None

    def __init__(self, most: int) -> None:
        self._most, self._random = most, random.Random(3)

    def length(self) -> int:
        return self._random.choice([0, 0, 1, self._most])

    def stepped(self, seconds: float) -> None:
        """It does not matter."""

    def drafted(self, count: int, accepted: Sequence[int], seconds: float) -> None:
        """It does not matter."""


@pytest.mark.parametrize("pace", [Always, Whims])
def test_the_draft_model_knows_all_of_the_text(pace: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """After rounds in which all drafts were right, whose last one exllamav2's drafts lack (appendix B-8), after steps
    without any, in texts that were cached, and after prompts read in parts."""
    monkeypatch.setattr(batch_drafting, "Pace", pace)
    subject, start = with_model(limits=replace(DRAFTING, chunk=200)), prompt(300)
    first = run(subject, [job(prompt(30), 60, SETTINGS[1]), job(start, 60)])
    second = run(subject, [job((*start, *prompt(20, 1)), 60, SETTINGS[0]), job(start, 40, SETTINGS[1])])
    assert reply(first, 0) == streamed(prompt(30), 60, SETTINGS[1])
    assert reply(second, 3) == streamed(start, 40, SETTINGS[1])
    ends = [final(first, 0), final(first, 1), final(second, 2), final(second, 3)]
    assert ends[2].cached_tokens >= PAGE
    assert all(end.accepted == end.drafted > 15 for end in ends)


def test_tokens_taken_back_are_taken_back_from_the_draft_model() -> None:
    """In exllamav2 they stay in its cache (appendix B-8). Guesses are wrong where a string was banned, no further."""
    letters = Sampling(temperature=1.0, top_p=1.0, seed=3, allowed_tokens=tuple(range(97, 123)))
    plain = text(streamed(prompt(30), 40, letters))
    jobs = [job(prompt(30), 40, letters, banned=(plain[3:6], plain[20:23]))]
    expected, results = run(generator(), jobs), run(with_model(), jobs)
    drafted, accepted = same(jobs, expected, results)
    rewinds = sum(isinstance(result, Streamed) and result.suppressed != () for result in results)
    assert rewinds > 0
    assert drafted - accepted <= rewinds * 2 * MOST


def test_a_draft_model_follows_jobs_through_a_crowded_cache() -> None:
    jobs = [job(prompt(200 + 30 * n, n), 36, SETTINGS[n % 2]) for n in range(4)]
    results = run(with_model(4, replace(DRAFTING, batch=4, chunk=100)), jobs)
    for serial, each in enumerate(jobs):
        assert reply(results, serial) == streamed(each.prompts[0], 36, each.sampling)
        assert final(results, serial).accepted > 0.9 * final(results, serial).drafted > 20


def test_a_draft_cache_that_others_used_is_not_trusted() -> None:
    subject = with_model()
    cache = subject._caches[1]
    for seed in range(2):
        results = run(subject, [job(prompt(300, seed), 20)])
        assert final(results, seed).accepted == final(results, seed).drafted > 10
        cache.truncate(0)
        cache.claim(cache)
        byte_model().forward(torch.tensor(prompt(400, 7)), cache, last_only=True)


def test_logits_of_the_draft_model_that_are_no_numbers_are_no_drafts() -> None:
    broken = replace(byte_model(), ops=Nothing(byte_model().ops))
    model = byte_model()
    subject = DynamicGenerator(model, model.new_cache(1024), ByteTokenizer(), DRAFTING, draft_model=broken)  # type: ignore[arg-type]
    results = run(subject, [job(prompt(30), 20)])
    assert (reply(results, 0), final(results, 0).drafted) == (streamed(prompt(30), 20), 0)


class Nothing:
    """Ops whose logits are no numbers."""

    def __init__(self, ops: object) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> object:
        return getattr(self._ops, name)

    def logits(self, out: torch.Tensor, cap: float | None) -> torch.Tensor:
        return self._ops.logits(out, cap) * float("nan")  # type: ignore[attr-defined, no-any-return]


# N-grams


def test_what_was_said_before_is_drafted() -> None:
    model, few = byte_model(), Sampling(temperature=0, allowed_tokens=(65, 66))
    subject = DynamicGenerator(model, model.new_cache(1024), ByteTokenizer(), DRAFTING, speculate="ngram")  # type: ignore[arg-type]
    results = run(subject, [job(prompt(30, n), 60, few) for n in range(3)])
    for n in range(3):
        assert reply(results, n) == streamed(prompt(30, n), 60, few)
    assert sum(final(results, n).accepted for n in range(3)) > 20


def test_where_a_device_draws_n_grams_leave_jobs_with_penalties_to_it() -> None:
    settings = [Sampling(temperature=0), Sampling(temperature=0, presence_penalty=0.5)]
    choosers = {
        n: Chooser(job([1, 2, 3, 4, 1, 2, 3], 9, each), [1, 2, 3, 4, 1, 2, 3], LANGUAGE)
        for n, each in enumerate(settings)
    }
    for on_device, expected in ((False, {0: [4, 1], 1: [4, 1]}), (True, {0: [4, 1]})):
        assert SuffixDrafts(on_device).propose([row(0, 2), row(1, 9)], choosers, 2) == expected


# Options


def test_a_draft_model_that_does_not_fit_is_refused() -> None:
    model = byte_model()

    def made(**options: object) -> DynamicGenerator:
        return DynamicGenerator(model, model.new_cache(1024), ByteTokenizer(), DRAFTING, **options)  # type: ignore[arg-type]

    small = RowsModel()
    small.config.vocab_size = 10
    with pytest.raises(UsageError, match="the draft model has 10 tokens and the model 260"):
        made(draft_model=small)
    with pytest.raises(UsageError, match="no draft model"):
        made(speculate="draft")
    with pytest.raises(UsageError, match="has 1 pages, and that of the model 4"):
        made(draft_model=model, draft_cache=model.new_cache(PAGE))


def test_to_ask_for_drafts_is_to_have_some() -> None:
    model = byte_model()

    def made(limits: Limits | None, **options: object) -> DynamicGenerator:
        return DynamicGenerator(model, model.new_cache(1024), ByteTokenizer(), limits, **options)  # type: ignore[arg-type]

    for options in ({"draft_model": model}, {"draft_model": model, "speculate": "draft"}, {"speculate": "ngram"}):
        with pytest.raises(UsageError, match=r"drafts are asked for, and limits\.drafts is 0"):
            made(LIMITS, **options)
        subject = made(None, **options)
        assert final(run(subject, [job(prompt(30), 60, Sampling(temperature=0, allowed_tokens=(65,)))]), 0).accepted
    for limits in (None, LIMITS):
        with pytest.raises(UsageError, match="no draft model"):
            made(limits, speculate="draft")


def test_a_step_that_was_recorded_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    for recorded in (False, True):
        with monkeypatch.context() as patch:
            subject = generator(limits=DRAFTING)
            rounds, told = heard_rounds(patch, Told({0: [END] * 30}, 1.0))
            numbers = itertools.count()
            if recorded:
                patch.setattr(Executor, "recordings", property(lambda _, numbers=numbers: next(numbers)))
            subject._rounds = rounds
            run(subject, [job(prompt(10), 10)])
            assert any(told) == (not recorded)


def test_a_device_draws_after_every_draft_and_the_host_where_penalties_count(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job(prompt(20 + n, n), 30, SETTINGS[n]) for n in range(3)]
    subject = generator(limits=DRAFTING)
    device = Device(subject, monkeypatch)
    wanted = [streamed(each.prompts[0], 30, each.sampling) for each in jobs]
    subject._rounds = Rounds(Told({0: wanted[0], 1: [], 2: wanted[2]}, 0.7), MOST)
    by_host: list[Sampling] = []
    draw = Chooser.draw

    def counted(self: Chooser, rows: np.ndarray) -> int:
        by_host.append(self.sampling)
        return draw(self, rows)

    monkeypatch.setattr(Chooser, "draw", counted)
    results = run(subject, jobs)
    assert [reply(results, n) for n in range(3)] == wanted
    assert all(final(results, n).accepted > 5 for n in (0, 2))
    assert by_host == [jobs[2].sampling] * (30 - device.drew.get(2, 0))
    assert device.drew[0] > device.drew[1] == 30 > device.drew.get(2, 0)


def test_a_device_draws_the_drafts_of_a_draft_model_but_where_penalties_count(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job(prompt(20 + n, n), 30, SETTINGS[n]) for n in range(3)]
    subject = with_model()
    device = Device(subject._draft_model, monkeypatch)  # type: ignore[arg-type]
    by_host: list[Sampling] = []
    guess = Chooser.guess

    def counted(self: Chooser, logits: np.ndarray, position: int) -> int:
        by_host.append(self.sampling)
        return guess(self, logits, position)

    monkeypatch.setattr(Chooser, "guess", counted)
    results = run(subject, jobs)
    for n, each in enumerate(jobs):
        assert reply(results, n) == streamed(each.prompts[0], 30, each.sampling)
        assert final(results, n).drafted > 15
    assert all(final(results, n).accepted == final(results, n).drafted for n in (0, 1))
    assert set(by_host) == {jobs[2].sampling}
    assert device.drew.keys() == {0, 1}


def test_a_device_that_draws_no_number_ends_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = with_model()
    device = Device(subject._draft_model, monkeypatch)  # type: ignore[arg-type]
    device.broken = True
    results = run(subject, [job(prompt(30), 20)])
    assert (reply(results, 0), final(results, 0).drafted) == (streamed(prompt(30), 20), 0)
