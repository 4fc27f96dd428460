"""Which tensors make one linear weight, decided by tensor names: q_weight is EXL2, qweight GPTQ, weight plain.

Everything small is read and checked here once (group tables, permutations, scales), so that no index a kernel computes
from a file can lie outside its arrays. Formats: EXL2 as ExLlamaV2 writes it, GPTQ as AutoGPTQ and GPTQModel do.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from exl2chat.errors import ModelError
from exl2chat.model.quant_config import QuantConfig
from exl2chat.model.tensors import FLOATS, TensorInfo, read_array, read_float32

EXL2_BITS = frozenset({2, 3, 4, 5, 6, 8})
GPTQ_BITS = frozenset({2, 3, 4, 8})
WORD = 32
GROUP_UNIT = 16  # rows of an EXL2 group come in multiples of this, whatever the width
PLAIN_BITS: Mapping[str, int] = {"F16": 16, "BF16": 16, "F32": 32}
EXL2_ROLES = ("q_weight", "q_groups", "q_scale", "q_scale_max", "q_invperm")
GPTQ_ROLES = ("qweight", "qzeros", "scales", "g_idx")
PLAIN_ROLES = ("weight",)
_I32 = frozenset({"I32"})
_REMEDY = "the file is damaged; download the model again"


@dataclass(frozen=True, slots=True)
class Group:
    """One EXL2 group: codes of `bits` bits of stored rows [row_start, row_end), in words [word_start, word_end) of
    each column of q_weight."""

    bits: int
    word_start: int
    word_end: int
    row_start: int
    row_end: int


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear weight y = x W + bias with W [in_features, out_features], as it lies on disk.

    `tensors` by the suffix they have on disk. A bias of nothing but zeros is left out.
    exl2: q_weight I32 [words, N], q_groups I16 [2G], q_scale I32 [G, N/8], q_scale_max F16 [G], q_invperm I32 [K]
    (original row i is stored row q_invperm[i]); `groups` is q_groups decoded, in order, `bits` the widest of them.
    gptq: qweight I32 [K * bits / 32, N], qzeros I32 [G, N * bits / 32], scales float [G, N], and with act-order g_idx
    [K], the group of each row; otherwise row k is in group k // group_size. A zero point is the stored one plus
    `zero_offset`, and is not masked: 16 is possible at 4 bits.
    plain: weight float [N, K]; `bits` is the width of its dtype.
    """

    key: str
    kind: Literal["exl2", "gptq", "plain"]
    in_features: int
    out_features: int
    tensors: Mapping[str, TensorInfo]
    bits: int
    groups: tuple[Group, ...] = ()
    group_size: int = 0
    act_order: bool = False
    zero_offset: int = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes on disk of all its tensors."""
        return sum(info.nbytes for info in self.tensors.values())


def find_linear(
    tensors: Mapping[str, TensorInfo],
    key: str,
    in_features: int,
    out_features: int,
    config: QuantConfig,
    padded: bool = False,
) -> Linear | None:
    """The checked weight called `key`, or None where no tensor is called so.

    `padded` admits an EXL2 weight whose columns were padded to a multiple of 32 (the head). ModelError names the file,
    the tensor and what is wrong with it.
    """
    names = (*EXL2_ROLES, *GPTQ_ROLES, *PLAIN_ROLES, "bias")
    roles = {role: tensors[f"{key}.{role}"] for role in names if f"{key}.{role}" in tensors}
    if "q_weight" in roles:
        width = -(-out_features // WORD) * WORD
        if padded and roles["q_weight"].shape[1:] == (width,):
            out_features = width
        return _exl2(key, _pick(roles, EXL2_ROLES, out_features), in_features, out_features)
    if "qweight" in roles:
        return _gptq(key, _pick(roles, GPTQ_ROLES, out_features), in_features, out_features, config)
    if "weight" in roles:
        roles = _pick(roles, PLAIN_ROLES, out_features)
        expect(roles["weight"], FLOATS, (out_features, in_features))
        return Linear(key, "plain", in_features, out_features, roles, PLAIN_BITS[roles["weight"].dtype])
    return None


def expect(info: TensorInfo, dtypes: frozenset[str], shape: tuple[int, ...]) -> None:
    """ModelError unless the tensor has one of the dtypes and this shape."""
    if info.dtype not in dtypes:
        raise ModelError(f"{info} is {info.dtype}, not {' or '.join(sorted(dtypes))}", _REMEDY)
    if info.shape != shape:
        raise ModelError(f"{info} has shape {list(info.shape)}, not {list(shape)}", _REMEDY)


def expect_finite(info: TensorInfo) -> None:
    """ModelError if a small tensor of floats holds an infinity or a NaN."""
    if not np.isfinite(read_float32(info)).all():
        raise ModelError(f"{info} holds values that are not finite", _REMEDY)


def _pick(roles: Mapping[str, TensorInfo], wanted: tuple[str, ...], width: int) -> dict[str, TensorInfo]:
    """The roles in `wanted`, and the bias [width] if it does anything."""
    chosen = {role: info for role, info in roles.items() if role in wanted}
    if "bias" in roles:
        expect(roles["bias"], FLOATS, (width,))
        expect_finite(roles["bias"])
        if read_array(roles["bias"]).any():
            chosen["bias"] = roles["bias"]
    return chosen


def _need(roles: Mapping[str, TensorInfo], role: str, key: str) -> TensorInfo:
    if role not in roles:
        beside = next(iter(roles.values())).file
        raise ModelError(f"{beside}: tensor {key}.{role} is missing", _REMEDY)
    return roles[role]


def _exl2(key: str, roles: Mapping[str, TensorInfo], rows: int, columns: int) -> Linear:
    packed, table, scale, scale_max, invperm = (_need(roles, role, key) for role in EXL2_ROLES)
    if columns % WORD or len(packed.shape) != 2:
        raise ModelError(f"{packed} has shape {list(packed.shape)}; EXL2 needs a multiple of {WORD} columns", _REMEDY)
    expect(packed, _I32, (packed.shape[0], columns))
    count = max(1, math.prod(table.shape) // 2)
    expect(table, frozenset({"I16"}), (2 * count,))
    expect(scale, _I32, (count, columns * 4 // WORD))
    expect(scale_max, frozenset({"F16"}), (count,))
    expect(invperm, _I32, (rows,))
    expect_finite(scale_max)
    if not np.array_equal(np.sort(read_array(invperm)), np.arange(rows)):
        raise ModelError(f"{invperm} is not a permutation of {rows} rows", _REMEDY)
    groups = _read_groups(table, packed.shape[0], rows)
    return Linear(key, "exl2", rows, columns, roles, groups[0].bits, groups)


def _read_groups(table: TensorInfo, words: int, rows: int) -> tuple[Group, ...]:
    """q_groups decoded: pairs (bits, first word), the words unsigned 16 bits; a group ends where the next begins."""
    pairs = read_array(table).view(np.uint16).astype(int).reshape(-1, 2)
    ends = [*pairs[1:, 1].tolist(), words]
    groups: list[Group] = []
    row = 0
    for index, ((bits, start), end) in enumerate(zip(pairs.tolist(), ends, strict=True)):
        if bits not in EXL2_BITS or (groups and bits > groups[-1].bits):
            raise ModelError(f"{table}: group {index} is of {bits} bits; widths are 8, 6, 5, 4, 3, 2, falling", _REMEDY)
        height, rest = divmod((end - start) * WORD, bits)
        if height <= 0 or rest or height % GROUP_UNIT or (index == 0 and start):
            raise ModelError(f"{table}: group {index} spans words {start} to {end} of {words}", _REMEDY)
        groups.append(Group(bits, start, end, row, row + height))
        row += height
    if row != rows:
        raise ModelError(f"{table}: the groups hold {row} rows, not {rows}", _REMEDY)
    return tuple(groups)


def _gptq(key: str, roles: dict[str, TensorInfo], rows: int, columns: int, config: QuantConfig) -> Linear:
    packed, zeros, scales = (_need(roles, role, key) for role in GPTQ_ROLES[:3])
    words = packed.shape[0] if packed.shape else 0
    bits, rest = divmod(words * WORD, rows)
    if rest or bits not in GPTQ_BITS:
        raise ModelError(f"{packed} has {words} rows of words for {rows} inputs; GPTQ has 2, 3, 4 or 8 bits", _REMEDY)
    if columns * bits % WORD:
        raise ModelError(f"{packed}: {columns} columns of {bits} bits do not fill words of {WORD} bits", _REMEDY)
    count = scales.shape[0] if scales.shape else 0
    expect(packed, _I32, (words, columns))
    expect(zeros, _I32, (count, columns * bits // WORD))
    expect(scales, FLOATS, (count, columns))
    expect_finite(scales)
    size, act_order = _read_order(roles, rows, scales, config)
    if not act_order:
        roles.pop("g_idx", None)
    if config.bits not in (0, bits):
        raise ModelError(f"{packed} is of {bits} bits by its shape, of {config.bits} by config.json", _REMEDY)
    return Linear(
        key, "gptq", rows, columns, roles, bits, group_size=size, act_order=act_order, zero_offset=0 if config.v2 else 1
    )


def _read_order(
    roles: Mapping[str, TensorInfo], rows: int, scales: TensorInfo, config: QuantConfig
) -> tuple[int, bool]:
    """(rows per group, whether g_idx shuffles them). A g_idx that is absent, sequential or all zero needs no gather."""
    count = scales.shape[0]
    if count == 0:
        raise ModelError(f"{scales} has no groups", _REMEDY)
    g_idx = roles.get("g_idx")
    if g_idx is None:
        return _sequential_size(rows, scales, config), False
    expect(g_idx, frozenset({"I32", "I64"}), (rows,))
    order = read_array(g_idx).astype(np.int64)
    if order.min() < 0 or order.max() >= count:
        raise ModelError(f"{g_idx} names group {order.max()} or {order.min()} of {count}", _REMEDY)
    if not order.any():
        return _sequential_size(rows, scales, config), False
    size = int((order == 0).sum())
    if size and np.array_equal(order, np.arange(rows) // size):
        return size, False
    return config.group_size or -(-rows // count), True


def _sequential_size(rows: int, scales: TensorInfo, config: QuantConfig) -> int:
    """Rows per group where no g_idx tells: the config's figure, else an even split, else the next power of two."""
    count = scales.shape[0]
    even = -(-rows // count)
    guess = even if rows % count == 0 else 1 << (even - 1).bit_length()
    size = config.group_size or guess
    if -(-rows // size) != count:
        raise ModelError(
            f"{scales} has {count} groups for {rows} rows, which groups of {size} do not make",
            "state the right quantization_config.group_size",
        )
    return size
