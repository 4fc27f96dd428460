"""What a token of a streamed reply without drafts takes on a GPU, beside the graph of its step alone."""

import time
from functools import partial
from statistics import median

import torch

from exl2chat.engine.cache import KVCache
from exl2chat.engine.generators.streaming import StreamingGenerator
from exl2chat.engine.transformer import Transformer
from exl2chat.model.detokenizer import Detokenizer, Piece
from exl2chat.ops.kernel_benchmark import KernelRow, time_graph
from exl2chat.settings import Sampling

SAMPLING = Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=1)
TURNS, STEPS = 7, 20
REPLY = (1 + TURNS) * STEPS + 1  # tokens beyond the context that a cache must have room for


def measure_reply(model: Transformer, cache: KVCache, context: int, ceiling: float) -> list[KernelRow]:
    """The median time of a token after a prompt of `context`: against the `ceiling` in seconds, a read of the weights
    and the cache, and against its graph alone, which neither draws a token nor waits for the host."""
    seconds = _token_seconds(model, cache, context)
    bare = _graph_seconds(model, cache, context + REPLY // 2)
    name = f"reply at context {context}"
    return [
        KernelRow(name, 1, seconds * 1e6, ceiling * 1e6, "a read of the weights and the cache"),
        KernelRow(f"{name}, beside its graph", 1, seconds * 1e6, bare * 1e6, "the graph of its steps alone"),
    ]


class OneLetter:
    """A tokenizer as far as a generator needs one: every token is a letter."""

    eos_ids = frozenset[int]()

    def token_of(self, _token: int) -> str:
        return "a"

    def detokenizer(self, _special: bool, continuing: bool) -> Detokenizer:
        return Detokenizer(lambda _: Piece(b"a", b"a"), continuing)


def _token_seconds(model: Transformer, cache: KVCache, context: int) -> float:
    """Seconds per token, the median over turns of STEPS tokens."""
    generator = StreamingGenerator(model, cache, OneLetter(), speculate="off")  # type: ignore[arg-type]
    generator.begin_stream_ex([1] * context, SAMPLING)
    seconds = []
    for _ in range(1 + TURNS):
        started = time.perf_counter()
        for _ in range(STEPS):
            generator.stream_ex()
        seconds.append((time.perf_counter() - started) / STEPS)
    torch.cuda.synchronize()
    return median(seconds[1:])


@torch.inference_mode()
def _graph_seconds(model: Transformer, cache: KVCache, position: int) -> float:
    """Seconds of the graph of a step of the token at `position`."""
    cache.position.fill_(position)
    token = torch.ones(1, dtype=torch.int64, device=model.device)
    return time_graph(partial(model.step, token, cache, False))
