"""Linear weights of EXL2 or GPTQ codes on a CUDA device, multiplied as they are packed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from exl2chat.kernels import Kernel, load
from exl2chat.ops.gemm import Gemm, make_gemm
from exl2chat.ops.packed import Weight
from exl2chat.ops.plan import (
    CHUNKS,
    MATRIX,
    MAX_MATRICES,
    ROWS,
    WARPS,
    Gpu,
    Plan,
    Size,
    Table,
    make_plan,
    run_pieces,
)
from exl2chat.ops.tiles import STRIP, TILE, Run, fragment_order

# Decoding on the way to the tensor cores takes less time than float16 copies and cuBLAS up to some 1200 rows: all
# matrices of an 8B model 12.7 ms against 17.2 at 512 rows, 23.6 against 26.2 at 1024, 49.3 against 44.1 at 2048 (H200).
# The kernels between them, which then take partial sums, would lose what is won beyond 512.
SOME_ROWS = 512
# Where a GPU cannot do that (sm_75), passes of up to 16 rows take less time than float16 copies up to here.
FEW_ROWS = 80
SCRATCH_BYTES = 128 << 20
THREADS = 128


@dataclass(frozen=True, slots=True)
class Tiled:
    """A packed matrix [K, columns] as kernels/tiles.cuh draws it: weights and scales int32, flat.

    order int32 [K] is the column of x that each packed row multiplies; bias float32 [columns].
    """

    weights: Tensor
    scales: Tensor
    runs: tuple[Run, ...]
    order: Tensor
    strips: int
    columns: int
    is_gptq: bool
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes + self.scales.nbytes

    @property
    def size(self) -> Size:
        return Size(self.runs, self.strips, len(self.order) // TILE, 32 if self.is_gptq else 8)

    def record(self) -> Table:
        """The struct Matrix of the kernels [1], but for its pieces and blocks."""
        row = np.zeros(1, MATRIX)
        row["weights"], row["scales"] = self.weights.data_ptr(), self.scales.data_ptr()
        row["bias"] = 0 if self.bias is None else self.bias.data_ptr()
        row["strips"], row["columns"], row["tiles"] = self.strips, self.columns, len(self.order) // TILE
        return row


@dataclass(frozen=True, slots=True)
class Launch:
    """A plan and what its kernel takes by value."""

    plan: Plan
    kernel: Kernel
    matrices: Table


@dataclass(frozen=True, slots=True)
class TiledWeight:
    """Up to three matrices side by side that take x in one order: x [T, K] to y [T, width].

    y is float32, or float16 beyond `some_rows` rows. Or arranged activations (see `arrange`) to y as partial sums
    [P, T, width]. launches: by the most rows that each is for; gemm: for more rows than these. order: of x in the form
    that gemv.cu takes, and `tile_order` in that of gemm.cu, int32 [K / 8, 8]; places and tile_places are where each
    column of x goes there, int32 [K].
    """

    matrices: tuple[Tiled, ...]
    order: Tensor
    launches: Mapping[int, Launch]
    width: int
    gemm: Gemm | None = None
    places: Tensor = field(init=False)
    tile_order: Tensor = field(init=False)
    tile_places: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", torch.argsort(self.order.flatten().long()).int())
        object.__setattr__(self, "tile_order", self.matrices[0].order.int().view(-1, 8))
        object.__setattr__(self, "tile_places", torch.argsort(self.matrices[0].order).int())

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.matrices)

    @property
    def most_rows(self) -> int:
        """Of one pass over the weights with gemv.cu."""
        return max(self.launches)

    @property
    def some_rows(self) -> int:
        """Up to which the weights are multiplied as they are packed."""
        return self.most_rows if self.gemm is None else min(SOME_ROWS, self.gemm.most_rows)

    def places_for(self, rows: int) -> Tensor | None:
        """Where each column of x goes in arranged activations of so many rows, int32 [K]; None: x is taken as it is."""
        if rows <= self.most_rows:
            return self.places
        return self.tile_places if rows <= self.some_rows else None

    def __call__(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            return self.partial_sums(x)
        rows = x.shape[0]
        if rows <= self.some_rows:
            return add_up(self.partial_sums(self.arranged(x)))
        if self.gemm is None and rows <= FEW_ROWS:
            return torch.cat([self(some) for some in torch.split(x, self.most_rows)])
        return self.by_reconstruction(x)

    def arranged(self, x: Tensor) -> Tensor:
        """x [rows, K] as `partial_sums` takes it, of up to `some_rows` rows; with more of them x."""
        rows = x.shape[0]
        if rows > self.some_rows:
            return x
        return arrange(x, self.order if rows <= self.most_rows else self.tile_order)

    def partial_sums(self, arranged: Tensor) -> Tensor:
        """Float32 [P, rows, width], whose sum over P, in order, is x W + bias, of up to `some_rows` rows."""
        rows = arranged.shape[1]
        if rows > self.most_rows and self.gemm is not None:
            return self.gemm(arranged, self.width)
        launch = self.launches[min(most for most in self.launches if most >= rows)]
        plan = launch.plan
        parts = torch.empty(1 << plan.split, rows, self.width, device=arranged.device)
        launch.kernel.launch(
            (plan.blocks, 1), WARPS * 32, plan.shared(rows),
            launch.matrices, arranged, parts, rows, self.width,
        )  # fmt: skip
        return parts

    def by_reconstruction(self, x: Tensor) -> Tensor:
        """y float16 through cuBLAS, from float16 copies of up to SCRATCH_BYTES."""
        x = x.half()
        y = torch.empty(x.shape[0], self.width, dtype=torch.float16, device=x.device)
        column = 0
        for matrix in self.matrices:
            step = max(1, SCRATCH_BYTES // (len(matrix.order) * STRIP * 2)) * STRIP
            for first in range(0, matrix.columns, step):
                end = min(first + step, matrix.columns)
                torch.mm(x, reconstruct(matrix, first, end), out=y[:, column + first : column + end])
            if matrix.bias is not None:
                y[:, column : column + matrix.columns] += matrix.bias
            column += matrix.columns
        return y


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Weights of one input, each with its own order of x."""

    weights: tuple[Weight, ...]

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([weight(x) for weight in self.weights], -1)


