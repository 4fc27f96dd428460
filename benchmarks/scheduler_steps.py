"""What planning a step costs: CPU microseconds of `plan` and `commit` with many jobs over pages of 256 tokens.

    python benchmarks/scheduler_steps.py [--tokens 4096] [--steps 300]

Every job has a prompt of its own behind a common beginning. CPU time, not wall time.
"""

import argparse
import random
import time

import numpy as np

from exl2chat.engine.pages import PageTable
from exl2chat.engine.scheduler import Limits, Scheduler

PAGE = 256


def measure(jobs: int, tokens: int, steps: int) -> str:
    """A row of the table: while prompts are read, and while all jobs decode."""
    choose = random.Random(1)
    common = [choose.randrange(100_000) for _ in range(tokens // 4)]
    pages = PageTable((jobs + 1) * -(-(tokens + steps) // PAGE), PAGE)
    scheduler = Scheduler(pages, Limits(batch=jobs, queue=jobs, chunk=2048))
    for _ in range(jobs):
        scheduler.enqueue([common + [choose.randrange(100_000) for _ in range(tokens - len(common))]], steps)
    spent: dict[bool, list[float]] = {False: [], True: []}
    while scheduler.waiting or scheduler.running:
        start = time.thread_time()
        plan = scheduler.plan()
        sampled = {row.job: [1] for row in plan.decode}
        scheduler.commit(plan, sampled)
        spent[bool(plan.prefill)].append((time.thread_time() - start) * 1e6)
    values = [f"{np.percentile(spent[prefill], at):.0f}" for prefill in (True, False) for at in (50, 99)]
    return " | ".join([str(jobs), *values])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    print("jobs | with prompts p50, us | p99 | decoding alone p50, us | p99")
    for jobs in (1, 8, 32, 64):
        print(measure(jobs, options.tokens, options.steps))


if __name__ == "__main__":
    main()
