"""What our kernels hand to each other between matrices: how they call its dtype, and of how many sums it is made."""

import torch
from torch import Tensor


def count_parts(x: Tensor) -> int:
    """How many partial sums x [P, T, N] or [T, N] is made of."""
    return x.shape[0] if x.dim() == 3 else 1


def suffix(x: Tensor) -> str:
    """How the kernels call the dtype of their input."""
    return {torch.float16: "half", torch.bfloat16: "bfloat", torch.float32: "float"}[x.dtype]
