"""Many replies at once over one paged cache: jobs begin and end at any step (continuous batching), and a job finds what
of its text any job before it has computed.

A reply does not depend on the batch it ran in but for the rounding that `Executor` tells of: its noise is a function of
seed, position and token, and its sampler's memory is its own.
"""

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from exl2chat.engine.batch_drafting import ModelDrafts, Rounds, SuffixDrafts
from exl2chat.engine.cache import PAGE, KVCache
from exl2chat.engine.device_decoder import checked
from exl2chat.engine.device_draws import Drawing
from exl2chat.engine.drafting import Speculate, choose_drafts
from exl2chat.engine.embeddings import InputEmbeddings, check_prompt
from exl2chat.engine.executor import Executor
from exl2chat.engine.generators.jobs import Failed, Final, Job, Prefilled, Result, Started, Streamed, Times
from exl2chat.engine.generators.language import Language
from exl2chat.engine.generators.task import Advance, End, Task
from exl2chat.engine.lora import Scaled, cache_salt, with_adapters
from exl2chat.engine.pages import PageTable
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
    """What a step computed for a job: the logits [prompts, 1 + drafts, V], or the token that a device `drew`. Then the
    tokens of its reply that came of it, and what is to happen to the job."""

    serial: int
    drafts: tuple[int, ...]
    logits: NDArray[np.float32] | None
    drew: int = 0
    tokens: list[int] = field(default_factory=list)
    rewound: int = 0
    over: bool = False

    @property
    def accepted(self) -> int:
        """How many drafts were right."""
        return sum(map(operator.eq, self.tokens, self.drafts))


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
    ) -> None:
        """With limits.drafts, up to so many tokens of each reply are drafted at a time, as `speculate` says
        (`drafting.choose_drafts`). The draft model's cache, by default one as long as `cache`, is used by nobody
        else."""
        limits = limits or Limits(batch=64, queue=MANY, chunk=prefill_chunk(model.device))
        self.language = Language(tokenizer, model.config.vocab_size)
        self._model, self._cache = model, cache
        self._executor = Executor(model, cache, self.language.size)
        self._salt = cache_salt(())
        self._scheduler = Scheduler(PageTable(self._executor.pages, PAGE), limits, self._executor.last)
        self._jobs: dict[int, _Running] = {}
        self._caches = [cache]
        self._draft_model: ModelDrafts | None = None
        drafts = choose_drafts(speculate, model, draft_model, self.language.size) if limits.drafts else None
        if drafts == "draft" and draft_model is not None:
            draft_cache = draft_cache or draft_model.new_cache(cache.capacity)
            self._caches.append(draft_cache)
            self._draft_model = ModelDrafts(draft_model, draft_cache, self._executor.pages, self.language.size)
        drafter = SuffixDrafts() if drafts == "ngram" else self._draft_model
        self._rounds = Rounds(drafter, limits.drafts) if limits.drafts and speculate != "off" else None
        self._empty()

    @property
    def remaining(self) -> int:
        """How many jobs have not ended."""
        return len(self._jobs)

    def enqueue(self, job: Job) -> int:
        """The serial of a new job, whose results `iterate` will bring. UsageError for one that makes no sense,
        ContextError for one that the cache could never hold, ChatError when too many are waiting."""
        for prompt in job.prompts:
            self._check(prompt, job)
        if job.constraint is not None:
            job = replace(job, constraint=job.constraint.clone())
        task = Task(job, self.language)
        limit = job.max_new_tokens + bool(job.banned)  # so that the scheduler lets the last token be taken back
        serial = self._scheduler.enqueue(task.prompts, limit, self._salt)
        drawing = Drawing(task.chooser.sampling, task.chooser.tokens)
        self._jobs[serial] = _Running(task, drawing, Times(time.perf_counter()))
        return serial

    def _check(self, prompt: Sequence[int], job: Job) -> None:
        new = job.max_new_tokens
        if not prompt:
            raise UsageError("the prompt has no tokens", "give at least one")
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
        self._jobs.pop(serial, None)
        return self._scheduler.end(serial)

    def clear(self) -> None:
        """Cancel every job."""
        for serial in list(self._jobs):
            self.cancel(serial)

    def generate(self, jobs: Sequence[Job], abort: Callable[[], bool] = lambda: False) -> list[Final] | None:
        """Run jobs to their ends, in their order; None once `abort` is true, which is asked before every step.

        A job that fails raises its error, and the others are cancelled. UsageError while earlier jobs remain: their
        results would be lost.
        """
        if self._jobs:
            raise UsageError(f"{self.remaining} jobs have not ended", "iterate until they have, or clear them")
        finals: dict[int, Final] = {}
        try:
            serials = [self.enqueue(job) for job in jobs]
            while self._jobs:
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
        self._executor = Executor(with_adapters(self._model, adapters), self._cache, self.language.size)
        self._salt = cache_salt(adapters)

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

        After an error of the model, whatever it was, the same jobs go on with the next call; what was in the cache is
        read again.
        """
        self._claim()
        if not self._jobs:
            return []
        plan = self._scheduler.plan()
        try:
            started = self._start(plan)
            turns = self._compute(plan)
        except BaseException:
            self._scheduler.reset()
            raise
        results = self._write(plan, turns)
        if self._rounds is not None:
            self._rounds.end(plan, [len(turn.drafts) for turn in turns], [turn.accepted for turn in turns])
        if not self._jobs:
            self._defragment()
        return [*started, *results, *self._prefilled(plan)]

    def _compute(self, plan: StepPlan) -> list[_Turn]:
        """Carry out a step, with drafts behind the last tokens; what it computed for each job."""
        self._executor.embed(self._embedded(plan))
        step = plan
        if self._rounds is not None:
            step = self._rounds.begin(plan, {serial: job.task.chooser for serial, job in self._jobs.items()})
        drafts = {new.job: new.tokens[len(old.tokens) :] for old, new in zip(plan.decode, step.decode, strict=True)}
        places: dict[int, list[int]] = {}
        for place, row in enumerate(step.decode):
            places.setdefault(row.job, []).append(place)
        jobs = {serial: self._jobs[serial] for serial in places}
        draws = {
            serial: job.drawing for serial, job in jobs.items() if job.task.chooser.on_device and not drafts[serial]
        }
        computed = self._executor.run(step, draws)
        turns = []
        for serial, rows in places.items():
            if serial in computed.drawn:
                turns.append(_Turn(serial, (), None, computed.drawn[serial]))
            else:
                logits = np.stack([computed.logits(row)[-1 - len(drafts[serial]) :] for row in rows])
                turns.append(_Turn(serial, drafts[serial], logits))
        if self._rounds is not None:
            self._rounds.computed()
        return turns

    def _defragment(self) -> None:
        copies = self._scheduler.defragment()
        self._executor.copy(copies)
        if self._draft_model is not None:
            self._draft_model.copy(copies)

    def _claim(self) -> None:
        """Whoever used a cache since the last step has overwritten its pages."""
        kept = [cache.claim(self) and cache.length == 0 for cache in self._caches]
        if not all(kept):
            self._scheduler.reset()
            self._empty()

    def _empty(self) -> None:
        for cache in self._caches:
            cache.truncate(0)

    def _start(self, plan: StepPlan) -> list[Result]:
        """The jobs that began to run for the first time: one that lost its pages begins again without a word."""
        results: list[Result] = []
        for serial in plan.started:
            job = self._jobs[serial]
            if not job.times.started:
                job.times.started = time.perf_counter()
                results.append(Started(serial))
        return results

    def _write(self, plan: StepPlan, turns: Sequence[_Turn]) -> list[Result]:
        """The tokens of this step. Whatever happens, the scheduler knows of every one that a reply has."""
        results: list[Result] = []
        try:
            for turn in turns:
                results += self._write_turn(turn)
        finally:
            self._scheduler.commit(plan, {turn.serial: turn.tokens for turn in turns})
            for turn in turns:
                if turn.over:
                    self.cancel(turn.serial)
                elif turn.rewound:
                    self._scheduler.rewind(turn.serial, turn.rewound)
        return results

    def _write_turn(self, turn: _Turn) -> list[Result]:
        """The tokens of one job, up to one that is not the draft."""
        job = self._jobs[turn.serial]
        if not job.times.drew:
            job.times.drew = time.perf_counter()
            job.cached = self._scheduler.progress(turn.serial).cached
        job.drafted += len(turn.drafts)
        results: list[Result] = []
        try:
            for number in range(1 + len(turn.drafts)):
                chooser, logits = job.task.chooser, turn.logits
                token = checked(turn.drew) if logits is None else chooser.draw(logits[:, number])
                advance = job.task.push(token)
                turn.tokens.append(token)
                right = number < len(turn.drafts) and token == turn.drafts[number]
                job.accepted += right
                turn.rewound, turn.over = advance.rewound, advance.end is not None
                results += _streamed(turn.serial, job, advance)
                if turn.over or turn.rewound or not right:
                    break
        except Exception as error:  # of a filter or a hook, too
            turn.over = True
            results.append(Failed(turn.serial, error, job.task.text))
        return results

    def _embedded(self, plan: StepPlan) -> tuple[InputEmbeddings, ...]:
        """What the jobs of `plan` have in their prompts, each once."""
        jobs = {row.job for row in (*plan.prefill, *plan.decode)}
        known = {one.ids: one for serial in jobs for one in self._jobs[serial].task.job.embeddings}
        return tuple(known.values())

    def _prefilled(self, plan: StepPlan) -> list[Result]:
        results: list[Result] = []
        for serial in dict.fromkeys(row.job for row in plan.prefill):
            if serial in self._jobs and self._jobs[serial].task.chooser.count == 0:
                progress = self._scheduler.progress(serial)
                results.append(Prefilled(serial, progress.computed, progress.total))
        return results


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
