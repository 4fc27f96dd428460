"""The order in which jobs run, and what each step does for them. Pages of four tokens."""

from collections.abc import Sequence

import pytest

from exl2chat.engine.pages import PageTable
from exl2chat.engine.scheduler import Limits, Progress, Scheduler, StepPlan
from exl2chat.errors import ChatError, ContextError, UsageError

SIZE = 4


def scheduler(
    pages: int = 16, batch: int = 8, queue: int = 8, chunk: int = 100, drafts: int = 0, skips: int = 2
) -> Scheduler:
    return Scheduler(PageTable(pages, SIZE), Limits(batch, queue, chunk, drafts, skips))


def prompt(first: int, count: int) -> list[int]:
    """A text that shares nothing with that of another `first`."""
    return list(range(first * 1000, first * 1000 + count))


def step(jobs: Scheduler, tokens: Sequence[int] = (7,)) -> StepPlan:
    plan = jobs.plan()
    jobs.commit(plan, {row.job: tokens[: row.drafts + 1] for row in plan.decode})
    return plan


def rows(plan: StepPlan) -> tuple[dict[int, int], list[int]]:
    """Tokens of each job's prompt, and the jobs that decode."""
    return {row.job: len(row.tokens) for row in plan.prefill}, [row.job for row in plan.decode]


def test_a_job_reads_its_prompt_and_then_decodes_from_its_last_token() -> None:
    jobs = scheduler()
    job = jobs.enqueue([prompt(1, 6)], 2)
    first = step(jobs)
    assert (first.started, rows(first)) == ((job,), ({job: 5}, []))
    second = step(jobs)
    assert [(row.start, row.tokens) for row in second.decode] == [(5, (1005,))]
    third = jobs.plan()
    assert [(row.start, row.tokens) for row in third.decode] == [(6, (7,))]
    assert jobs.commit(third, {job: [8]}) == (job,)
    assert jobs.running == jobs.waiting == ()


def test_a_long_prompt_is_read_in_chunks_between_which_others_decode() -> None:
    jobs = scheduler(chunk=6)
    short = jobs.enqueue([prompt(1, 2)], 9)
    step(jobs)
    long = jobs.enqueue([prompt(2, 15)], 3)
    assert [rows(step(jobs)) for _ in range(4)] == [
        ({long: 6}, [short]),
        ({long: 6}, [short]),
        ({long: 2}, [short]),
        ({}, [short, long]),
    ]


def test_the_chunk_is_shared_by_all_prompts_in_order_of_arrival() -> None:
    jobs = scheduler(chunk=6)
    first, second = jobs.enqueue([prompt(1, 5)], 3), jobs.enqueue([prompt(2, 5)], 3)
    assert rows(step(jobs)) == ({first: 4, second: 2}, [])


def test_equal_prompts_are_computed_once() -> None:
    jobs = scheduler(chunk=100)
    first, second = (jobs.enqueue([prompt(1, 11)], 3) for _ in range(2))
    other = jobs.enqueue([prompt(2, 11)], 3)
    assert rows(step(jobs)) == ({first: 10, other: 10}, [])
    assert rows(step(jobs)) == ({}, [first, second, other])
    assert jobs.progress(second) == Progress(total=12, computed=11, cached=10)


def test_equal_prompts_are_computed_once_in_parts_too() -> None:
    jobs = scheduler(chunk=SIZE)
    first, second = (jobs.enqueue([prompt(1, 11)], 3) for _ in range(2))
    assert [rows(step(jobs)) for _ in range(4)] == [
        ({first: 4}, []),
        ({first: 4}, []),
        ({first: 2, second: 2}, []),
        ({}, [first, second]),
    ]
    assert jobs.progress(second).cached == 8


def test_the_next_turn_of_a_conversation_computes_only_what_is_new() -> None:
    jobs = scheduler()
    jobs.enqueue([prompt(1, 9)], 1)
    step(jobs)
    step(jobs)
    job = jobs.enqueue([[*prompt(1, 9), 7, 50, 51]], 3)
    plan = step(jobs)
    assert [row.tokens for row in plan.prefill] == [(7, 50)]
    assert plan.copies == ()
    assert jobs.progress(job).cached == 9


