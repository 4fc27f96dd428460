"""How a product with packed weights is spread over a GPU: which warp multiplies which rows, which block which columns.

Pure arithmetic; the kernel that follows it is `exl2chat/kernels/gemv.cu`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from exl2chat.ops.tiles import Run

Table = npt.NDArray[Any]
MAX_MATRICES = 3
MAX_PIECES = 48
MAX_RUNS = 8

PIECE = np.dtype([
    ("weights", "u4"), ("scales", "u4"), ("tile", "u2"), ("quads", "u2"), ("stride", "u2"),
    ("bits", "u1"), ("span", "u1"), ("warp", "u1"), ("warps", "u1"), ("unused", "u2"),
])  # fmt: skip
MATRIX = np.dtype([
    ("weights", "u8"), ("scales", "u8"), ("bias", "u8"), ("strips", "i4"), ("columns", "i4"), ("offset", "i4"),
    ("tiles", "i4"), ("begin", "i4"), ("split", "i4"), ("runs", "i4"), ("unused", "i4"),
    ("pieces", PIECE, (MAX_PIECES,)),
])  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a plan needs to know of a device: multiprocessors, and the most shared memory of a block in bytes."""

    processors: int
    shared: int


@dataclass(frozen=True, slots=True)
class Shape:
    """A variant of the kernel: warps of a block, blocks on each multiprocessor, and chunks of 16 bytes that a lane has
    on their way."""

    warps: int
    blocks: int
    chunks: int


# Of 15 variants and 4 splits the fastest on an H200 with the matrices of an 8B model at 4.1 bits (us, one row):
# q/k/v 5.6, o 4.7, down 9.8 and a head of 6 bits 97 with SHORT, gate/up 17.0 with LONG. Rings in shared memory
# (cp.async), and blocks of half a multiprocessor beside which the next kernel could begin, were slower throughout.
LONG = Shape(16, 1, 4)
SHORT = Shape(8, 2, 4)
SHAPES = (LONG, SHORT)
ROWS = (1, 8, 16)


@dataclass(frozen=True, slots=True)
class Size:
    """A packed matrix as a plan sees it. scale_words: u32 of scales per quad and span (8 EXL2, 32 GPTQ)."""

    runs: tuple[Run, ...]
    strips: int
    tiles: int
    scale_words: int

    def quad_bytes(self, run: Run) -> int:
        return 512 * run.bits + 4 * self.scale_words * 4 // run.span

    @property
    def strip_bytes(self) -> int:
        return sum(run.quads * self.quad_bytes(run) for run in self.runs)


@dataclass(frozen=True, slots=True)
class Plan:
    """One launch for up to `rows` rows, K in 2^split parts: pieces[i] PIECE [parts, runs] of matrix i, spread over
    columns[i] blocks per part. part_tiles and strips: the most that one block has."""

    shape: Shape
    rows: int
    split: int
    pieces: tuple[Table, ...]
    columns: tuple[int, ...]
    part_tiles: int
    strips: int

    @property
    def blocks(self) -> int:
        return sum(self.columns) << self.split

    def shared(self, rows: int) -> int:
        """Bytes of dynamic shared memory for `rows` rows: x of the largest part, and the slots of the warps' sums."""
        runs = max(len(table[0]) for table in self.pieces)
        slots = self.shape.warps + runs * (self.strips - 1)
        return 64 * rows * (self.part_tiles + 3) + 128 * rows * slots


