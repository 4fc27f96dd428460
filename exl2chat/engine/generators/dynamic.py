"""Many replies at once over one paged cache: jobs begin and end at any step (continuous batching), and a job finds what
of its text any job before it has computed.

A reply does not depend on the batch it ran in but for the rounding that `Executor` tells of: its noise is a function of
seed, position and token, and its sampler's memory is its own.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from exl2chat.engine.batch_drafting import BatchDrafter, ModelDrafts, Rounds, SuffixDrafts
from exl2chat.engine.cache import PAGE, KVCache
from exl2chat.engine.decoders import MOST_DRAFTS
from exl2chat.engine.device_decoder import checked
from exl2chat.engine.device_draws import Drawing
from exl2chat.engine.device_steps import runs_on_device
from exl2chat.engine.drafting import Speculate, choose_drafts, rounds_alike
from exl2chat.engine.embeddings import InputEmbeddings, check_prompt
from exl2chat.engine.executor import Executor
from exl2chat.engine.lora import Scaled, cache_salt, with_adapters
from exl2chat.engine.paged_steps import alike_drafts
from exl2chat.engine.pages import PageTable
from exl2chat.engine.replies.jobs import Failed, Final, Job, Prefilled, Result, Started, Streamed, Times
from exl2chat.engine.replies.language import Language
from exl2chat.engine.replies.task import Advance, End, Task
from exl2chat.engine.scheduler import Limits, Scheduler, StepPlan
from exl2chat.engine.transformer import Transformer, prefill_chunk
from exl2chat.errors import ContextError, UsageError
from exl2chat.model.tokenizer import Tokenizer
from exl2chat.settings import Sampling

MANY = 1 << 20  # jobs that may wait
WARM_UP = 32


@dataclass(slots=True)
class _Running:
    """A job that has not ended. drawing: of its tokens where a device draws them. `cached` tokens of its text were not
    computed for it."""

    task: Task
    drawing: Drawing
    times: Times
    cached: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class _Turn:
    """What a step computed for a job whose text has `length` tokens: the logits [prompts, 1 + drafts, V], or the 1 +
    drafts tokens that a device `drew`. Then how many drafts were right, and whether the job is `over`."""

    serial: int
    job: _Running
    length: int
    drafts: tuple[int, ...]
    logits: NDArray[np.float32] | None
    drew: Sequence[int] = ()
    accepted: int = 0
    over: bool = False


class DynamicGenerator:
    """Runs jobs on one model over the memory of one cache. Not to be called by two threads at once.

    Another generator may use the cache between steps: what it holds is then read again.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        tokenizer: Tokenizer,
        limits: Limits | None = None,
        draft_model: Transformer | None = None,
        draft_cache: KVCache | None = None,
        speculate: Speculate = "auto",
        drafter: BatchDrafter | None = None,
    ) -> None:
        """Up to limits.drafts tokens of each reply are drafted at a time, as `speculate` says
        (`drafting.choose_drafts`); MOST_DRAFTS without `limits`. Where a device draws the tokens, "auto" drafts by
        n-grams as many as change no bit of a logit (`paged_steps.alike_drafts`). The draft model's cache, by default
        one as long as `cache`, is used by nobody else. `drafter` proposes in place of n-grams. UsageError for a draft
        model with fewer tokens than `model`, and where drafts are asked for and limits.drafts is 0."""
        self.language = Language(tokenizer, model.config.vocab_size)
        drafts = choose_drafts(speculate, model, draft_model, self.language.size)
        asked = drafts == "draft" or speculate == "ngram"
        free = speculate == "auto" and not asked and not drafter and runs_on_device(model, self.language.size)
        if limits is None:
            most = MOST_DRAFTS if asked or free or drafter else 0
            limits = Limits(batch=64, queue=MANY, chunk=prefill_chunk(model.device), drafts=most)
        if asked and not limits.drafts:
            raise UsageError("drafts are asked for, and limits.drafts is 0", "say how many are tried at a time")
        if model.device.type == "cuda":  # as many as a graph has room for
            limits = replace(limits, drafts=min(limits.drafts, MOST_DRAFTS))
        self._model, self._cache = model, cache
        self._executor = Executor(model, cache, self.language.size)
        self._salt = cache_salt(())
        self._scheduler = Scheduler(PageTable(self._executor.pages, PAGE), limits, self._executor.last)
        self._jobs: dict[int, _Running] = {}
        self._pending: list[Result] = []  # not handed out yet: more than one step's after an interrupted one
        self._caches = [cache]
        self._draft_model: ModelDrafts | None = None
        if drafts == "draft" and draft_model is not None:
            draft_cache = draft_cache or draft_model.new_cache(cache.capacity)
            self._caches.append(draft_cache)
            self._draft_model = ModelDrafts(draft_model, draft_cache, self._executor.pages, self.language.size)
        if drafter is None:
            drafter = self._draft_model or (SuffixDrafts(free) if drafts == "ngram" or free else None)
        drafting = limits.drafts > 0 and speculate != "off"
        self._drafting = Rounds(drafter, limits.drafts, alike_drafts if free else None) if drafting else None
        self._rounds = self._drafting
        self._empty()

    @property
    def remaining(self) -> int:
        """How many jobs have not ended, or have results that `iterate` did not bring yet."""
        return len(self._jobs.keys() | {result.serial for result in self._pending})

    def enqueue(self, job: Job) -> int:
        """The serial of a new job, whose results `iterate` will bring. UsageError for one that makes no sense,
        ContextError for one that the cache could never hold, ChatError when too many are waiting."""
        for prompt in job.prompts:
            self._check(prompt, job)
        if job.constraint is not None:
            job = replace(job, constraint=job.constraint.clone())
        task = Task(job, self.language)
        serial = self._scheduler.enqueue(task.prompts, job.max_new_tokens, self._salt)
        drawing = Drawing(task.chooser.sampling, task.chooser.tokens)
        self._jobs[serial] = _Running(task, drawing, Times(time.perf_counter()))
        return serial

    def _check(self, prompt: Sequence[int], job: Job) -> None:
        new = job.max_new_tokens
        check_prompt(prompt, self.language.size, self._model.config.hidden_size, job.embeddings)
        if len(prompt) + new > self._cache.capacity:
            raise ContextError(
                f"a prompt of {len(prompt)} tokens and {new} more do not fit a cache of {self._cache.capacity}",
                "shorten the prompt, lower max_new_tokens, or make the cache larger",
            )

    def prompt(self, serial: int) -> list[int]:
        """The tokens that the reply of a job follows: its prompt, less a healed token. KeyError for one that ended."""
        return list(self._jobs[serial].task.prompts[0])

    def cancel(self, serial: int) -> bool:
        """End a job without a result. False if there is none."""
        self._pending = [result for result in self._pending if result.serial != serial]
        self._jobs.pop(serial, None)
        return self._scheduler.end(serial)

    def clear(self) -> None:
        """Cancel every job."""
        for serial in list(self._jobs):
            self.cancel(serial)
        self._pending = []

    def generate(self, jobs: Sequence[Job], abort: Callable[[], bool] = lambda: False) -> list[Final] | None:
        """Run jobs to their ends, in their order; None once `abort` is true, which is asked before every step.

        A job that fails raises its error, and the others are cancelled. UsageError while earlier jobs remain: their
        results would be lost.
        """
        if self.remaining:
            raise UsageError(f"{self.remaining} jobs have not ended", "iterate until they have, or clear them")
        finals: dict[int, Final] = {}
        try:
            serials = [self.enqueue(job) for job in jobs]
            while self.remaining:
                if abort():
                    return None
                for result in self.iterate():
                    if isinstance(result, Failed):
                        raise result.error
                    if isinstance(result, Streamed) and result.final is not None:
                        finals[result.serial] = result.final
        finally:
            self.clear()
        return [finals[serial] for serial in serials]

    def set_adapters(self, adapters: Sequence[Scaled]) -> None:
        """The LoRAs of all jobs to come. What is cached is found again by jobs with the same ones. UsageError while
        jobs remain."""
        if self._jobs:
            raise UsageError(f"{self.remaining} jobs have not ended", "change LoRAs when there are none")
        salt = cache_salt(adapters)
        if salt != self._salt:  # a new executor records its graphs anew
            model = with_adapters(self._model, adapters)
            self._executor = Executor(model, self._cache, self.language.size)
            self._salt = salt
            self._rounds = self._drafting if rounds_alike(model) else None

    def warm_up(self) -> None:
        """Write a few tokens and forget them, so that the first job is as fast as the others."""
        self._executor.warm_up()
        new = min(WARM_UP, self._cache.capacity - 2)
        self.generate([Job(((0, 0),), new, Sampling(temperature=0))])
        self.reset()

    def reset(self) -> None:
        """Forget everything that is cached. Jobs go on, and read their texts again."""
        self._scheduler.reset()

    def iterate(self) -> list[Result]:
        """One step: part of the prompts, and a token of every reply that is being written.

        After an error or an interrupt, whatever it was, the same jobs go on with the next call, which brings the
        results that this one had, too. After one of the model what was in the cache is read again, as it is after
        another generator's use: then this takes as many steps as it takes to write on, or two in turns never would.
        """
        lost = self._claim()
        while self._jobs and not self._step() and lost:
            pass
        results, self._pending = self._pending, []
        return results

    def _step(self) -> bool:
        """Whether replies were written, and not prompts alone read."""
        try:
            self._defragment()
            plan = self._scheduler.plan()
            self._start(plan)
            recordings = self._recordings
            turns = self._compute(plan)
        except BaseException:
            self._scheduler.reset()
            raise
        try:
            for turn in turns:
                if turn.serial in self._jobs:  # no hook cancelled it
                    self._write(turn)
        finally:  # whatever happens, the scheduler knows of every token that a reply has
            self._commit(plan, turns)
            self._tell_progress(plan)
        if self._rounds is not None and self._recordings == recordings:  # else the time says nothing
            drafted = {turn.serial: len(turn.drafts) for turn in turns}
            self._rounds.end(plan, drafted, {turn.serial: turn.accepted for turn in turns})
        return bool(turns)

    def _compute(self, plan: StepPlan) -> list[_Turn]:
        """Carry out a step, with drafts behind the last tokens; what it computed for each job."""
        self._executor.embed(self._embedded(plan))
        step = plan
        if self._rounds is not None:
            running = self._scheduler.running  # thousands may wait
            step = self._rounds.begin(plan, {serial: self._jobs[serial].task.chooser for serial in running})
        drafts = {new.job: new.tokens[len(old.tokens) :] for old, new in zip(plan.decode, step.decode, strict=True)}
        places: dict[int, list[int]] = {}
        for place, row in enumerate(step.decode):
            places.setdefault(row.job, []).append(place)
        jobs = {serial: self._jobs[serial] for serial in places}
        draws = {
            serial: job.drawing
            for serial, job in jobs.items()
            if job.task.chooser.on_device and not (drafts[serial] and job.drawing.counts)
        }
        hosts = [jobs[serial] for serial in jobs.keys() - draws.keys()]
        computed = self._executor.run(step, draws, partial(_prepare, hosts))
        turns = []
        for serial, rows in places.items():
            turn = _Turn(serial, jobs[serial], len(jobs[serial].task.chooser.tokens), drafts[serial], None)
            last = 1 + len(turn.drafts)
            if serial in computed.drawn:
                turn.drew = computed.drawn[serial][-last:]
            else:
                turn.logits = np.stack([computed.rows[row][-last:].numpy(force=True) for row in rows])
            turns.append(turn)
        if self._rounds is not None:
            self._rounds.computed()
        return turns

    @property
    def _recordings(self) -> int:
        return self._executor.recordings + (self._draft_model.recordings if self._draft_model else 0)

    def _defragment(self) -> None:
        """Before the first job of several, when the results of all earlier ones have been handed out: a failure costs
        none of them, and what was in the cache is read again. Where pages are followed there is nothing to win."""
        if self._scheduler.running or not self._executor.gathers:
            return
        copies = self._scheduler.defragment()
        self._executor.copy(copies)
        if self._draft_model is not None:
            self._draft_model.copy(copies)

    def _claim(self) -> bool:
        """Whoever used a cache since the last step has overwritten its pages. Whether running jobs lost some."""
        kept = [cache.claim(self) and cache.length == 0 for cache in self._caches]
        if all(kept):
            return False
        lost = bool(self._scheduler.running)
        self._scheduler.reset()
        self._empty()
        return lost

    def _empty(self) -> None:
        for cache in self._caches:
            cache.truncate(0)

    def _start(self, plan: StepPlan) -> None:
        """The jobs that began to run for the first time: one that lost its pages begins again without a word."""
        for serial in plan.started:
            job = self._jobs[serial]
            if not job.times.started:
                self._pending.append(Started(serial))
                job.times.started = time.perf_counter()

    def _write(self, turn: _Turn) -> None:
        """The tokens of one job, up to one that is not the draft."""
        job, chooser = turn.job, turn.job.task.chooser
        if not job.times.drew:
            job.times.drew = time.perf_counter()
            job.cached = self._scheduler.progress(turn.serial).cached
        job.drafted += len(turn.drafts)
        try:
            for number in range(1 + len(turn.drafts)):
                token = chooser.draw(turn.logits[:, number]) if turn.logits is not None else checked(turn.drew[number])
                if turn.serial not in self._jobs:  # its own hook cancelled it
                    break
                advance = job.task.push(token)
                right = number < len(turn.drafts) and token == turn.drafts[number]
                turn.accepted += right
                job.accepted += right
                self._pending += _streamed(turn.serial, job, advance)
                turn.over = advance.end is not None
                if turn.over or advance.rewound or not right:
                    break
        except Exception as error:  # of a filter or a hook, too
            turn.over = True
            if turn.serial in self._jobs:
                self._pending.append(Failed(turn.serial, error, job.task.text))

    def _commit(self, plan: StepPlan, turns: Sequence[_Turn]) -> None:
        """Tell the scheduler what each reply has more, or less, than before the step."""
        new = {turn.serial: turn.job.task.chooser.tokens[turn.length :] for turn in turns}
        full = self._scheduler.commit(plan, new)
        for turn in turns:
            if turn.serial in full and not turn.over:  # its last token was added, and no more
                self._pending += _streamed(turn.serial, turn.job, turn.job.task.finish(End("max_new_tokens")))
            if turn.over or turn.serial in full:
                self._jobs.pop(turn.serial, None)
                self._scheduler.end(turn.serial)
            elif (rewound := turn.length - len(turn.job.task.chooser.tokens)) > 0 and turn.serial in self._jobs:
                self._scheduler.rewind(turn.serial, rewound)

    def _embedded(self, plan: StepPlan) -> tuple[InputEmbeddings, ...]:
        """What the jobs of `plan` have in their prompts, each once."""
        jobs = {row.job for row in (*plan.prefill, *plan.decode)}
        known = {one.ids: one for serial in jobs for one in self._jobs[serial].task.job.embeddings}
        return tuple(known.values())

    def _tell_progress(self, plan: StepPlan) -> None:
        for serial in dict.fromkeys(row.job for row in plan.prefill):
            if serial in self._jobs and self._jobs[serial].task.chooser.count == 0:
                progress = self._scheduler.progress(serial)
                self._pending.append(Prefilled(serial, progress.computed, progress.total))


def _prepare(jobs: Sequence[_Running]) -> None:
    """Find out which tokens may come next, for those jobs whose tokens the host draws."""
    for job in jobs:
        with suppress(Exception):  # of a filter, too: the draw meets it again, and this job alone fails
            job.task.chooser.prepare()


def _streamed(serial: int, job: _Running, advance: Advance) -> list[Result]:
    """What a token adds to a reply, if it is anything."""
    if not advance.tokens and not advance.text and not advance.suppressed and advance.end is None:
        return []
    final = _final(job, advance.end) if advance.end else None
    return [Streamed(serial, advance.text, advance.tokens, advance.suppressed, final)]


def _final(job: _Running, end: End) -> Final:
    times, now = job.times, time.perf_counter()
    return Final(
        end.reason,
        job.task.text,
        job.task.chooser.seed,
        new_tokens=job.task.chooser.count,
        prompt_tokens=len(job.task.prompts[0]),
        cached_tokens=job.cached,
        waited=times.started - times.enqueued,
        read=times.drew - times.started,
        wrote=now - times.drew,
        token=end.token,
        string=end.string,
        withheld_text=end.withheld_text,
        withheld=end.withheld,
        drafted=job.drafted,
        accepted=job.accepted,
    )
