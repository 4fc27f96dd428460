"""Ten thousand random lives of a scheduler: nothing lost, leaked, mixed up, shared for writing, starved or random."""

import random
import zlib
from array import array

import pytest

from exl2chat.engine.pages import PageTable
from exl2chat.engine.scheduler import Limits, Row, Scheduler, StepPlan
from exl2chat.errors import ChatError, ContextError
from tests.engine.paged_simulation import SALTED, TokenCache, check, run

SCHEDULES, PARTS = 10_000, 20
ALPHABET = 3


def next_token(text: list[int], attempt: int) -> int:
    """What the model would say: it depends on every token before, and on how often the reply was taken back."""
    return zlib.crc32(array("q", [attempt, *text]).tobytes()) % ALPHABET


class Life:
    """One random schedule, and what is known of it from outside."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.size = self.random.choice([2, 3, 4])
        total = self.random.randrange(3, 14)
        self.limits = Limits(
            batch=self.random.randrange(2, 6),
            queue=self.random.randrange(2, 8),
            chunk=self.random.choice([1, 3, 5, 20]),
            drafts=self.random.choice([0, 0, 2, 5]),
            skips=self.random.randrange(4),
        )
        self.table = PageTable(total, self.size)
        self.last = self.random.choice([1, 1, 2, 5])
        self.scheduler = Scheduler(self.table, self.limits, self.last)
        self.cache = TokenCache(total, self.size)
        self.prompts: dict[int, list[list[int]]] = {}
        self.replies: dict[int, list[int]] = {}
        self.attempts: dict[int, list[int]] = {}  # at each token of the reply
        self.rewinds: dict[int, int] = {}
        self.salts: dict[int, int] = {}
        self.most: dict[int, int] = {}
        self.done: set[int] = set()
        self.overtaken: dict[int, int] = {}
        self.plans: list[StepPlan] = []
        self.old: list[list[int]] = [[]]

    def enqueue(self) -> None:
        start = self.random.choice(self.old)
        start = start[: self.random.randrange(len(start) + 1)]
        tail = [self.random.randrange(ALPHABET) for _ in range(self.random.randrange(1, 3 * self.size))]
        prompts = [start + tail]
        if self.random.random() < 0.2:
            prompts.append(prompts[0][self.random.randrange(len(prompts[0])) :])
        most = self.random.randrange(1, 7 * self.size)
        salt = self.random.choice([0, 0, SALTED])
        waiting = len(self.scheduler.waiting)
        try:
            serial = self.scheduler.enqueue(prompts, most, salt=bytes(salt > 0))
        except ContextError:
            pages = sum(-(-(len(prompt) + most - 1) // self.size) for prompt in prompts)
            assert pages > self.table.total
        except ChatError:
            assert waiting >= self.limits.queue
        else:
            assert waiting < self.limits.queue
            self.prompts[serial], self.replies[serial], self.attempts[serial] = prompts, [], []
            self.most[serial], self.salts[serial] = most, salt
            self.overtaken[serial] = self.rewinds[serial] = 0

    def step(self) -> StepPlan:
        waiting = set(self.scheduler.waiting)
        plan = self.scheduler.plan()
        for started in plan.started:
            waiting.remove(started)
            for serial in waiting:
                self.overtaken[serial] += serial < started
        self.check_limits(plan)
        run(plan, self.cache, {
            (job, branch): prompt + self.replies[job]
            for job, prompts in self.prompts.items()
            for branch, prompt in enumerate(prompts)
        }, self.salts)  # fmt: skip
        sampled = {row.job: self.sample(row) for row in plan.decode if row.branch == 0}
        for row in plan.decode:
            accepted = [token + self.salts[row.job] for token in sampled[row.job][:-1]]
            self.cache.write(row.pages, row.start + len(row.tokens), accepted)
        if self.random.random() < 0.05:
            self.end(self.random.choice([*self.prompts, 0]))
        for job, new in sampled.items():
            if job in self.prompts:
                self.replies[job] += new
                self.attempts[job] += [self.rewinds[job]] * len(new)
        for job in self.scheduler.commit(plan, sampled):
            self.finish(job)
        return plan

    def check_limits(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        rows = [*plan.prefill, *plan.decode]
        assert len({(row.job, row.branch) for row in rows}) == len(rows) <= self.limits.batch
        assert sum(len(self.prompts[job]) for job in self.scheduler.running) <= self.limits.batch
        assert sum(len(row.tokens) for row in plan.prefill) <= self.limits.chunk
        assert all(1 <= len(row.tokens) <= self.last for row in plan.decode)
        assert bool(self.scheduler.running) == bool(self.prompts), "jobs wait for nothing"
        if self.scheduler.running:
            assert min(self.scheduler.running) in {row.job for row in rows}, "the oldest does not get on"

    def sample(self, row: Row) -> list[int]:
        """From what is in the cache and nothing else: some accepted drafts and a token."""
        end = row.start + len(row.tokens)
        text = [token % SALTED for token in self.cache.read(row.pages, end)]
        for _ in range(1 + self.random.randint(0, row.drafts)):
            text.append(next_token(text, self.rewinds[row.job]))
        return text[end:]

    def finish(self, job: int) -> None:
        """A job has all its tokens: exactly those that its first prompt alone leads to."""
        assert len(self.replies[job]) == self.most[job]
        text = list(self.prompts[job][0])
        for token, attempt in zip(self.replies[job], self.attempts[job], strict=True):
            assert token == next_token(text, attempt)
            text.append(token)
        self.done.add(job)
        self.forget(job)

    def end(self, job: int) -> None:
        assert self.scheduler.end(job) == (job in self.prompts)
        if job in self.prompts:
            self.forget(job)

    def forget(self, job: int) -> None:
        reply = self.replies.pop(job)
        self.old += [prompt + reply for prompt in self.prompts.pop(job)]

    def rewind(self) -> None:
        jobs = [job for job, reply in self.replies.items() if reply]
        if jobs:
            job = self.random.choice(jobs)
            count = self.random.randint(1, len(self.replies[job]))
            self.scheduler.rewind(job, count)
            del self.replies[job][-count:], self.attempts[job][-count:]
            self.rewinds[job] += 1

    def act(self) -> None:
        """Anything at all."""
        chance = self.random.random()
        if chance < 0.30:
            self.enqueue()
        elif chance < 0.86:
            self.step()
        elif chance < 0.90 and self.prompts:
            self.end(self.random.choice(list(self.prompts)))
        elif chance < 0.96:
            self.rewind()
        elif chance < 0.99:
            self.cache.copy(self.scheduler.defragment())
        else:
            self.scheduler.reset()
            self.cache = TokenCache(self.table.total, self.size)
        check(self.table, self.scheduler, self.cache)

    def drain(self) -> None:
        """Run to the end: the oldest running job gets on in every step, so there is a bound."""
        tokens = sum(len(prompt) + self.most[job] for job, prompts in self.prompts.items() for prompt in prompts)
        for _ in range(2 * tokens):
            if self.prompts:
                self.step()
                check(self.table, self.scheduler, self.cache)
        assert not self.prompts
        assert self.table.available == self.table.total


def live(seed: int) -> Life:
    life = Life(seed)
    for _ in range(life.random.randrange(5, 30)):
        life.act()
    life.drain()
    assert all(count <= life.limits.skips for count in life.overtaken.values())
    return life


@pytest.mark.parametrize("part", range(PARTS))
def test_ten_thousand_random_schedules(part: int) -> None:
    for seed in range(part, SCHEDULES, PARTS):
        try:
            live(seed)
        except BaseException as fault:
            fault.add_note(f"schedule {seed}")
            raise


def test_the_same_events_give_the_same_plans() -> None:
    for seed in range(100):
        assert live(seed).plans == live(seed).plans