def test_a_pair_decodes_only_when_both_prompts_are_read_and_continues_both() -> None:
    jobs = scheduler(chunk=6)
    job = jobs.enqueue([prompt(1, 3), prompt(2, 8)], 2)
    assert [(row.branch, len(row.tokens)) for row in step(jobs).prefill] == [(0, 2), (1, 4)]
    assert [(row.branch, len(row.tokens)) for row in step(jobs).prefill] == [(1, 3)]
    assert [(row.branch, row.start) for row in step(jobs).decode] == [(0, 2), (1, 7)]
    assert [(row.branch, row.start, row.tokens) for row in step(jobs).decode] == [(0, 3, (7,)), (1, 8, (7,))]
    assert job not in jobs.running


def test_drafts_never_go_beyond_the_last_token() -> None:
    jobs = scheduler(drafts=3)
    job = jobs.enqueue([prompt(1, 2)], 6)
    step(jobs)
    assert [step(jobs, (7, 8, 9, 10)).decode[0].drafts for _ in range(2)] == [3, 1]
    assert job not in jobs.running


def test_the_end_of_a_prompt_gets_no_drafts() -> None:
    jobs = Scheduler(PageTable(16, SIZE), Limits(8, 8, 100, drafts=3), last=5)
    jobs.enqueue([prompt(1, 4)], 9)
    assert [(len(row.tokens), row.drafts) for row in [step(jobs).decode[0] for _ in range(2)]] == [(4, 0), (1, 3)]


def test_drafts_take_no_page_from_another_job() -> None:
    jobs = scheduler(pages=3, drafts=3)
    first, second = jobs.enqueue([prompt(1, 3)], 6), jobs.enqueue([prompt(2, 3)], 2)
    step(jobs)
    assert {row.job: row.drafts for row in jobs.plan().decode} == {first: 3, second: 1}


def test_more_or_fewer_tokens_than_a_row_allows_are_refused() -> None:
    jobs = scheduler()
    job = jobs.enqueue([prompt(1, 1)], 6)
    plan = jobs.plan()
    with pytest.raises(ValueError, match="2 tokens for a row of 1 to 1"):
        jobs.commit(plan, {job: [7, 8]})


def test_a_job_that_needs_room_may_be_overtaken_so_often_and_no_more() -> None:
    jobs = scheduler(pages=8, skips=2)
    small = [jobs.enqueue([prompt(1, 4)], 20)]
    step(jobs)
    large = jobs.enqueue([prompt(2, 28)], 4)
    small += [jobs.enqueue([prompt(n, 2)], 2) for n in (3, 4, 5)]
    started: list[int] = []
    while large not in started:
        started += step(jobs).started
    assert started == [small[1], small[2], large]
    assert small[3] not in jobs.running


def test_room_that_running_jobs_will_need_is_not_given_away() -> None:
    jobs = scheduler(pages=3, chunk=4)
    first = jobs.enqueue([prompt(1, 9)], 3)
    step(jobs)
    jobs.enqueue([prompt(2, 4)], 1)
    assert step(jobs).started == ()
    assert jobs.running == (first,)


def test_a_job_starts_with_room_for_a_page_of_new_tokens() -> None:
    jobs = scheduler(pages=4)
    jobs.enqueue([prompt(1, 4)], 5)
    jobs.enqueue([prompt(2, 4)], 5)
    jobs.enqueue([prompt(3, 4)], 1)
    assert step(jobs).started == (0, 1)


def test_cached_pages_that_a_job_takes_over_are_room_for_no_one_else() -> None:
    jobs = scheduler(pages=4)
    jobs.enqueue([prompt(1, 8)], 1)
    while jobs.running or jobs.waiting:
        step(jobs)
    second, third = jobs.enqueue([prompt(2, 7)], 2), jobs.enqueue([prompt(1, 13)], 1)
    assert step(jobs).started == (second,)
    assert step(jobs).started == ()
    assert jobs.waiting == (third,)


def test_the_youngest_job_gives_up_its_pages_and_goes_on_later_with_the_same_text() -> None:
    jobs = scheduler(pages=4)
    old, young = jobs.enqueue([prompt(1, 4)], 12), jobs.enqueue([prompt(2, 4)], 8)
    plans = [step(jobs)]
    while jobs.running or jobs.waiting:
        plans.append(step(jobs, (7,)))
    [preempting] = [plan for plan in plans if plan.preempted]
    assert preempting.preempted == (young,)
    assert [row.job for row in preempting.decode] == [old]
    assert [plan.started for plan in plans if plan.started] == [(old, young), (young,)]
    again = [row for plan in plans[plans.index(preempting) :] for row in plan.prefill]
    assert all(row.job == young for row in again)
    assert again[0].tokens[-1] == 7


