"""How a product with packed weights is spread over a GPU: which warp multiplies which rows, which block which columns.

Pure arithmetic; the kernel that follows it is `exl2chat/kernels/gemv.cu`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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


# One block on a multiprocessor, its warps with a quad of 4 bits ahead: on an H200 the fastest for every matrix of an 8B
# model at 4.1 bits, of blocks of 4 to 16 warps, 1 to 4 of them on a multiprocessor, and 1 to 6 quads (NOTES.md).
WARPS = 16
CHUNKS = 4  # of 16 bytes that a lane has on their way
ROWS = (1, 8, 16)
ALIKE = 8  # up to so many rows are multiplied in the same order: a row's result is then the same in any company


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
        """Bytes of dynamic shared memory for `rows` rows: x of the largest part and its sums over tiles, the slots of
        the warps' sums, and which warps have what."""
        runs = max(len(table[0]) for table in self.pieces)
        slots = WARPS + runs * (self.strips - 1)
        pitch = 1 if self.rows == 1 else self.rows
        return (self.part_tiles + 3) * (64 * rows + 4 * pitch) + 128 * rows * slots + 4 * runs * self.strips


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


def cut(size: Size, split: int, strips: int) -> Table:
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
        # With n strips at most and n - 1 at least, half the quads of n strips are no more than a block has.
        shares = share_out([int(p["quads"]) * strips for p in pieces], each, WARPS, min(strips, 2))
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
    """The launch that multiplies up to `rows` rows by all of `sizes`; None where so many do not fit shared memory.

    Plans for up to ALIKE rows differ in nothing but `rows`.
    """
    split = choose_split(sizes, gpu)
    while max(len(size.runs) for size in sizes) << split <= MAX_PIECES:
        for waves in (1, 2, 4, 8, 16, 32, 64):
            plan = lay_out(sizes, max(rows, ALIKE), gpu.processors * waves, split)
            if plan.shared(plan.rows) <= gpu.shared:
                return replace(plan, rows=rows)
        split += 1
    return None


def choose_split(sizes: Sequence[Size], gpu: Gpu) -> int:
    """Into how many parts to cut K: few strips are split until all multiprocessors have some."""
    strips = sum(size.strips for size in sizes)
    return 2 if strips <= gpu.processors else 1 if strips <= 2 * gpu.processors else 0


def lay_out(sizes: Sequence[Size], rows: int, blocks: int, split: int) -> Plan:
    """The launch for up to `rows` rows with K in 2^split parts and about `blocks` blocks."""
    columns = share_out(
        [size.strips for size in sizes], [size.strip_bytes for size in sizes], max(len(sizes), blocks >> split)
    )
    strips = [-(-size.strips // n) for n, size in zip(columns, sizes, strict=True)]
    pieces = tuple(cut(size, split, n) for n, size in zip(strips, sizes, strict=True))
    part_tiles = 0
    for size, table in zip(sizes, pieces, strict=True):
        edges = [*table["tile"][:, 0].tolist(), size.tiles]
        part_tiles = max(part_tiles, *(b - a for a, b in pairwise(edges)))
    return Plan(rows, split, pieces, tuple(columns), part_tiles, max(strips))
