"""One linear weight in the layout that torch multiplies fastest, per device and dtype.

| on the CPU | layout | rows of x | reads per weight |
|---|---|---|---|
| float32 | oneDNN blocks | any | 4 bytes |
| float16 | rows as they are (exact for every EXL2 and GPTQ weight) | 1 to 4: dot products; more: widened | 2 bytes |
| bfloat16 | oneDNN blocks | any | 2 bytes |
| bfloat16, 4-bit GPTQ | torch's packed nibbles | any | 0.5 bytes |

Why these: benchmarks/NOTES.md. On a GPU a weight is a plain torch matrix.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

FEW_ROWS = 4


class Weight(Protocol):
    """y = x @ W.T + bias: x [T, K] to [T, N], both of the weight's dtype."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm over D dimensions, float32: scale is its weight * sqrt(D), [D] or [H, D]; floor is sqrt(D * eps), [1]."""

    scale: Tensor
    floor: Tensor


def pack_norm(weight: Tensor, eps: float, device: torch.device) -> Norm:
    """The weight [D] or [H, D] as a float32 Norm."""
    size = weight.shape[-1]
    return Norm((weight.float() * math.sqrt(size)).to(device), torch.tensor([math.sqrt(size * eps)], device=device))


def pack(weight: Tensor, bias: Tensor | None, device: torch.device, dtype: torch.dtype) -> Weight:
    """A float matrix [N, K] and its bias [N] as a Weight of `dtype` on `device`."""
    weight = weight.to(device, dtype)
    bias = None if bias is None else bias.to(device, dtype)
    if device.type != "cpu":
        return Plain(weight, bias)
    if dtype == torch.float16:
        return Half(weight, bias)
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return Blocked(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()), bias, weight.nbytes)
    return Plain(weight, bias)


@dataclass(frozen=True, slots=True)
class Plain:
    """A torch matrix [N, K] as it is."""

    weight: Tensor
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Half:
    """float16 rows [N, K] on the CPU.

    One row of x is N dot products summed in float32: 118 tokens/s where bfloat16 in oneDNN's blocks reaches 73 (a
    135M model on two cores). torch has no fast float16 product of matrices on most CPUs (2.7 s for 512 rows), so more
    rows multiply by a float32 copy made each time (0.6 s). A bfloat16 copy would take 0.33 s and cost ten times the
    accuracy.
    """

    weight: Tensor
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= FEW_ROWS:
            return F.linear(x, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight.float(), bias).half()


@dataclass(frozen=True, slots=True)
class Blocked:
    """A matrix in oneDNN's own block layout: 1.6 times as fast as the same product from plain rows."""

    weight: Tensor
    bias: Tensor | None
    nbytes: int

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return y
