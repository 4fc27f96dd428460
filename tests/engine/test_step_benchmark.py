"""What is timed within a context, and how figures are written down."""

import pytest

from exl2chat.engine.reply_benchmark import REPLY
from exl2chat.engine.step_benchmark import SHORT_WORKLOAD, WORKLOAD, Workload, as_objects
from exl2chat.ops.kernel_benchmark import KernelRow


@pytest.mark.parametrize(
    ("room", "contexts", "prompts"),
    [
        (WORKLOAD.room, WORKLOAD.contexts, WORKLOAD.prompts),
        (WORKLOAD.room - 1, WORKLOAD.contexts[:-1], WORKLOAD.prompts),
        (4096, (128,), (2048,)),
        (300, (128,), (300,)),
        (100, (), (100,)),
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


def test_several_tokens_at_once_are_compared_with_one_at_the_same_context() -> None:
    rows = [
        KernelRow("reply at context 128", 1, 2000.0, 1000.0, "a read"),
        KernelRow("5 tokens at once at context 128", 5, 2500.0, 1000.0, "a read"),
        KernelRow("5 tokens at once at context 4096", 5, 2500.0, 1000.0, "a read"),
        KernelRow("prompt of 2048", 2048, 50_000.0, 40_000.0, "torch.mm"),
    ]
    one, five, alone, prompt = as_objects(rows)
    assert (one["tokens_per_second"], five["tokens_per_second"], prompt["tokens_per_second"]) == (500, 2000, 40_960)
    assert (one["ratio"], five["times_one"]) == (0.5, 1.25)
    assert not [figures for figures in (one, alone, prompt) if "times_one" in figures]
