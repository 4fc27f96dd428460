"""Caches for the tests of attention, and its kernels compiled up front."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import torch

from exl2chat.kernels import compile_for
from exl2chat.ops import Heads
from exl2chat.ops.attention import PLAIN_BITS
from exl2chat.ops.cache_format import TOKENS, CacheFormat, rotate
from exl2chat.ops.cuda import CudaOps
from exl2chat.ops.packed import Plain

CUDA = torch.device("cuda")
PAGE = 256
POISON = 255  # every byte of memory that nobody wrote: NaN as float16 and as a scale
NEXT = Plain(torch.empty(0), None)  # a matrix that takes rows as they are
BITS = (16, 8, 6, 4)
QUANTIZED = BITS[1:]
Shape = tuple[int, int, int]  # H, G, D


@dataclass
class Memory:
    """A Store of one layer."""

    storage: torch.Tensor
    bits: int
    cos: torch.Tensor
    sin: torch.Tensor
    position: torch.Tensor
    length: int
    pages: torch.Tensor | None = None
    last: torch.Tensor | None = None

    def rows(self, size: int, start: int, end: int) -> torch.Tensor:
        """Keys and values [2, G, end - start, D] of tokens as they are kept."""
        if self.bits == PLAIN_BITS:
            return self.storage.flatten(3, 4)[0, :, :, start:end].float()
        shape = CacheFormat(self.bits, size)
        rows = shape.dequantize(shape.read(self.tiles(shape), start, end))
        return rows.view(2, -1, end - start, size).float()

    def tiles(self, shape: CacheFormat) -> torch.Tensor:
        """[2 * G, S / 16, bytes] of a quantised cache."""
        return self.storage.view(2 * self.storage.shape[2], -1, TOKENS * shape.row_bytes)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=CUDA)


def memory(shape: Shape, length: int, room: int, bits: int = PLAIN_BITS, rotary: int | None = None) -> Memory:
    """`length` random tokens of values up to 3; what lies behind them is poison."""
    _, groups, size = shape
    angles = torch.rand(room, (rotary or size) // 2, device=CUDA) * 6
    cos, sin = angles.cos(), angles.sin()
    tables = torch.stack((cos, cos), 1).unsqueeze(1), torch.stack((-sin, sin), 1).unsqueeze(1)
    position = torch.tensor([length], dtype=torch.int32, device=CUDA)
    rows = random(2 * groups, length, size).clamp(-3, 3)
    width = 2 * size if bits == PLAIN_BITS else CacheFormat(bits, size).row_bytes
    storage = torch.full((1, 2, groups, room // PAGE, PAGE, width), POISON, dtype=torch.uint8, device=CUDA)
    found = Memory(storage, bits, *tables, position, length)
    if bits == PLAIN_BITS:
        found.storage = storage.view(torch.float16)
        found.storage.view(2 * groups, room, size)[:, :length] = rows
    elif length:
        form = CacheFormat(bits, size)
        form.write(found.tiles(form), 0, form.quantize(rotate(rows)))
    return found


def make_room(length: int) -> int:
    return -(-length // PAGE) * PAGE


def ready(counts: Iterable[tuple[Iterable[Shape], Iterable[int], Iterable[int], int]]) -> CudaOps:
    """Ops whose attention is compiled, all variants at once, for these shapes, tokens, bits and number of sequences.
    One after another they take minutes."""
    ops = CudaOps(CUDA)

    def rehearse() -> None:
        for shapes, tokens, widths, sequences in counts:
            for shape, count, bits in product(shapes, tokens, widths):
                store = memory(shape, 0, PAGE, bits)
                if sequences > 1:
                    store.position = store.position.expand(sequences)
                    store.pages = torch.zeros(sequences, 64, dtype=torch.int32, device=CUDA)
                attend(ops, store, count, Heads(*shape, 1, None))

    compile_for(rehearse, lambda *_: None)
    return ops


def attend(
    ops: CudaOps, store: Memory, count: int, heads: Heads, qkv: torch.Tensor | None = None, window: int | None = None
) -> torch.Tensor:
    """The attention of `count` tokens of each sequence."""
    if qkv is None:
        width = (heads.queries + 2 * heads.groups) * heads.size
        qkv = torch.zeros(len(store.position) * count, width, dtype=torch.float16, device=CUDA)
    (layer,) = ops.attends(store, count, heads, [window])
    return layer(qkv, None, NEXT)