def test_a_job_ends_at_any_stage_even_during_a_step() -> None:
    jobs = scheduler(batch=1)
    running, waiting = jobs.enqueue([prompt(1, 9)], 3), jobs.enqueue([prompt(2, 9)], 3)
    plan = jobs.plan()
    assert jobs.end(running)
    assert jobs.commit(plan, {}) == ()
    assert jobs.end(waiting)
    assert not jobs.end(running)
    assert rows(jobs.plan()) == ({}, [])


def test_tokens_can_be_taken_back() -> None:
    jobs = scheduler()
    job = jobs.enqueue([prompt(1, 3)], 9)
    for token in (7, 8, 9, 10):
        step(jobs, (token,))
    jobs.rewind(job, 2)
    [row] = jobs.plan().decode
    assert (row.start, row.tokens) == (3, (8,))


def test_only_generated_tokens_can_be_taken_back_and_not_during_a_step() -> None:
    jobs = scheduler()
    job = jobs.enqueue([prompt(1, 3)], 9)
    with pytest.raises(ValueError, match="1 of 0 generated"):
        jobs.rewind(job, 1)
    plan = jobs.plan()
    for call in (lambda: jobs.rewind(job, 0), jobs.plan, jobs.defragment):
        with pytest.raises(RuntimeError):
            call()
    jobs.commit(plan, {})
    with pytest.raises(RuntimeError):
        jobs.commit(plan, {})


def test_after_a_reset_every_job_computes_its_text_again() -> None:
    jobs = scheduler()
    job = jobs.enqueue([prompt(1, 6)], 9)
    for _ in range(3):
        step(jobs)
    jobs.plan()
    jobs.reset()
    assert jobs.waiting == (job,)
    assert [row.tokens for row in step(jobs).prefill] == [(*prompt(1, 6), 7)]


def test_jobs_that_have_ended_are_unknown() -> None:
    jobs = scheduler()
    for call in (lambda: jobs.progress(3), lambda: jobs.rewind(3, 1)):
        with pytest.raises(KeyError):
            call()


@pytest.mark.parametrize(
    ("prompts", "tokens", "error", "message"),
    [
        ([[1]], 0, UsageError, "max_new_tokens is 0"),
        ([[1]] * 3, 1, UsageError, "max_batch_size is 2"),
        ([[1] * 9], 8, ContextError, "take 4 pages of 4, and the cache has 3"),
        ([[1] * 5, [1] * 5], 1, ContextError, "take 4 pages of 4"),
    ],
)
def test_impossible_jobs_are_refused(
    prompts: list[list[int]], tokens: int, error: type[ChatError], message: str
) -> None:
    with pytest.raises(error, match=message):
        scheduler(pages=3, batch=2).enqueue(prompts, tokens)


def test_what_fills_the_cache_exactly_is_accepted_and_completed() -> None:
    jobs = scheduler(pages=3)
    jobs.enqueue([[1] * 5], 8)
    while jobs.running or jobs.waiting:
        step(jobs)


def test_the_queue_has_an_end() -> None:
    jobs = scheduler(queue=1)
    jobs.enqueue([[1]], 1)
    with pytest.raises(ChatError, match="1 jobs are waiting"):
        jobs.enqueue([[1]], 1)


# The end of a prompt


def test_the_last_tokens_of_one_prompt_are_left_to_the_step_that_draws() -> None:
    subject = Scheduler(PageTable(9, SIZE), Limits(batch=4, queue=9, chunk=100), last=3)
    subject.enqueue([[1, 2, 3, 4, 5]], 5)
    plan = subject.plan()
    assert ([row.tokens for row in plan.prefill], plan.decode) == ([(1, 2, 3, 4)], ())
    subject.commit(plan, {})
    subject.commit(subject.plan(), {0: [6]})
    subject.enqueue([[1, 2, 3, 4, 9, 9]], 5)
    plan = subject.plan()
    assert not plan.prefill
    assert [(row.job, row.start, row.tokens) for row in plan.decode] == [(0, 5, (6,)), (1, 4, (9, 9))]
    subject.commit(plan, {0: [7], 1: [8]})
    assert [(row.start, row.tokens) for row in subject.plan().decode] == [(6, (7,)), (6, (8,))]


def test_several_prompts_are_read_at_once() -> None:
    subject = Scheduler(PageTable(9, SIZE), Limits(batch=4, queue=9, chunk=100), last=3)
    for _ in range(2):
        subject.enqueue([[1, 2, 3]], 5)
    plan = subject.plan()
    assert [row.tokens for row in plan.prefill] == [(1, 2)] * 2
    assert not plan.decode
