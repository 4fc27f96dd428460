"""One linear weight in the layout that torch multiplies fastest, by device and dtype. Figures: benchmarks/NOTES.md.

| dtype on the CPU | layout | few rows of x | many rows |
|---|---|---|---|
| float32 | Blocked: oneDNN's blocks | float32 | float32 |
| float16 | Half: rows as they are, exact for every EXL2 and GPTQ weight | float16 | float32 |
| bfloat16 | Half | float16 | bfloat16 |
| bfloat16, 4-bit GPTQ | Nibbles: the codes themselves | bfloat16 | bfloat16 |

On a GPU a weight is a plain torch matrix of its dtype.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_ROWS = 4
NIBBLE_GROUPS = frozenset({32, 64, 128, 256})


class Weight(Protocol):
    """y = x W + bias: x [T, K] of any float dtype to y [T, N] of the dtype in which the weight multiplied."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm over D dimensions, float32: scale is its weight * sqrt(D), [D] or [H, D]; floor is sqrt(D * eps), [1]."""

    scale: Tensor
    floor: Tensor


def pack_norm(weight: Tensor, eps: float, device: torch.device) -> Norm:
    """The weight [D] or [H, D] as a Norm."""
    size = weight.shape[-1]
    return Norm((weight.float() * math.sqrt(size)).to(device), torch.tensor([math.sqrt(size * eps)], device=device))


def pack(weight: Tensor, bias: Tensor | None, device: torch.device, dtype: torch.dtype) -> Weight:
    """A float matrix [N, K] and its bias [N] as a Weight that multiplies in `dtype` on `device`."""
    if device.type == "cpu" and dtype != torch.float32:
        wide = torch.bfloat16 if dtype == torch.bfloat16 and has_bfloat16() else torch.float32
        return Half(weight.half(), None if bias is None else bias.half(), wide)
    weight = weight.to(device, dtype)
    bias = None if bias is None else bias.to(device, dtype)
    if device.type == "cpu" and has_onednn():
        return Blocked(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), bias, weight.nbytes)
    return Plain(weight, bias)


def has_onednn() -> bool:
    """Whether this build of torch has oneDNN."""
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def has_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU (AVX-512 or its like); otherwise float32 is faster."""
    return has_onednn() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_nibbles(codes: Tensor, zeros: Tensor, scales: Tensor, order: Tensor | None, bias: Tensor | None) -> Weight:
    """W[k, n] = (codes[k, n] - zeros[g, n]) * scales[g, n], g = k // group size, packed for the CPU.

    codes uint8 [K, N] below 16, rows sorted by group, N a multiple of 16; zeros and scales float [G, N], the group size
    K / G in NIBBLE_GROUPS. `order` [K] is the row of W that each row of codes is, None where they lie in order.
    """
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.T.int().contiguous(), 1)
    pairs = torch.stack((scales, (8 - zeros) * scales), -1).bfloat16()
    group_size = codes.shape[0] // scales.shape[0]
    return Nibbles(packed, pairs, group_size, order, None if bias is None else bias.bfloat16())


@dataclass(frozen=True, slots=True)
class Plain:
    """A torch matrix [N, K] as it is."""

    weight: Tensor
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Half:
    """float16 rows [N, K] on the CPU.

    One row of x is N dot products summed in float32: 118 tokens/s where bfloat16 in oneDNN's blocks reaches 73 (a
    135M model, two cores). torch has no fast float16 product of matrices on most CPUs (2.7 s for 512 rows), so many
    rows multiply by a copy in `wide` made each time: 0.6 s in float32, 0.33 s in bfloat16.
    """

    weight: Tensor
    bias: Tensor | None
    wide: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= FEW_ROWS:
            return F.linear(x.half(), self.weight, self.bias)
        bias = None if self.bias is None else self.bias.to(self.wide)
        weight = self.weight.float().to(self.wide)  # in two steps: torch takes 5 times as long from float16 to bfloat16
        return F.linear(x.to(self.wide), weight, bias)


@dataclass(frozen=True, slots=True)
class Blocked:
    """A float32 matrix in oneDNN's own block layout: 1.6 times as fast for one row as from plain rows."""

    weight: Tensor
    bias: Tensor | None
    nbytes: int

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x.float(), self.weight, self.bias, "none", [], "")
        return y


@dataclass(frozen=True, slots=True)
class Nibbles:
    """4-bit codes as torch packs them for the CPU, with (scale, zero) per group and column, bfloat16 [G, N, 2].

    torch computes (code - 8) * scale + zero and multiplies in bfloat16. With a float32 x the op is 20 times as slow.
    """

    codes: Tensor
    scales_and_zeros: Tensor
    group_size: int
    order: Tensor | None
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales_and_zeros.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        x = x.bfloat16() if self.order is None else x.bfloat16()[:, self.order]
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.codes, self.group_size, self.scales_and_zeros)
        return y if self.bias is None else y.add_(self.bias)
