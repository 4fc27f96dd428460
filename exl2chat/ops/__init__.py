"""The arithmetic: torch tensors in and out. `select` says which implementation of the ops a device uses."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from exl2chat.kernels import compile_for as compile_for
from exl2chat.ops import cuda, reference
from exl2chat.ops.attention import Attend as Attend
from exl2chat.ops.attention import Heads as Heads
from exl2chat.ops.attention import Store as Store
from exl2chat.ops.packed import Norm as Norm
from exl2chat.ops.packed import Weight as Weight


class Ops(Protocol):
    """What a transformer is made of, beside its matrices (Weight). Contracts: `exl2chat.ops.reference`.

    What the matrix `into` is given next may come in the form that only it takes, and what a matrix gave may be partial
    sums [P, T, N]. Steps of up to `recorded_rows` tokens queue the same work whatever the cache holds, so that a CUDA
    graph can repeat them.
    """

    @property
    def recorded_rows(self) -> int: ...

    def embed(self, tokens: Tensor, table: Tensor, factor: float) -> Tensor: ...

    def norm(self, x: Tensor, norm: Norm, into: Weight) -> Tensor: ...

    def add_norm(self, x: Tensor, out: Tensor, post: Norm | None, norm: Norm, into: Weight) -> Tensor: ...

    def attends(self, store: Store, count: int, heads: Heads, windows: Sequence[int | None]) -> Sequence[Attend]: ...

    def gate(self, x: Tensor, activation: str, into: Weight) -> Tensor: ...

    def logits(self, out: Tensor, cap: float | None) -> Tensor: ...


def select(device: torch.device, dtype: torch.dtype, head_dim: int, hidden: int, inner: int) -> Ops:
    """The ops of `device` for a model that multiplies in `dtype`, with rows of `hidden` and `inner` (feed-forward)
    numbers and heads of `head_dim`: our kernels where they can, else plain torch."""
    if device.type == "cuda" and cuda.supports(dtype, head_dim, hidden, inner):
        return cuda.CudaOps(device)
    return reference