def share_out(counts: Sequence[int], costs: Sequence[int], slots: int, grain: int = 1) -> list[int]:
    """How many of `slots` each item gets so that the dearest slot is cheapest. Item i is counts[i] units of costs[i],
    which are divided no finer than `grain` units. At least one each: `slots` is at least len(counts)."""

    def needed(limit: int) -> list[int]:
        return [-(-count // (limit // cost)) for count, cost in zip(counts, costs, strict=True)]

    low, high = max(costs) * grain, max(count * cost for count, cost in zip(counts, costs, strict=True))
    while low < high:
        middle = (low + high) // 2
        if sum(needed(middle)) <= slots:
            high = middle
        else:
            low = middle + 1
    return needed(low)


def run_pieces(size: Size) -> Table:
    """PIECE [runs]: every run whole, without warps."""
    rows = []
    weights = scales = 0
    for run in size.runs:
        rows.append((weights, scales, run.tile, run.quads, run.quads, run.bits, run.span, 0, 0, 0))
        weights += size.strips * run.quads * run.bits * 32
        scales += size.strips * run.quads * size.scale_words * 4 // run.span
    return np.array(rows, PIECE)


def cut(size: Size, split: int, warps: int, strips: int) -> Table:
    """PIECE [2^split, pieces]: K cut into parts of about equal bytes, each part's warps shared out among its pieces,
    for blocks of up to `strips` strips. Pieces without warps fill the table up."""
    counts = [run.quads for run in size.runs]
    costs = np.repeat([size.quad_bytes(run) for run in size.runs], counts)
    tiles = np.concatenate([run.tile + 4 * np.arange(run.quads) for run in size.runs] + [[size.tiles]])
    edges = np.searchsorted(np.cumsum(costs) - costs / 2, np.linspace(0, costs.sum(), (1 << split) + 1))
    starts = np.cumsum([0, *counts])
    table = np.zeros((1 << split, len(size.runs)), PIECE)
    for part, begin, end in zip(table, edges[:-1], edges[1:], strict=True):
        part["tile"] = tiles[begin]
        pieces = []
        for run, start in zip(run_pieces(size), starts, strict=False):
            first, count = max(begin - start, 0), min(end - start, run["quads"]) - max(begin - start, 0)
            if count > 0:
                pieces.append(slice_run(run, first, count, size.scale_words))
        if not pieces:
            continue
        part[: len(pieces)] = pieces
        each = [512 * int(p["bits"]) + 16 * size.scale_words // int(p["span"]) for p in pieces]
        shares = share_out([int(p["quads"]) * strips for p in pieces], each, warps, strips)
        part["warps"][: len(pieces)] = shares
        part["warp"][: len(pieces)] = np.cumsum([0, *shares[:-1]])
    return table


def slice_run(run: np.void, first: int, count: int, scale_words: int) -> np.void:
    """`count` quads of a run from `first` on."""
    piece = run.copy()
    piece["weights"] += first * int(run["bits"]) * 32
    piece["scales"] += first * scale_words * 4 // int(run["span"])
    piece["tile"] += 4 * first
    piece["quads"] = count
    return piece


def make_plan(sizes: Sequence[Size], rows: int, gpu: Gpu) -> Plan | None:
    """The launch that multiplies up to `rows` rows by all of `sizes`; None where so many do not fit shared memory."""
    shape, split = choose(sizes, gpu)
    if lay_out(sizes, rows, gpu, shape, split).shared(rows) * shape.blocks > gpu.shared:
        shape = LONG
    while max(len(size.runs) for size in sizes) << split <= MAX_PIECES:
        plan = lay_out(sizes, rows, gpu, shape, split)
        if plan.shared(rows) <= gpu.shared:
            return plan
        split += 1
    return None


def choose(sizes: Sequence[Size], gpu: Gpu) -> tuple[Shape, int]:
    """The variant and the split for matrices side by side: few strips are split along K until all blocks have one."""
    strips = sum(size.strips for size in sizes)
    if strips >= 16 * gpu.processors:
        return SHORT, 0
    if strips >= 3 * gpu.processors:
        return LONG, 0
    return SHORT, 2 if strips < 2 * gpu.processors else 1


def lay_out(sizes: Sequence[Size], rows: int, gpu: Gpu, shape: Shape, split: int) -> Plan:
    """The launch with this variant and split."""
    blocks = max(len(sizes), gpu.processors * shape.blocks >> split)
    columns = share_out([size.strips for size in sizes], [size.strip_bytes for size in sizes], blocks)
    # No more strips to a block than what leaves two thirds of the shared memory to x.
    slots = gpu.shared // 3 // (128 * rows)
    most = 1 + max(0, (slots - shape.warps) // max(len(size.runs) for size in sizes))
    columns = [max(n, -(-size.strips // most)) for n, size in zip(columns, sizes, strict=True)]
    strips = [-(-size.strips // n) for n, size in zip(columns, sizes, strict=True)]
    pieces = tuple(cut(size, split, shape.warps, n) for n, size in zip(strips, sizes, strict=True))
    part_tiles = 0
    for size, table in zip(sizes, pieces, strict=True):
        edges = [*table["tile"][:, 0].tolist(), size.tiles]
        part_tiles = max(part_tiles, *(b - a for a, b in pairwise(edges)))
    return Plan(shape, rows, split, pieces, tuple(columns), part_tiles, max(strips))
