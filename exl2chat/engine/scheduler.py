"""Which jobs run next: admission, chunked prefill between decoding steps, and pages for all of them. Pure Python.

A step is planned, carried out by somebody who has tensors, and committed:

    plan = scheduler.plan()              # page copies, then rows of tokens with their page tables
    scheduler.commit(plan, sampled)      # the tokens are in the cache; what was sampled ends each sequence

Order is the order of arrival. The oldest job always runs on: pages are given as texts grow, and where none is left the
youngest job gives up its own and waits again, its text kept and its pages in the prompt cache until others need them.
The alternative, reserving room for every token that a job may ever generate, runs a fraction of the jobs: most replies
end long before their limit. What a job lost is computed again at the speed of a prompt, and its reply does not change,
for the sampler's noise depends on the position alone.
"""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from exl2chat.engine.pages import PageCopy, PagedSequence, PageTable
from exl2chat.errors import ChatError, ContextError, UsageError


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the scheduler.

    batch: sequences that run at a time. queue: jobs that wait. chunk: prompt tokens of all jobs in one step, so that
    replies go on between the parts of a long prompt. drafts: tokens beyond the next that may be tried in one step.
    skips: how often in its life a job that waits for room may be overtaken.
    """

    batch: int
    queue: int
    chunk: int
    drafts: int = 0
    skips: int = 4


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens of one sequence to run through the model in this step.

    `branch` is the sequence within its job (a CFG pair has two). `tokens` stand at `start` and following; `pages` hold
    the text from position 0 on and have room for `drafts` tokens more.
    """

    job: int
    branch: int
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    drafts: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. The copies come first, in their order; rows of `decode` need logits, those of `prefill` none.

    A row of `decode` has a sequence's last tokens: one, but at the beginning of a reply. `started` and `preempted` jobs
    began to run, and to wait again.
    """

    copies: tuple[PageCopy, ...]
    started: tuple[int, ...]
    preempted: tuple[int, ...]
    prefill: tuple[Row, ...]
    decode: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens of a job, summed over its sequences: its text so far, how many are computed, how many were cached."""

    total: int
    computed: int
    cached: int


@dataclass(slots=True, eq=False)
class _Job:
    """`most` is how many tokens of each sequence can ever be in the cache; `limit` is max_new_tokens."""

    serial: int
    sequences: tuple[PagedSequence, ...]
    most: tuple[int, ...]
    limit: int
    generated: int = 0
    cached: int = 0
    skips: int = 0

    def ready(self, last: int) -> bool:
        """Whether all is computed but up to `last` tokens at the end of each sequence."""
        return all(sequence.length >= len(sequence.tokens) - last for sequence in self.sequences)


@dataclass(slots=True)
class _Step:
    """A plan in the making. `claimed` are digests of pages that a row of the plan is on its way to."""

    budget: int
    copies: list[PageCopy] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    prefill: list[Row] = field(default_factory=list)
    decode: list[Row] = field(default_factory=list)
    claimed: set[bytes] = field(default_factory=set)


