"""What a load takes of the GPU's memory, what happens where there is no more of it, and when kernels are compiled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from exl2chat import kernels
from exl2chat.engine import placement, shapes
from exl2chat.engine.transformer import prefill_chunk
from exl2chat.link import protocol as wire
from exl2chat.link.service import Service
from exl2chat.paths import Paths
from exl2chat.progress import silent
from exl2chat.settings import Sampling

MODEL = str(Path(__file__).parents[1] / "data" / "golden" / "llama-6.0bpw-exl2")
CUDA = torch.device("cuda")


def ask(id: str, words: int) -> wire.Generate:
    turns = (wire.Turn("user", "hello " * words),)
    return wire.Generate(id, turns, Sampling(temperature=0), 8)


@contextmanager
def full_gpu() -> Iterator[None]:
    """Every block of the GPU's memory taken, down to a megabyte."""
    torch.cuda.empty_cache()
    taken, size = [], torch.cuda.mem_get_info()[0]
    while size > 1 << 20:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device=CUDA))
        except torch.OutOfMemoryError:
            size //= 2
    yield
    taken.clear()
    torch.cuda.empty_cache()


def serve(tmp_path: Path, act: Callable[[wire.Event], None], *requests: wire.Request) -> list[wire.Event]:
    """Everything a service says until it has answered `requests`, each event shown to `act` first."""
    events: list[wire.Event] = []

    def emit(event: wire.Event) -> None:
        act(event)
        events.append(event)
        if sum(isinstance(event, wire.Ready | wire.Failed | wire.Finished) for event in events) == len(requests):
            service.submit(wire.Shutdown())

    service = Service(Paths.default(tmp_path), emit)
    for request in requests:
        service.submit(request)
    service.run()
    return events


def test_a_reply_without_memory_is_one_message_and_the_next_one_works(tmp_path: Path) -> None:
    hog = full_gpu()

    def act(event: wire.Event) -> None:
        if isinstance(event, wire.Ready):
            hog.__enter__()
        if isinstance(event, wire.Failed):
            hog.__exit__(None, None, None)

    events = serve(tmp_path, act, wire.Load(MODEL, "cuda"), ask("a", 600), ask("b", 600))
    failed = next(event for event in events if isinstance(event, wire.Failed))
    assert (failed.id, failed.message) == ("a", "out of memory")
    assert "--ctx" in failed.remedy
    assert next(event for event in events if isinstance(event, wire.Finished)).id == "b"


def test_a_load_without_memory_says_the_sum(tmp_path: Path) -> None:
    with full_gpu():
        events = serve(tmp_path, lambda _event: None, wire.Load(MODEL, "cuda"))
    failed = next(event for event in events if isinstance(event, wire.Failed))
    assert "do not fit" in failed.message
    assert failed.remedy


def test_no_kernel_is_compiled_after_a_load(tmp_path: Path) -> None:
    before: list[int] = []

    def act(event: wire.Event) -> None:
        if isinstance(event, wire.Ready):
            before.append(kernels._module.cache_info().misses)

    prompts = [ask(f"{words}", words) for words in (1, 12, 30, 60, 200, 600)]
    events = serve(tmp_path, act, wire.Load(MODEL, "cuda"), *prompts)
    assert sum(isinstance(event, wire.Finished) for event in events) == len(prompts)
    assert kernels._module.cache_info().misses == before[0]
    assert any(isinstance(event, wire.Loading) and event.stage == "compiling kernels" for event in events)


def test_the_workspace_covers_the_largest_step() -> None:
    """Beside weights and cache, whatever the model."""
    model = shapes.random_model(shapes.SHAPES["llama-1b"], CUDA, torch.float16, silent)
    torch.cuda.empty_cache()
    cache = model.new_cache(8192)
    free = torch.cuda.mem_get_info()[0]
    model.warm_up(cache, silent)
    for start in range(0, 8192, prefill_chunk(CUDA)):
        model.forward(torch.zeros(prefill_chunk(CUDA), dtype=torch.int64, device=CUDA), cache, last_only=True)
        assert cache.length == start + prefill_chunk(CUDA)
    cache.truncate(100)
    model.forward(torch.zeros(1, dtype=torch.int64, device=CUDA), cache)
    taken = free - torch.cuda.mem_get_info()[0]
    assert taken <= placement.workspace_bytes(model.config, CUDA)