def join(matrices: Sequence[Tiled]) -> Weight:
    """Matrices of one input as one weight: in one launch where they take x in one order and are of one format."""
    first = matrices[0]
    alike = all(m.is_gptq == first.is_gptq and torch.equal(m.order, first.order) for m in matrices)
    if len(matrices) > 1 and not (alike and len(matrices) <= MAX_MATRICES):
        return SideBySide(tuple(join((matrix,)) for matrix in matrices))
    properties = torch.cuda.get_device_properties(first.weights.device)
    gpu = Gpu(properties.multi_processor_count, properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]
    plans = [plan for rows in ROWS if (plan := make_plan([m.size for m in matrices], rows, gpu))]
    launches = {plan.rows: prepare(plan, matrices) for plan in plans}
    gemm = make_gemm([m.size for m in matrices], _records(matrices), gpu) if properties.major >= 8 else None
    return TiledWeight(tuple(matrices), fragment_order(first.order), launches, sum(m.columns for m in matrices), gemm)


def _records(matrices: Sequence[Tiled]) -> Table:
    """The structs Matrix [3] with their place in the result, without pieces and blocks."""
    records = np.zeros(MAX_MATRICES, MATRIX)
    offset = 0
    for i, matrix in enumerate(matrices):
        records[i] = matrix.record()[0]
        records[i]["offset"] = offset
        offset += matrix.columns
    return records


def add_up(parts: Tensor) -> Tensor:
    """The sum of float32 [P, ...] over P, in order."""
    if len(parts) == 1:
        return parts[0]
    y = torch.empty_like(parts[0])
    kernel = load("arrange.cu", "add_parts", y.device)
    kernel.launch((-(-y.numel() // THREADS), 1), THREADS, 0, parts, y, y.numel(), len(parts))
    return y


def arrange(x: Tensor, order: Tensor) -> Tensor:
    """x [rows, K] in the form that gemv.cu takes: float16 [K / 32, rows, 4, 8]; `order` of `fragment_order`."""
    rows, k = x.shape
    x = x.contiguous() if x.dtype in (torch.float16, torch.float32) else x.float()
    arranged = torch.empty(k // TILE, rows, 4, 8, dtype=torch.float16, device=x.device)
    kernel = load("arrange.cu", "arrange_half" if x.dtype == torch.float16 else "arrange_float", x.device)
    kernel.launch((-(-arranged.numel() // 8 // THREADS), 1), THREADS, 0, x, order, arranged, len(order), rows, k)
    return arranged


def reconstruct(matrix: Tiled, first: int, end: int) -> Tensor:
    """Columns [first, end) of W as float16 [K, end - first], rows in the order of x; `first` a multiple of 32."""
    k, strips = len(matrix.order), -(-(end - first) // STRIP)
    weight = torch.empty(k, strips * STRIP, dtype=torch.float16, device=matrix.weights.device)
    record = matrix.record()
    record["runs"], record["pieces"][0, : len(matrix.runs)] = len(matrix.runs), run_pieces(matrix.size)
    quads = sum(run.quads for run in matrix.runs)
    kernel = load("reconstruct.cu", "reconstruct", weight.device, GPTQ=int(matrix.is_gptq))
    kernel.launch(
        (strips, -(-quads // 4)), THREADS, 0,
        record, matrix.order.int(), weight, first // STRIP, strips * STRIP,
    )  # fmt: skip
    return weight[:, : end - first]


def prepare(plan: Plan, matrices: Sequence[Tiled]) -> Launch:
    """The kernel of a plan, compiled, and its argument."""
    records = np.zeros(MAX_MATRICES, MATRIX)
    begin = offset = 0
    for i, matrix in enumerate(matrices):
        row = matrix.record()
        row["offset"], row["begin"], row["split"] = offset, begin, plan.split
        pieces = plan.pieces[i]
        row["runs"], row["pieces"][0, : pieces.size] = pieces.shape[1], pieces.ravel()
        records[i] = row[0]
        begin += plan.columns[i] << plan.split
        offset += matrix.columns
    kernel = load(
        "gemv.cu", "gemv", matrices[0].weights.device,
        WARPS=WARPS, CHUNKS=CHUNKS, ROWS=plan.rows, GPTQ=int(matrices[0].is_gptq),
    )  # fmt: skip
    return Launch(plan, kernel, records)
