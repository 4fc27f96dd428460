"""Microseconds that one attention takes on this GPU: `python benchmarks/attention.py [BITS ...]`, 16, 8, 6 and 4 bits.

32 / 8 heads of 128, in CUDA graphs of LAYERS layers, each over its own memory: on end, where a layer's tokens are on
their way while the layer before ends, and between the products that stand around it in a model, less those alone. Then
of batches of paged sequences.
"""

import sys
from collections.abc import Sequence

import torch

from exl2chat.ops import Heads, select
from exl2chat.ops.attention import PLAIN_BITS, Attend
from exl2chat.ops.cache_format import CacheFormat
from exl2chat.ops.kernel_benchmark import BODY, BODY_BITS, random_weight, time_graph
from exl2chat.ops.packed import Plain
from exl2chat.ops.tiled import arrange

CUDA = torch.device("cuda")
HEADS = Heads(32, 8, 128, 0.09, None)
WIDTH = (HEADS.queries + 2 * HEADS.groups) * HEADS.size
LAYERS, PAGE = 32, 256
ROWS, CONTEXTS = (1, 5), (128, 1024, 4096, 32768)
BATCHES = ((8, 500), (8, 4000), (32, 500), (32, 4000), (64, 500))
NEXT = Plain(torch.empty(0), None)


class Memory:
    """A Store of `sequences` of `context` tokens; more than one have their pages in no order."""

    def __init__(self, bits: int, context: int, sequences: int = 1, layers: int = LAYERS) -> None:
        pages = context // PAGE + 1
        width = 2 * HEADS.size if bits == PLAIN_BITS else CacheFormat(bits, HEADS.size).row_bytes
        shape = (layers, 2, HEADS.groups, sequences * pages, PAGE, width)
        self.storage = torch.randint(0, 60, shape, dtype=torch.uint8, device=CUDA)
        if bits == PLAIN_BITS:
            self.storage = self.storage.view(torch.float16)
        self.bits, self.length = bits, context
        self.cos = self.sin = torch.rand(pages * PAGE, 1, 2, HEADS.size // 2, device=CUDA)
        self.position = torch.full((sequences,), context, dtype=torch.int32, device=CUDA)
        order = torch.randperm(sequences * pages, device=CUDA, dtype=torch.int32).view(sequences, pages)
        self.pages: torch.Tensor | None = order if sequences > 1 else None


def layers_of(store: Memory, rows: int) -> list[Attend]:
    ops = select(CUDA, torch.float16, HEADS.size, 4096, 14336)
    return list(ops.attends(store, rows, HEADS, [None] * len(store.storage)))


def on_end(store: Memory, rows: int) -> float:
    layers, qkv = layers_of(store, rows), torch.randn(4, len(store.position) * rows, WIDTH, device=CUDA)
    torch.cuda.synchronize()
    return time_graph(lambda: [layer(qkv, None, NEXT) for layer in layers]) * 1e6 / len(layers)


class Products:
    """What stands before and after the attention of each layer, for `rows` tokens."""

    def __init__(self, rows: int) -> None:
        self._before, self._after = (
            [random_weight(*BODY[name], BODY_BITS, CUDA) for _ in range(LAYERS)] for name in ("qkv", "o")
        )
        self._inputs = [arrange(torch.randn(rows, 4096, device=CUDA), w[0].order) for w in (self._before, self._after)]
        torch.cuda.synchronize()
        self._alone = time_graph(lambda: self._step([None] * LAYERS))
        self._rows = rows

    def around(self, store: Memory) -> float:
        """Microseconds of a layer's attention between them."""
        layers = layers_of(store, self._rows)
        torch.cuda.synchronize()
        return (time_graph(lambda: self._step(layers)) - self._alone) * 1e6 / LAYERS

    def _step(self, layers: Sequence[Attend | None]) -> None:
        for before, layer, after in zip(self._before, layers, self._after, strict=True):
            qkv = before.partial_sums(self._inputs[0])
            if layer is not None:
                layer(qkv, None, NEXT)
            after.partial_sums(self._inputs[1])


def table(name: str, times: list[float]) -> None:
    print(f"{name:32}", *(f"{time:7.2f}" for time in times), flush=True)


def main(all_bits: list[int]) -> None:
    products = {rows: Products(rows) for rows in ROWS}
    table("us by context", [float(context) for context in CONTEXTS])
    for bits in all_bits:
        stores = [Memory(bits, context) for context in CONTEXTS]
        for rows in ROWS:
            table(f"{bits} bits, {rows} rows, on end", [on_end(store, rows) for store in stores])
            table(f"{bits} bits, {rows} rows, between", [products[rows].around(store) for store in stores])
        for sequences, context in BATCHES:
            store = Memory(bits, context, sequences, layers=8)
            table(f"{bits} bits, {sequences} sequences of {context}", [on_end(store, 1)])


if __name__ == "__main__":
    main([int(bits) for bits in sys.argv[1:]] or [16, 8, 6, 4])
