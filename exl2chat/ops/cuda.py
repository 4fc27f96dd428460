"""The ops through our CUDA kernels (exl2chat/kernels), for float16 models. Contracts: `exl2chat.ops.reference`.

Activations between ops are float16, the residual stream and logits float32; matrices may give float16 or float32. Few
rows pass between packed matrices as these take and give them: fragments, and partial sums (kernels/rows.cuh).
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exl2chat import kernels
from exl2chat.kernels import Argument, Kernel
from exl2chat.ops.attention import Heads, Store
from exl2chat.ops.cuda_attention import MAX_ROWS, CudaAttend, CudaAttention
from exl2chat.ops.packed import Norm, Weight
from exl2chat.ops.partial import count_parts, suffix
from exl2chat.ops.tiled import TiledWeight

MAX_WIDTH = 16384  # of a row that norm.cu holds in registers: 1024 threads, 4 * 4 numbers each
MAX_HEAD_DIM = 256
TILE = 16  # that the size of a head is a multiple of


def supports(dtype: torch.dtype, head_dim: int, hidden: int, inner: int) -> bool:
    """Whether the kernels can run a model (see `ops.select`)."""
    heads = head_dim % TILE == 0 and head_dim <= MAX_HEAD_DIM
    return dtype == torch.float16 and heads and hidden % 4 == 0 and hidden <= MAX_WIDTH and inner % 4 == 0


class CudaOps:
    """The ops on one device. One step at a time (see CudaAttention)."""

    recorded_rows = MAX_ROWS

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._attention = CudaAttention(device, self._activations)

    def embed(self, tokens: Tensor, table: Tensor, factor: float) -> Tensor:
        size = table.shape[1]
        x = torch.empty(tokens.shape[0], size, device=self._device)
        kernel, threads = self._row_kernel(f"embed_{suffix(table)}", size)
        kernel.launch((tokens.shape[0], 1), threads, 0, tokens, table, _float(factor), x, size)
        return x

    def norm(self, x: Tensor, norm: Norm, into: Weight) -> Tensor:
        rows, size = x.shape
        y, places = self._activations(rows, size, into)
        kernel, threads = self._row_kernel("norm_only", size)
        kernel.launch((rows, 1), threads, 2 * size, x, norm.scale, norm.floor, places, y, size)
        return y

    def add_norm(self, x: Tensor, out: Tensor, post: Norm | None, norm: Norm, into: Weight) -> Tensor:
        rows, size = x.shape
        y, places = self._activations(rows, size, into)
        sandwich = (_NOWHERE, _NOWHERE) if post is None else (post.scale, post.floor)
        kernel, threads = self._row_kernel(f"add_norm_{suffix(out)}", size)
        kernel.launch(
            (rows, 1), threads, 2 * size, x, out, count_parts(out), *sandwich, norm.scale, norm.floor, places, y, size
        )  # fmt: skip
        return y

    def gate(self, x: Tensor, activation: str, into: Weight) -> Tensor:
        rows, inner = x.shape[-2], x.shape[-1] // 2
        y, places = self._activations(rows, inner, into)
        kernel = kernels.load("gate.cu", f"{activation}_{suffix(x)}", self._device)
        kernel.launch((-(-inner // 512), rows), 128, 0, x, count_parts(x), places, y, inner)
        return y

    def logits(self, out: Tensor, cap: float | None) -> Tensor:
        rows, size = out.shape[-2:]
        if count_parts(out) == 1 and out.dtype == torch.float32 and cap is None:
            return out.view(rows, size)
        y = torch.empty(rows, size, device=self._device)
        kernel = kernels.load("gate.cu", f"logits_{suffix(out)}", self._device)
        kernel.launch((-(-y.numel() // 256), 1), 256, 0, out, count_parts(out), y, _float(cap or 0), y.numel())
        return y

    def attends(self, store: Store, count: int, heads: Heads, windows: Sequence[int | None]) -> list[CudaAttend]:
        return self._attention.attends(store, count, heads, windows)

    def _activations(self, rows: int, width: int, into: Weight) -> tuple[Tensor, Argument]:
        """Memory for float16 activations in the form that `into` takes, and where each column goes in it."""
        places = into.places_for(rows) if isinstance(into, TiledWeight) else None
        if places is not None:
            return torch.empty(width // 32, rows, 4, 8, dtype=torch.float16, device=self._device), places
        return torch.empty(rows, width, dtype=torch.float16, device=self._device), _NOWHERE

    def _row_kernel(self, name: str, size: int) -> tuple[Kernel, int]:
        """A kernel of norm.cu for rows of `size`, and how many threads take one."""
        threads = min(1024, -(-size // 128) * 32)
        units = next(units for units in (1, 2, 4) if units * threads * 4 >= size)
        return kernels.load("norm.cu", name, self._device, UNITS=units), threads


_NOWHERE = np.array(0, np.uint64)


def _float(value: float) -> NDArray[np.float32]:
    return np.array(value, np.float32)
