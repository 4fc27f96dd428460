"""Many replies at once over one paged cache: jobs begin and end at any step (continuous batching), and a job finds what
of its text any job before it has computed.

A reply does not depend on the batch it ran in but for the rounding that `Executor` tells of: its noise is a function of
seed, position and token, and its sampler's memory is its own.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from exl2chat.engine.cache import PAGE, KVCache
from exl2chat.engine.device_decoder import checked
from exl2chat.engine.device_draws import Drawing
from exl2chat.engine.executor import Executor
from exl2chat.engine.generators.jobs import Failed, Final, Job, Prefilled, Result, Started, Streamed, Times
from exl2chat.engine.generators.language import Language
from exl2chat.engine.generators.task import End, Task
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


class DynamicGenerator:
    """Runs jobs on one model over the memory of one cache. Not to be called by two threads at once.

    Another generator may use the cache between steps: what it holds is then read again.
    """

    def __init__(self, model: Transformer, cache: KVCache, tokenizer: Tokenizer, limits: Limits | None = None) -> None:
        """limits.drafts is 0. UsageError for a quantised cache."""
        limits = limits or Limits(batch=64, queue=MANY, chunk=prefill_chunk(model.device))
        if limits.drafts:
            raise UsageError("the dynamic generator does not draft yet", "leave limits.drafts at 0")
        self.language = Language(tokenizer, model.config.vocab_size)
        self._model, self._cache = model, cache
        self._executor = Executor(model, cache, self.language.size)
        self._salt = cache_salt(())
        self._scheduler = Scheduler(PageTable(self._executor.pages, PAGE), limits, self._executor.last)
        self._jobs: dict[int, _Running] = {}
        cache.truncate(0)

    @property
    def remaining(self) -> int:
        """How many jobs have not ended."""
        return len(self._jobs)

    def enqueue(self, job: Job) -> int:
        """The serial of a new job, whose results `iterate` will bring. UsageError for one that makes no sense,
        ContextError for one that the cache could never hold, ChatError when too many are waiting."""
        for prompt in job.prompts:
            self._check(prompt, job.max_new_tokens)
        if job.constraint is not None:
            job = replace(job, constraint=job.constraint.clone())
        task = Task(job, self.language)
        limit = job.max_new_tokens + bool(job.banned)  # so that the scheduler lets the last token be taken back
        serial = self._scheduler.enqueue(task.prompts, limit, self._salt)
        drawing = Drawing(task.chooser.sampling, task.chooser.tokens)
        self._jobs[serial] = _Running(task, drawing, Times(time.perf_counter()))
        return serial

    def _check(self, prompt: Sequence[int], new: int) -> None:
        if not prompt:
            raise UsageError("the prompt has no tokens", "give at least one")
        if min(prompt) < 0 or max(prompt) >= self.language.size:
            raise UsageError("the prompt has token ids that are no tokens", f"ids are 0 to {self.language.size - 1}")
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
            sampled, failed = self._draw(plan)
        except BaseException:
            self._scheduler.reset()
            raise
        self._scheduler.commit(plan, sampled)
        results = [*started, *failed, *self._prefilled(plan)]
        for serial, (token,) in sampled.items():
            results += self._advance(serial, token)
        if not self._jobs:
            self._executor.copy(self._scheduler.defragment())
        return results

    def _claim(self) -> None:
        """Whoever used the cache since the last step has overwritten its pages."""
        if not self._cache.claim(self) or self._cache.length:
            self._scheduler.reset()
            self._cache.truncate(0)

    def _start(self, plan: StepPlan) -> list[Result]:
        """The jobs that began to run for the first time: one that lost its pages begins again without a word."""
        results: list[Result] = []
        for serial in plan.started:
            job = self._jobs[serial]
            if not job.times.started:
                job.times.started = time.perf_counter()
                results.append(Started(serial))
        return results

    def _draw(self, plan: StepPlan) -> tuple[dict[int, list[int]], list[Result]]:
        """The tokens of this step by job; and the jobs that can have none, which are ended."""
        rows: dict[int, list[int]] = {}
        for n, row in enumerate(plan.decode):
            rows.setdefault(row.job, []).append(n)
        drawings = {serial: self._jobs[serial].drawing for serial in rows if self._jobs[serial].task.chooser.on_device}
        computed = self._executor.run(plan, drawings)
        sampled: dict[int, list[int]] = {}
        failed: list[Result] = []
        for serial, places in rows.items():
            job = self._jobs[serial]
            if not job.times.drew:
                job.times.drew = time.perf_counter()
                job.cached = self._scheduler.progress(serial).cached
            try:
                if serial in computed.drawn:
                    sampled[serial] = [checked(computed.drawn[serial])]
                else:
                    logits = np.stack([computed.logits(place)[-1] for place in places])
                    sampled[serial] = [job.task.chooser.draw(logits)]
            except Exception as error:  # of a filter or a hook, too
                failed.append(Failed(serial, error, job.task.text))
                self.cancel(serial)
        return sampled, failed

    def _prefilled(self, plan: StepPlan) -> list[Result]:
        results: list[Result] = []
        for serial in dict.fromkeys(row.job for row in plan.prefill):
            if serial in self._jobs and self._jobs[serial].task.chooser.count == 0:
                progress = self._scheduler.progress(serial)
                results.append(Prefilled(serial, progress.computed, progress.total))
        return results

    def _advance(self, serial: int, token: int) -> list[Result]:
        """What a token just drawn adds to a reply."""
        job = self._jobs[serial]
        try:
            advance = job.task.push(token)
        except Exception as error:
            self.cancel(serial)
            return [Failed(serial, error, job.task.text)]
        if advance.rewound:
            self._scheduler.rewind(serial, advance.rewound)
        final = None
        if advance.end is not None:
            final = _final(job, advance.end)
            self.cancel(serial)
        if not advance.tokens and not advance.text and not advance.suppressed and final is None:
            return []
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
    )
