"""How fast a loaded model runs here, and how much of that its matrices alone would take.

The machine may be shared: the bare matrices and whole decoding steps take turns, and medians are compared. A turn is a
few steps, so that most find the processor's caches as in a reply.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from exl2chat.engine.cache import KVCache
from exl2chat.engine.transformer import Transformer, prefill_chunk
from exl2chat.ops.packed import Weight
from exl2chat.progress import Progress

ROUNDS = 12
TURN = 4  # steps
PREFILL_ROUNDS = 3
WARM_UP = 1


@dataclass(frozen=True, slots=True)
class Decoding:
    """One sequence of `context` tokens, one more at a time. Tokens per second: whole steps, and the matrices alone."""

    context: int
    tokens_per_second: float
    matrices_per_second: float

    @property
    def ratio(self) -> float:
        """The share of a step that multiplies matrices."""
        return self.tokens_per_second / self.matrices_per_second


def measure_prefill(model: Transformer, length: int, progress: Progress) -> float:
    """Tokens per second at which a prompt of `length` tokens is read, in chunks."""
    tokens = torch.randint(model.config.vocab_size, (length,), device=model.device)
    cache = model.new_cache(length)
    seconds = []
    for index in range(PREFILL_ROUNDS + 1):
        progress("reading a prompt", index, PREFILL_ROUNDS + 1, "rounds")
        seconds.append(_seconds(lambda: _fill(model, tokens, cache), model.device))
    return length / median(seconds[1:])


def measure_decoding(model: Transformer, context: int, progress: Progress) -> Decoding:
    """Greedy decoding with `context` tokens in the cache, in turns with the same matrices alone."""
    cache = model.new_cache(context + TURN)
    _fill(model, torch.randint(model.config.vocab_size, (context,), device=model.device), cache)
    matrices = _matrices(model)
    steps, bare = [], []
    for index in range(WARM_UP + ROUNDS):
        progress(f"decoding at {context}", index, WARM_UP + ROUNDS, "rounds")
        bare.append(_seconds(lambda: _multiply(matrices), model.device))
        steps.append(_seconds(lambda: _decode(model, cache, context), model.device))
    return Decoding(context, TURN / median(steps[WARM_UP:]), TURN / median(bare[WARM_UP:]))


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
def _multiply(matrices: list[tuple[Weight, Tensor]]) -> None:
    for _ in range(TURN):
        for weight, x in matrices:
            weight(x)


def _matrices(model: Transformer) -> list[tuple[Weight, Tensor]]:
    """Every matrix a step reads, in order, with an input of its size and dtype."""

    def row(size: int) -> Tensor:
        return torch.randn(1, size, device=model.device, dtype=model.dtype)

    config = model.config
    hidden, inner = row(config.hidden_size), row(config.intermediate_size)
    heads = row(config.num_heads * config.head_dim)
    pairs = [
        pair
        for layer in model.weights.layers
        for pair in ((layer.qkv, hidden), (layer.o, heads), (layer.gate_up, hidden), (layer.down, inner))
    ]
    return [*pairs, (model.weights.head, hidden)]


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
