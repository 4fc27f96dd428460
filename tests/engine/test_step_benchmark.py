"""What is timed within a context, and how figures are written down."""

import pytest

from exl2chat.engine import jobs_benchmark
from exl2chat.engine.cache import PAGE
from exl2chat.engine.jobs_benchmark import ROOM
from exl2chat.engine.reply_benchmark import REPLY
from exl2chat.engine.step_benchmark import SHORT_WORKLOAD, WORKLOAD, Workload, as_objects
from exl2chat.ops.kernel_benchmark import KernelRow
from exl2chat.progress import silent
from tests.engine.tiny_models import byte_model


@pytest.mark.parametrize(
    ("room", "contexts", "prompts"),
    [
        (WORKLOAD.room, WORKLOAD.contexts, WORKLOAD.prompts),
        (WORKLOAD.room - 1, WORKLOAD.contexts[:-1], WORKLOAD.prompts),
        (4096, (128,), (64, 2048)),
        (300, (128,), (64,)),
        (100, (), (64,)),
        (50, (), (50,)),
    ],
)
def test_a_workload_keeps_to_the_context(room: int, contexts: tuple[int, ...], prompts: tuple[int, ...]) -> None:
    work = WORKLOAD.within(room)
    assert (work.contexts, work.prompts) == (contexts, prompts)
    assert work.room <= room


def test_a_workload_needs_room_for_its_longest_part() -> None:
    assert Workload((100,), (1, 5), (50,)).room == 100 + REPLY
    assert Workload((100,), (1, 5), (500,)).room == 500
    assert SHORT_WORKLOAD.room == 128 + REPLY


def test_several_tokens_at_once_are_compared_with_one() -> None:
    rows = [
        KernelRow("reply at context 128", 1, 2000.0, 1000.0, "a read", "reply at context 128"),
        KernelRow("5 tokens at once at context 128", 5, 2500.0, 1000.0, "a read", "reply at context 128"),
        KernelRow("5 tokens at once at context 4096", 5, 2500.0, 1000.0, "a read", "reply at context 4096"),
        KernelRow("prompt of 2048", 2048, 50_000.0, 40_000.0, "torch.mm"),
    ]
    one, five, alone, prompt = as_objects(rows)
    assert (one["tokens_per_second"], five["tokens_per_second"], prompt["tokens_per_second"]) == (500, 2000, 40_960)
    assert (one["ratio"], five["times_one"]) == (0.5, 1.25)
    assert not [figures for figures in (one, alone, prompt) if "times_one" in figures]


def test_a_reply_with_drafts_needs_room_after_the_first_context() -> None:
    work = Workload((100, 200), (1,), (50,), reply=4, drafted=90)
    assert Workload((100,), (1,), (50,), reply=4, drafted=90).room == 190
    assert work.room == 204
    assert [work.within(room).drafted for room in (204, 190, 189, 90)] == [90, 90, 0, 0]


def test_jobs_and_turns_are_timed_where_the_cache_has_room() -> None:
    assert WORKLOAD.jobs == (1, 8, 32, 64)
    assert WORKLOAD.turns
    assert Workload((), (), (), jobs=(1, 8, 64)).room == 64 * PAGE
    assert Workload((), (), (), turns=True).room == ROOM
    small = WORKLOAD.within(9 * PAGE)
    assert (small.jobs, small.turns) == ((1, 8), False)


def test_what_many_jobs_and_a_cached_conversation_take_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_benchmark, "STEPS", 2)
    monkeypatch.setattr(jobs_benchmark, "ROUNDS", 1)
    model = byte_model()
    cache = model.new_cache(ROOM)
    jobs = jobs_benchmark.measure_jobs(model, cache, (1, 3), 1e12, silent)
    turns = jobs_benchmark.measure_turns(model, cache, (1.0, 0.5), silent)
    one, three, plain, right, wrong, cold, turn = as_objects([*jobs, *turns])
    assert [one["name"], three["name"]] == ["1 job at context 128", "3 jobs at context 128"]
    name = "1 job at context 128, 128 tokens each"
    assert [row["name"] for row in (plain, right, wrong)] == [
        name, f"{name}, drafts always right", f"{name}, drafts always wrong"
    ]  # fmt: skip
    assert right["times_one"] == pytest.approx(right["microseconds"] / plain["microseconds"], abs=0.001)
    assert three["times_one"] == pytest.approx(three["microseconds"] / one["microseconds"], rel=0.01)
    assert three["tokens_per_second"] == pytest.approx(3e6 / three["microseconds"], rel=0.01)
    assert (cold["ceiling_microseconds"], turn["ceiling_microseconds"]) == (1e6, 5e5)
    assert turn["times_one"] == pytest.approx(turn["microseconds"] / cold["microseconds"], abs=0.001)