class Scheduler:
    """Jobs over one page table. `waiting` and `running` are serials, in order of arrival."""

    def __init__(self, pages: PageTable, limits: Limits, last: int = 1) -> None:
        """Up to `last` tokens of a prompt, at least 1, are left to the step that draws the first of its reply, unless
        several jobs have prompts to be read: these are then read at once."""
        self._pages, self._limits, self._last = pages, limits, last
        self._waiting: list[_Job] = []
        self._running: list[_Job] = []
        self._jobs: dict[int, _Job] = {}  # those two, by serial
        self._plan: StepPlan | None = None
        self._next = 0

    @property
    def waiting(self) -> tuple[int, ...]:
        return tuple(job.serial for job in self._waiting)

    @property
    def running(self) -> tuple[int, ...]:
        return tuple(job.serial for job in self._running)

    def enqueue(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, salt: bytes = b"") -> int:
        """A job that continues every prompt with the same `max_new_tokens` tokens at most; its serial.

        `salt` names what keys and values depend on beside tokens. ContextError for a job that no empty cache could
        hold, UsageError for one that makes no sense, ChatError when too many are waiting.
        """
        if not prompts or not all(prompts):
            raise UsageError("the prompt has no tokens", "give at least one")
        if max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is {max_new_tokens}", "it is at least 1")
        if len(prompts) > self._limits.batch:
            raise UsageError(f"a job of {len(prompts)} sequences", f"max_batch_size is {self._limits.batch}")
        if len(self._waiting) >= self._limits.queue:
            raise ChatError(f"{len(self._waiting)} jobs are waiting already", "wait for one to end or cancel it")
        most = tuple(len(prompt) + max_new_tokens - 1 for prompt in prompts)
        if (needed := sum(map(self._pages.pages_for, most))) > self._pages.total:
            raise ContextError(
                f"a prompt of {max(map(len, prompts))} tokens and {max_new_tokens} more take {needed} pages of "
                f"{self._pages.size}, and the cache has {self._pages.total}",
                "shorten the prompt, lower max_new_tokens, or make the cache larger",
            )
        serial, self._next = self._next, self._next + 1
        sequences = tuple(PagedSequence(prompt, salt) for prompt in prompts)
        self._jobs[serial] = _Job(serial, sequences, most, max_new_tokens)
        self._waiting.append(self._jobs[serial])
        return serial

    def progress(self, serial: int) -> Progress:
        """How far a waiting or running job is. KeyError for one that ended."""
        job = self._jobs[serial]
        texts = job.sequences
        return Progress(sum(len(text.tokens) for text in texts), sum(text.length for text in texts), job.cached)

    def plan(self) -> StepPlan:
        """The next step; without rows where there is nothing to do. RuntimeError before the last one is committed."""
        if self._plan is not None:
            raise RuntimeError("the last step is not committed")
        step = _Step(self._limits.chunk)
        self._admit(step)
        reading = sum(not job.ready(1) for job in self._running)
        last = self._last if reading == 1 else 1
        for job in list(self._running):
            if job not in self._running:
                continue  # preempted by an older one
            self._attach(job, step)
            if not job.ready(last):
                self._prefill(job, step)
            elif self._grow(job, step):
                self._decode(job, step)
        self._plan = StepPlan(
            tuple(step.copies),
            tuple(step.started),
            tuple(step.preempted),
            tuple(step.prefill),
            tuple(step.decode),
        )
        return self._plan

    def commit(self, plan: StepPlan, sampled: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
        """The plan was carried out. Returns the jobs that have all their tokens now.

        sampled: for each job of `plan.decode`, the accepted drafts and one token more. Jobs that were ended meanwhile
        are passed over, and those without tokens take the step again.
        """
        if plan is not self._plan:
            raise RuntimeError("this is not the step that was planned last")
        self._plan = None
        for row in plan.prefill:
            if (job := self._jobs.get(row.job)) is not None:
                self._pages.commit(job.sequences[row.branch], len(row.tokens))
        for row in plan.decode:
            if (job := self._jobs.get(row.job)) is not None and (new := sampled.get(row.job)):
                if not 1 <= len(new) <= 1 + row.drafts:
                    raise ValueError(f"{len(new)} tokens for a row of 1 to {1 + row.drafts}")
                job.sequences[row.branch].tokens += new
                self._pages.commit(job.sequences[row.branch], len(row.tokens) - 1 + len(new))
                job.generated += len(new) if row.branch == 0 else 0
        done = tuple(job.serial for job in self._running if job.generated == job.limit)
        for serial in done:
            self.end(serial)
        return done

    def end(self, serial: int) -> bool:
        """Forget a job at whatever stage; its pages stay cached. False if there is none. Allowed during a step."""
        job = self._jobs.pop(serial, None)
        if job is None:
            return False
        (self._running if job in self._running else self._waiting).remove(job)
        for sequence in job.sequences:
            self._pages.release(sequence)
        return True

    def rewind(self, serial: int, count: int) -> None:
        """Take back the last `count` generated tokens of a job. Not during a step; KeyError for a job that ended."""
        job = self._jobs[serial]
        if self._plan is not None:
            raise RuntimeError("a step is under way")
        if not 0 <= count <= job.generated:
            raise ValueError(f"{count} of {job.generated} generated tokens")
        for sequence in job.sequences:
            self._pages.rewind(sequence, len(sequence.tokens) - count)
        job.generated -= count

    def defragment(self) -> list[PageCopy]:
        """Page copies to carry out before the next step, where they are worth it. For a moment without work."""
        if self._plan is not None:
            raise RuntimeError("a step is under way")
        return self._pages.defragment()

    def reset(self) -> None:
        """The cache's contents are lost, by a failed step or a new model: forget them, and begin running jobs again."""
        self._plan = None
        for job in list(self._running):
            self._wait(job)
        self._pages.clear()

    def _admit(self, step: _Step) -> None:
        """Start waiting jobs that fit. Later ones may overtake one that does not, each time at the cost of a skip."""
        passed: list[_Job] = []
        for job in list(self._waiting):
            if self._fits(job):
                self._waiting.remove(job)
                bisect.insort(self._running, job, key=_serial)
                step.started.append(job.serial)
                self._attach(job, step)  # now, so that the next one is measured against what is left
                for overtaken in passed:
                    overtaken.skips += 1
            else:
                passed.append(job)
            if any(overtaken.skips >= self._limits.skips for overtaken in passed):
                return

    def _fits(self, job: _Job) -> bool:
        """Whether there is room for the job's text and a page more, and for what running jobs will soon take."""
        if sum(len(other.sequences) for other in [*self._running, job]) > self._limits.batch:
            return False
        promised = sum(sum(self._wanted(other)) for other in self._running)
        needed = sum(self._wanted(job))
        for sequence in job.sequences:
            found, unheld = self._pages.cached(sequence)
            needed -= found - unheld
        return promised + needed <= self._pages.available

    def _wanted(self, job: _Job) -> Iterator[int]:
        """For each sequence, how many pages it lacks for its text and one page of new tokens."""
        for sequence, most in zip(job.sequences, job.most, strict=True):
            pages = min(self._pages.pages_for(len(sequence.tokens)) + 1, self._pages.pages_for(most))
            yield max(pages - len(sequence.pages), 0)

    def _attach(self, job: _Job, step: _Step) -> None:
        for sequence in job.sequences:
            before = sequence.length
            step.copies += self._pages.attach(sequence)
            job.cached += sequence.length - before

    def _prefill(self, job: _Job, step: _Step) -> None:
        """A part of the job's prompts. A page that an earlier row is on its way to is waited for, not done twice."""
        for branch, sequence in enumerate(job.sequences):
            missing = self._pages.missing(sequence)
            if missing and missing[0] in step.claimed:
                continue
            start = sequence.length
            count = min(len(sequence.tokens) - 1 - start, step.budget)
            if count and self._reserve(job, sequence, count, step):
                step.budget -= count
                step.claimed.update(missing)
                tokens = tuple(sequence.tokens[start : start + count])
                step.prefill.append(Row(job.serial, branch, start, tokens, _indices(sequence)))

    def _grow(self, job: _Job, step: _Step) -> bool:
        """Room for the last tokens of every sequence."""
        return all(self._reserve(job, sequence, sequence.missing, step) for sequence in job.sequences)

    def _decode(self, job: _Job, step: _Step) -> None:
        """The job's last tokens, with room for as many drafts as can be had without taking pages from another job. The
        end of a prompt gets none: with more tokens a GPU may round its logits in another way."""
        drafts = min(self._limits.drafts, job.limit - job.generated - 1)
        if any(sequence.missing > 1 for sequence in job.sequences):
            drafts = 0
        for sequence in job.sequences:
            if self._pages.reserve(sequence, sequence.missing + drafts) is None:
                drafts = len(sequence.pages) * self._pages.size - len(sequence.tokens)
        for branch, sequence in enumerate(job.sequences):
            last = tuple(sequence.tokens[sequence.length :])
            step.decode.append(Row(job.serial, branch, sequence.length, last, _indices(sequence), drafts))

    def _reserve(self, job: _Job, sequence: PagedSequence, count: int, step: _Step) -> bool:
        """Room for `count` more tokens, if need be at the cost of younger jobs. Without it the job skips this step."""
        while (copies := self._pages.reserve(sequence, count)) is None:
            youngest = self._running[-1]
            if youngest is job:
                return False
            self._wait(youngest)
            step.preempted.append(youngest.serial)
        step.copies += copies
        return True

    def _wait(self, job: _Job) -> None:
        """Put a running job back among those that wait; its pages stay cached."""
        self._running.remove(job)
        for sequence in job.sequences:
            self._pages.release(sequence)
        bisect.insort(self._waiting, job, key=_serial)


def _serial(job: _Job) -> int:
    return job.serial


def _indices(sequence: PagedSequence) -> tuple[int, ...]:
    return tuple(page.index for page in sequence.pages)
