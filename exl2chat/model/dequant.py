"""Weights decoded exactly, in numpy: what the file means, bit for bit. Slow paths of the CPU and every oracle use it.

Both formats pack one column as a little-endian bit stream: code i takes bits [i b, (i + 1) b) of the column's 32-bit
words. 3, 5 and 6 bits straddle words and realign after 32 / gcd(32, b) codes.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from exl2chat.model.quant import WORD, Linear
from exl2chat.model.tensors import read_array, read_float32

Half = npt.NDArray[np.float16]


def unpack_rows(words: npt.NDArray[Any], bits: int) -> npt.NDArray[np.uint8]:
    """32-bit words [W, N] to codes [W * 32 / bits, N]."""
    together = math.gcd(WORD, bits)
    period, stride = WORD // together, bits // together
    columns = words.shape[1]
    blocks = words.view(np.uint32).reshape(-1, stride, columns)
    codes = np.empty((len(blocks), period, columns), np.uint8)
    mask = np.uint32((1 << bits) - 1)
    for i in range(period):
        word, shift = divmod(i * bits, WORD)
        value = blocks[:, word] >> np.uint32(shift)
        if shift + bits > WORD:
            value |= blocks[:, word + 1] << np.uint32(WORD - shift)
        codes[:, i] = value & mask
    return codes.reshape(-1, columns)


def unpack_columns(words: npt.NDArray[Any], bits: int) -> npt.NDArray[np.uint8]:
    """32-bit words [G, W] packed along columns to codes [G, W * 32 / bits]."""
    return unpack_rows(np.ascontiguousarray(words.T), bits).T


def exl2_scales(linear: Linear) -> Half:
    """The scale of each group and column, [G, N]: (code + 1) squared times the group's maximum / 256.

    The maximum / 256 is rounded to float16, often to a subnormal: the quantiser chose the codes for the rounded value,
    and leaving the rounding out changes scales by up to 4.8 %.
    """
    codes = unpack_columns(read_array(linear.tensors["q_scale"]), 4).astype(np.float32)
    unit = (read_float32(linear.tensors["q_scale_max"]) / 256).astype(np.float16)
    with np.errstate(over="ignore"):
        return ((codes + 1) ** 2 * unit[:, None].astype(np.float32)).astype(np.float16)


def dequantize(linear: Linear) -> Half:
    """The weight of `linear` as float16 [in_features, out_features], rows in the original order.

    EXL2 and GPTQ exactly as their formats define it; a plain weight is rounded to float16.
    """
    with np.errstate(over="ignore"):
        if linear.kind == "exl2":
            return _dequantize_exl2(linear)
        if linear.kind == "gptq":
            return _dequantize_gptq(linear)
        return read_float32(linear.tensors["weight"]).T.astype(np.float16)


def _dequantize_exl2(linear: Linear) -> Half:
    packed = read_array(linear.tensors["q_weight"])
    row_of = np.argsort(read_array(linear.tensors["q_invperm"]))  # stored row to original row
    scales = exl2_scales(linear).astype(np.float32)
    weight = np.empty((linear.in_features, linear.out_features), np.float16)
    for scale, group in zip(scales, linear.groups, strict=True):
        codes = unpack_rows(packed[group.word_start : group.word_end], group.bits).astype(np.float32)
        codes -= 1 << (group.bits - 1)
        codes *= scale
        weight[row_of[group.row_start : group.row_end]] = codes
    return weight


def _dequantize_gptq(linear: Linear) -> Half:
    codes = unpack_rows(read_array(linear.tensors["qweight"]), linear.bits)
    zeros = unpack_columns(read_array(linear.tensors["qzeros"]), linear.bits).astype(np.int16) + linear.zero_offset
    scales = read_float32(linear.tensors["scales"]).astype(np.float16).astype(np.float32)
    if linear.act_order:
        group_of = read_array(linear.tensors["g_idx"]).astype(np.int64)
    else:
        group_of = np.arange(linear.in_features) // linear.group_size
    return ((codes - zeros[group_of]) * scales[group_of]).astype(np.float16)
