"""4-bit GPTQ codes as they are, into the form that torch multiplies four at a time on the CPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from exl2chat.model.dequant import unpack_columns, unpack_rows
from exl2chat.model.quant import Linear
from exl2chat.model.tensors import read_array, read_float32
from exl2chat.ops.packed import NIBBLE_GROUPS, Weight, pack_nibbles

WIDTH_UNIT = 16


@dataclass(frozen=True, slots=True)
class _Rows:
    """How a weight's rows fall into groups: `order` sorts them by group, None where they lie so."""

    group_size: int
    order: npt.NDArray[np.int64] | None

    def same(self, other: "_Rows") -> bool:
        if self.order is None or other.order is None:
            return self.order is other.order and self.group_size == other.group_size
        return np.array_equal(self.order, other.order)


def pack_gptq(parts: Sequence[Linear], bias: Tensor | None) -> Weight | None:
    """Projections of one input side by side; None where one is not 4-bit GPTQ or torch's form cannot hold it.

    It holds groups of equal size out of NIBBLE_GROUPS. With act-order the rows are sorted by group, in the same order
    for every part (they are quantised for the same inputs), and x is gathered in that order.
    """
    if any(part.kind != "gptq" or part.bits != 4 or part.out_features % WIDTH_UNIT for part in parts):
        return None
    rows = [_read_rows(part) for part in parts]
    first = rows[0]
    if first is None or not all(other is not None and first.same(other) for other in rows):
        return None
    codes, zeros, scales = (np.concatenate(arrays, axis=1) for arrays in zip(*map(_read_codes, parts), strict=True))
    order = None if first.order is None else torch.from_numpy(first.order)
    if first.order is not None:
        codes = codes[first.order]
    return pack_nibbles(torch.from_numpy(codes), torch.from_numpy(zeros), torch.from_numpy(scales), order, bias)


def _read_rows(linear: Linear) -> _Rows | None:
    count = linear.in_features
    if not linear.act_order:
        whole = linear.group_size in NIBBLE_GROUPS and count % linear.group_size == 0
        return _Rows(linear.group_size, None) if whole else None
    groups = read_array(linear.tensors["g_idx"])
    sizes = np.bincount(groups, minlength=linear.tensors["scales"].shape[0])
    if sizes.min() != sizes.max() or int(sizes[0]) not in NIBBLE_GROUPS:
        return None
    return _Rows(int(sizes[0]), np.argsort(groups, kind="stable"))


def _read_codes(linear: Linear) -> tuple[npt.NDArray[Any], ...]:
    """codes uint8 [K, N] as stored, zero points and scales float32 [G, N]."""
    codes = unpack_rows(read_array(linear.tensors["qweight"]), 4)
    zeros = unpack_columns(read_array(linear.tensors["qzeros"]), 4).astype(np.float32) + linear.zero_offset
    return codes, zeros, read_float32(linear.tensors["scales"])
