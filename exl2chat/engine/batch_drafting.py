"""Drafts for many replies at once: the guesses of engine/drafting.py, for the decoding rows of a step."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from exl2chat.engine import penalties
from exl2chat.engine.cache import KVCache
from exl2chat.engine.device_draws import Drawing
from exl2chat.engine.drafting import SuffixDrafter
from exl2chat.engine.executor import Computed, Executor
from exl2chat.engine.pace import Pace
from exl2chat.engine.pages import PageCopy
from exl2chat.engine.replies.choosing import Chooser, known_to_device
from exl2chat.engine.scheduler import Row, StepPlan
from exl2chat.engine.transformer import Transformer, prefill_chunk
from exl2chat.errors import ChatError, UsageError

Choosers = Mapping[int, Chooser]  # of all jobs that run


class BatchDrafter(Protocol):
    """Proposes tokens of jobs."""

    def follow(self, plan: StepPlan) -> None:
        """A step is about to be carried out, but for its decoding rows."""

    def propose(self, rows: Sequence[Row], choosers: Choosers, count: int) -> Mapping[int, Sequence[int]]:
        """For the job of each row at most `count` tokens, and no more than the row has room for."""


class SuffixDrafts:
    """What followed earlier in the text of each job: a SuffixDrafter for every one."""

    def __init__(self, on_device: bool = False) -> None:
        """Where a device draws after every draft: nothing for jobs with penalties, whose tokens the host would draw."""
        self._on_device = on_device
        self._drafters: dict[int, SuffixDrafter] = {}

    def follow(self, plan: StepPlan) -> None:
        """Nothing depends on it."""

    def propose(self, rows: Sequence[Row], choosers: Choosers, count: int) -> Mapping[int, Sequence[int]]:
        self._drafters = {job: self._drafters.get(job) or SuffixDrafter() for job in choosers}
        return {
            row.job: self._drafters[row.job].propose(choosers[row.job].tokens, most)
            for row in rows
            if (most := min(count, row.drafts))
            and not (self._on_device and penalties.active(choosers[row.job].sampling))
        }


class ModelDrafts:
    """A smaller model of the same vocabulary, over pages of its own cache that go by the same numbers: what is cached
    for a model is for its draft model too. Where it is not, as after a page was shared by way of a reply that ended,
    guesses are worse and nothing else."""

    def __init__(self, model: Transformer, cache: KVCache, pages: int, size: int) -> None:
        """Drafts of the first `size` ids. UsageError where the cache has fewer than `pages` pages."""
        self._executor, self._size = Executor(model, cache, size), size
        cache.storage.zero_()  # what it lacks of a text must be numbers at least: nothing is right behind a NaN
        if self._executor.pages < pages:
            raise UsageError(
                f"the draft model's cache has {self._executor.pages} pages, and that of the model {pages}",
                "make it as long as the other",
            )
        self._chunk = prefill_chunk(model.device)
        self._known: dict[int, int] = {}  # tokens of a job's text that are in the cache
        self._drawings: dict[int, Drawing | None] = {}  # by job; None where the host draws

    def follow(self, plan: StepPlan) -> None:
        for job in (*plan.started, *plan.preempted):
            self._known.pop(job, None)
        for row in plan.decode:
            if row.branch == 0:  # what is beyond were drafts that proved wrong, or tokens that were taken back
                self._known[row.job] = min(self._known.get(row.job, row.start), row.start)
        prompts = tuple(row for row in plan.prefill if row.branch == 0)  # of a pair, those that `propose` goes on with
        self._executor.run(replace(plan, prefill=prompts, decode=()), {})

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Page copies outside of a step."""
        self._executor.copy(copies)

    @property
    def recordings(self) -> int:
        """As of the executor."""
        return self._executor.recordings

    def propose(self, rows: Sequence[Row], choosers: Choosers, count: int) -> Mapping[int, Sequence[int]]:
        drafts: dict[int, list[int]] = {row.job: [] for row in rows}
        going = [row for row in rows if row.drafts]
        *portions, missing = _portions([self._missing(row, choosers[row.job]) for row in going], self._chunk)
        for portion in portions:
            self._executor.run(StepPlan((), (), (), portion, ()), {})
        draws = self._draws(going, choosers)
        for number in range(count):
            going = [row for row in going if len(drafts[row.job]) == number < row.drafts]
            if not going:
                break
            step = [_after(row, drafts[row.job]) for row in going]
            plan = StepPlan((), (), (), () if number else missing, tuple(step))
            computed = self._executor.run(plan, draws)
            for place, row in enumerate(step):
                if (token := self._guess(computed, place, row, choosers[row.job])) is not None:
                    drafts[row.job].append(token)
                    self._known[row.job] = row.start + 1
        self._known = {job: known for job, known in self._known.items() if job in choosers}
        return drafts

    def _draws(self, rows: Sequence[Row], choosers: Choosers) -> Mapping[int, Drawing]:
        """How a device draws the drafts of each job: not with what it does not know, nor with penalties, which would
        count drafts."""
        for job in (row.job for row in rows if row.job not in self._drawings):
            drawing = Drawing(choosers[job].sampling, choosers[job].tokens)
            known = known_to_device(drawing.settings) and not drawing.counts
            self._drawings[job] = drawing if known else None
        self._drawings = {job: drawing for job, drawing in self._drawings.items() if job in choosers}
        return {job: drawing for job, drawing in self._drawings.items() if drawing is not None}

    def _guess(self, computed: Computed, place: int, row: Row, chooser: Chooser) -> int | None:
        """The draft after the one token of a row. None where its logits are no numbers: the drafts of the job end."""
        if row.job in computed.drawn:
            token = computed.drawn[row.job][0]
            return token if token >= 0 else None
        try:
            return chooser.guess(computed.logits(place)[0, : self._size], row.start + 1)
        except ChatError:
            return None

    def _missing(self, row: Row, chooser: Chooser) -> Row:
        """What the cache lacks of the text before the last token: what came of steps without drafts, or the last draft
        of a round in which all were right."""
        start = self._known[row.job]
        return replace(row, start=start, tokens=tuple(chooser.tokens[start:-1]))


