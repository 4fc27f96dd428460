"""Products of dozens to hundreds of rows with packed weights: how `exl2chat/kernels/gemm.cu` is spread over a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from exl2chat.kernels import load
from exl2chat.ops.plan import MAX_PIECES, PIECE, Gpu, Size, Table, run_pieces, slice_run

# Rows of x that a block multiplies: of these the fewest that do.
HEIGHTS = (32, 64, 96, 128)
# Row tiles of a launch; beyond, float16 copies and cuBLAS multiply (tiled.SOME_ROWS).
MOST_ROW_TILES = 4
# Strips of 32 columns of a block, one per warp: as many as fit, so that x is fetched by few blocks.
WARPS = (8, 4)
PRODUCERS = 4  # warps that copy
LEAST_STAGES, MOST_STAGES = 2, 8
BARRIER_BYTES = 1024  # of shared memory that the kernel declares itself
# What a block costs beside its quads, in quads: the first fetch, and writing the sums.
BLOCK_COST = 2


@dataclass(frozen=True, slots=True)
class Split:
    """K in `parts`, and what the kernel takes by value: struct Matrices."""

    parts: int
    matrices: Table


@dataclass(frozen=True, slots=True)
class Gemm:
    """Up to three matrices that share x. splits: by row tiles, from one on; column_tiles of all; bits: the most."""

    splits: tuple[Split, ...]
    warps: int
    column_tiles: int
    bits: int
    scale_words: int
    gpu: Gpu

    @property
    def most_rows(self) -> int:
        return len(self.splits) * max(height for height in HEIGHTS if self.stages(height))

    def stages(self, height: int) -> int:
        """How many quads a block holds, 0 where too few fit its shared memory."""
        stages = min(MOST_STAGES, (self.gpu.shared - BARRIER_BYTES) // self.slot(height))
        return stages if stages >= LEAST_STAGES else 0

    def slot(self, height: int) -> int:
        """Bytes of a quad: x, and codes and scales of every warp."""
        return slot_bytes(height, self.warps, self.bits, self.scale_words)

    def __call__(self, arranged: Tensor, width: int) -> Tensor:
        """Float32 [P, rows, width], whose sum over P, in order, is x W + bias; x float16 [K / 32, rows, 4, 8] as
        `tiled.arrange` makes it with rows in the order of the tiles, of up to `most_rows`."""
        rows = arranged.shape[1]
        heights = [height for height in HEIGHTS if self.stages(height)]
        row_tiles = -(-rows // heights[-1])
        height = next(height for height in heights if height * row_tiles >= rows)
        split = self.splits[row_tiles - 1]
        kernel = load(
            "gemm.cu", "gemm", arranged.device, ROWS=height, WARPS=self.warps, GPTQ=int(self.scale_words == 32)
        )
        parts = torch.empty(split.parts, rows, width, device=arranged.device)
        stages, slot = self.stages(height), self.slot(height)
        kernel.launch(
            (row_tiles, self.column_tiles * split.parts), (self.warps + PRODUCERS) * 32, stages * slot,
            split.matrices, arranged, parts, rows, width, split.parts, stages, slot,
        )  # fmt: skip
        return parts


def slot_bytes(height: int, warps: int, bits: int, scale_words: int) -> int:
    return 256 * height + warps * (512 * bits + 16 * scale_words)


def make_gemm(sizes: Sequence[Size], records: Table, gpu: Gpu) -> Gemm | None:
    """The launches for matrices side by side, of which `records` are the structs Matrix [3] but for their pieces and
    blocks. None where the shared memory of `gpu` does not even hold the least rows."""
    bits = max(run.bits for size in sizes for run in size.runs)
    words = sizes[0].scale_words
    room = (gpu.shared - BARRIER_BYTES) // LEAST_STAGES
    fitting = [warps for warps in WARPS if slot_bytes(HEIGHTS[0], warps, bits, words) <= room]
    if not fitting:
        return None
    warps = fitting[0]
    tiles = [-(-size.strips // warps) for size in sizes]
    quads = max(sum(run.quads for run in size.runs) for size in sizes)
    most = MAX_PIECES // max(len(size.runs) for size in sizes)
    splits = []
    for row_tiles in range(1, MOST_ROW_TILES + 1):
        parts = choose_parts(row_tiles * sum(tiles), quads, min(most, quads), gpu.processors)
        splits.append(Split(parts, _fill(records, sizes, tiles, parts)))
    return Gemm(tuple(splits), warps, sum(tiles), bits, words, gpu)


def choose_parts(tiles: int, quads: int, most: int, processors: int) -> int:
    """Into how many parts K is cut so that the last of the blocks, one to a multiprocessor, ends soonest."""

    def cost(parts: int) -> int:
        waves = -(-tiles * parts // processors)
        return waves * (-(-quads // parts) + BLOCK_COST)

    return min(range(1, most + 1), key=cost)


def cut(size: Size, parts: int) -> Table:
    """PIECE [parts, runs]: K cut into parts of equally many quads; pieces without quads fill the table up."""
    total = sum(run.quads for run in size.runs)
    table = np.zeros((parts, len(size.runs)), PIECE)
    starts = np.cumsum([0, *(run.quads for run in size.runs)]).tolist()
    for part, (begin, end) in zip(table, pairwise(total * p // parts for p in range(parts + 1)), strict=True):
        pieces = []
        for run, start, after in zip(run_pieces(size), starts[:-1], starts[1:], strict=True):
            first, last = max(begin, start), min(end, after)
            if first < last:
                pieces.append(slice_run(run, first - start, last - first, size.scale_words))
        part[: len(pieces)] = pieces
    return table


def _fill(records: Table, sizes: Sequence[Size], tiles: Sequence[int], parts: int) -> Table:
    """The records with their pieces, and with the column tiles of each beginning behind those of the one before."""
    filled = records.copy()
    begin = 0
    for row, size, count in zip(filled, sizes, tiles, strict=False):
        pieces = cut(size, parts)
        row["begin"], row["runs"], row["pieces"][: pieces.size] = begin, pieces.shape[1], pieces.ravel()
        begin += count
    return filled
