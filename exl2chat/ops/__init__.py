"""The arithmetic: torch tensors in and out. `select` says which implementation of the ops a device uses."""

from typing import Protocol

import torch
from torch import Tensor

from exl2chat.ops import reference
from exl2chat.ops.packed import Norm as Norm
from exl2chat.ops.packed import Weight as Weight


class Ops(Protocol):
    """What a transformer is made of, beside its matrices (Weight). Contracts: `exl2chat.ops.reference`."""

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor: ...

    def rope_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None: ...

    def visible(self, count: int, total: int, window: int | None, device: torch.device) -> Tensor | None: ...

    def attention(
        self, q: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None, cap: float | None
    ) -> Tensor: ...

    def gate(self, x: Tensor, activation: str) -> Tensor: ...

    def softcap(self, x: Tensor, cap: float) -> Tensor: ...


def select(device: torch.device) -> Ops:  # noqa: ARG001
    """The ops of `device`: plain torch for every device until there are kernels."""
    return reference
