"""How fast a loaded model runs here, each figure beside a ceiling that was measured in the same run.

On a GPU: `step_benchmark`. On the CPU the ceiling is the bare matrices. The machine may be shared: they and whole steps
take turns, and medians are compared. A turn is a few steps, so that most find the processor's caches as in a reply.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from exl2chat.engine.cache import KVCache
from exl2chat.engine.speculation_benchmark import measure_drafts
from exl2chat.engine.step_benchmark import WORKLOAD, Workload, measure_steps
from exl2chat.engine.transformer import Transformer, prefill_chunk
from exl2chat.ops.kernel_benchmark import KernelRow, measure_read
from exl2chat.ops.packed import Weight
from exl2chat.progress import Progress

ROUNDS = 12
TURN = 4  # steps
CPU_WORKLOAD = Workload(contexts=(128, 1024), rows=(1,), prompts=(512,), reply=TURN, drafted=24)
PREFILL_ROUNDS = DRAFT_ROUNDS = 3
WARM_UP = 1


def workload(device: torch.device) -> Workload:
    """What is worth timing on `device`."""
    return WORKLOAD if device.type == "cuda" else CPU_WORKLOAD


def measure(model: Transformer, room: int, progress: Progress) -> tuple[float | None, list[KernelRow]]:
    """The bandwidth of a GPU's memory in bytes per second, None on the CPU; and replies and prompts, as far as they
    fit a context of `room` tokens."""
    work = workload(model.device).within(room)
    if model.device.type == "cuda":
        progress("measuring the memory")
        bandwidth = measure_read(model.device)
        return bandwidth, measure_steps(model, bandwidth, work, progress)
    prompts = [measure_prefill(model, length, progress) for length in work.prompts]
    rows = [*prompts, *(measure_decoding(model, context, progress) for context in work.contexts)]
    if work.drafted:
        progress("reply with drafts")
        cache = model.new_cache(work.contexts[0] + work.drafted)
        rows += measure_drafts(model, cache, work.contexts[0], work.drafted, DRAFT_ROUNDS)
    return None, rows


def measure_prefill(model: Transformer, length: int, progress: Progress) -> KernelRow:
    """A prompt of `length` tokens, read in chunks, in turns with the same matrices alone."""
    tokens = torch.randint(model.config.vocab_size, (length,), device=model.device)
    cache = model.new_cache(length)
    name = f"prompt of {length}"
    return _in_turns(
        name, length, PREFILL_ROUNDS, _matrices(model, length), partial(_fill, model, tokens, cache), 1, progress
    )


def measure_decoding(model: Transformer, context: int, progress: Progress) -> KernelRow:
    """Greedy decoding with `context` tokens in the cache, in turns with the same matrices alone."""
    cache = model.new_cache(context + TURN)
    _fill(model, torch.randint(model.config.vocab_size, (context,), device=model.device), cache)
    step = partial(_decode, model, cache, context)
    return _in_turns(f"reply at context {context}", 1, ROUNDS, _matrices(model, 1), step, TURN, progress)


def _in_turns(
    name: str,
    tokens: int,
    rounds: int,
    matrices: list[tuple[Weight, Tensor]],
    work: Callable[[], None],
    steps: int,
    progress: Progress,
) -> KernelRow:
    """Medians of `work`, which is `steps` steps of so many tokens, and of the matrices multiplied as often."""
    seconds, bare = [], []
    for index in range(WARM_UP + rounds):
        progress(name, index, WARM_UP + rounds, "rounds")
        bare.append(_seconds(partial(_multiply, matrices, steps)) / steps)
        seconds.append(_seconds(work) / steps)
    whole, alone = median(seconds[WARM_UP:]), median(bare[WARM_UP:])
    return KernelRow(name, tokens, whole * 1e6, alone * 1e6, "its matrices alone")


def _fill(model: Transformer, tokens: Tensor, cache: KVCache) -> None:
    cache.truncate(0)
    for chunk in torch.split(tokens, prefill_chunk(model.device)):
        model.forward(chunk, cache, last_only=True)


def _decode(model: Transformer, cache: KVCache, context: int) -> None:
    cache.truncate(context)
    token = 1
    for _ in range(TURN):
        token = int(model.forward(torch.tensor([token], device=model.device), cache).argmax())


@torch.inference_mode()
def _multiply(matrices: list[tuple[Weight, Tensor]], times: int) -> None:
    for _ in range(times):
        for weight, x in matrices:
            weight(x)


def _matrices(model: Transformer, rows: int) -> list[tuple[Weight, Tensor]]:
    """Every matrix that a step of `rows` tokens multiplies, in order, with an input of its size and dtype."""

    def random(size: int, count: int = rows) -> Tensor:
        return torch.randn(count, size, device=model.device, dtype=model.dtype)

    config = model.config
    hidden, inner = random(config.hidden_size), random(config.intermediate_size)
    heads = random(config.num_heads * config.head_dim)
    pairs = [
        pair
        for layer in model.weights.layers
        for pair in ((layer.qkv, hidden), (layer.o, heads), (layer.gate_up, hidden), (layer.down, inner))
    ]
    return [*pairs, (model.weights.head, random(config.hidden_size, 1))]


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