def _portions(rows: Sequence[Row], size: int) -> list[tuple[Row, ...]]:
    """`rows` in parts of up to `size` tokens: at least one, which may be empty."""
    portions: list[list[Row]] = [[]]
    for row in rows:
        for first in range(0, len(row.tokens), size):
            piece = replace(row, start=row.start + first, tokens=row.tokens[first : first + size])
            if sum(len(other.tokens) for other in (*portions[-1], piece)) > size:
                portions.append([])
            portions[-1].append(piece)
    return [tuple(portion) for portion in portions]


def _after(row: Row, drafts: Sequence[int]) -> Row:
    """The last token of a row, or of its drafts, as a row."""
    last = drafts[-1] if drafts else row.tokens[-1]
    return replace(row, start=row.start + len(row.tokens) - 1 + len(drafts), tokens=(last,))


class Rounds:
    """Steps with as many drafts as pay, by a Pace for batches of about the same size: one for what a constraint forces,
    another for guesses."""

    def __init__(
        self,
        drafter: BatchDrafter | None,
        most: int,
        limit: Callable[[int], int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Up to `most` drafts for a sequence, and up to limit(n) for each of n."""
        self._drafter, self._most, self._limit, self._clock = drafter, most, limit, clock
        self._paces: dict[tuple[int, bool], Pace] = {}
        self._forced: Mapping[int, Sequence[int]] = {}
        self._started = self._seconds = 0.0

    def begin(self, plan: StepPlan, choosers: Choosers) -> StepPlan:
        """`plan` with drafts behind the tokens of its decoding rows. Both sequences of a job get the same: what its
        constraint forces, or else what the drafter proposes."""
        self._started = self._clock()
        firsts = [row for row in plan.decode if row.branch == 0]
        limit = self._limit(len(plan.decode)) if self._limit else self._most
        self._forced = {}
        if constrained := [row for row in firsts if choosers[row.job].constrained]:
            count = min(self._pace(plan, forced=True).length(), limit)
            forced = {row.job: choosers[row.job].forced()[: min(count, row.drafts)] for row in constrained if count}
            self._forced = {job: tokens for job, tokens in forced.items() if tokens}
        drafts = dict(self._forced)
        if self._drafter is not None:
            self._drafter.follow(plan)
            count = min(self._pace(plan, forced=False).length(), limit)
            drafts |= self._drafter.propose([row for row in firsts if row.job not in drafts], choosers, count)
        if not any(drafts.values()):
            return plan
        rows = [replace(row, tokens=(*row.tokens, *drafts.get(row.job, ()))) for row in plan.decode]
        return replace(plan, decode=tuple(rows))

    def computed(self) -> None:
        """The step has been carried out."""
        self._seconds = self._clock() - self._started

    def end(self, plan: StepPlan, drafted: Mapping[int, int], accepted: Mapping[int, int]) -> None:
        """How many drafts each job of `plan.decode` had, and how many were right. Jobs without any count as those
        whose drafts were wrong: they wait for the others', and gain nothing."""
        if plan.prefill or not plan.decode or any(len(row.tokens) > 1 for row in plan.decode):
            return  # it took longer than decoding does
        for forced in (True, False):
            pace = self._paces.get(_key(plan, forced))
            if pace is None:
                continue
            jobs = [job for job in drafted if drafted[job] == 0 or (job in self._forced) == forced]
            if most := max((drafted[job] for job in jobs), default=0):
                pace.drafted(most, [accepted[job] for job in jobs], self._seconds)
            elif not any(drafted.values()):
                pace.stepped(self._seconds)

    def _pace(self, plan: StepPlan, forced: bool) -> Pace:
        key = _key(plan, forced)
        if key not in self._paces:
            self._paces[key] = Pace(self._most)
        return self._paces[key]


def _key(plan: StepPlan, forced: bool) -> tuple[int, bool]:
    """By which a pace is kept: batches of up to twice the size go together."""
    return len(plan.decode).bit_length(), forced
