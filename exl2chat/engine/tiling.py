"""EXL2 and GPTQ weights from disk into the tiles that CUDA kernels multiply."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from exl2chat.model.quant import Linear
from exl2chat.model.tensors import read_array, read_float32
from exl2chat.ops.packed import Weight
from exl2chat.ops.plan import MAX_RUNS
from exl2chat.ops.tiled import Tiled, join
from exl2chat.ops.tiles import (
    STRIP,
    TILE,
    Run,
    find_runs,
    pack_codes,
    pack_exl2_scales,
    pack_gptq_scales,
    unpack_rows,
)

# Codes that are unpacked at a time: the work memory is some 13 bytes per code.
CODES_AT_A_TIME = 1 << 24


def tile(parts: Sequence[Linear], device: torch.device, columns: int | None = None) -> Weight | None:
    """Projections of one input as one weight on a CUDA device, or None where the tiles cannot hold one of them.

    A tile has 32 rows of one width and one group: an EXL2 group of 16 rows, a GPTQ group that ends within a tile, or
    more runs of one width than a kernel takes do not fit. `columns` cuts off the padding of a head.
    """
    matrices = []
    for part in parts:
        matrix = tile_one(part, device)
        if matrix is None:
            return None
        matrices.append(matrix if columns is None else replace(matrix, columns=columns))
    return join(matrices)


def tile_one(linear: Linear, device: torch.device) -> Tiled | None:
    """One projection packed on `device`, None where it does not fit."""
    if linear.kind == "plain":
        return None
    bias = None
    if "bias" in linear.tensors:
        bias = torch.from_numpy(read_float32(linear.tensors["bias"])).to(device)
    return _tile_exl2(linear, bias, device) if linear.kind == "exl2" else _tile_gptq(linear, bias, device)


def _tile_exl2(linear: Linear, bias: Tensor | None, device: torch.device) -> Tiled | None:
    """An EXL2 weight, its rows as they are stored: sorted by width."""
    bits, groups = [], []
    for index, group in enumerate(linear.groups):
        count, rest = divmod(group.row_end - group.row_start, TILE)
        if rest:
            return None
        bits += [group.bits] * count
        groups += [index] * count
    runs = find_runs(bits, groups, repeat_last=True)
    if len(runs) > MAX_RUNS:
        return None
    words = _read(linear, "q_weight")
    packed = []
    for run in runs:
        first, last = linear.groups[run.groups[0]], linear.groups[run.groups[-1]]
        rows = words[first.word_start : last.word_end]
        packed.append(_pack(rows, run, None, 1 << (run.bits - 1), device))
    codes = unpack_rows(_read(linear, "q_scale").to(device).T.contiguous(), 4).T
    units = (_read(linear, "q_scale_max").to(device).float() / 256).half()
    scales = [pack_exl2_scales(codes, units, run) for run in runs]
    order = torch.argsort(_read(linear, "q_invperm").to(device).long()).int()
    columns = linear.out_features
    return Tiled(torch.cat(packed), torch.cat(scales), runs, order, columns // STRIP, columns, False, bias)


def _tile_gptq(linear: Linear, bias: Tensor | None, device: torch.device) -> Tiled | None:
    """A GPTQ weight, its rows sorted by group."""
    count, columns = linear.in_features, linear.out_features
    if linear.act_order:
        group_of = _read(linear, "g_idx").long()
        order = torch.argsort(group_of, stable=True)
    else:
        order = torch.arange(count)
        group_of = order // linear.group_size
    if count % TILE:
        return None
    groups = group_of[order].view(-1, TILE)
    if (groups != groups[:, :1]).any():
        return None
    runs = find_runs([linear.bits] * len(groups), groups[:, 0].tolist(), repeat_last=False)
    padding = -columns % STRIP
    words = F.pad(_read(linear, "qweight"), (0, padding))
    packed = _pack(words, runs[0], order.to(device), 0, device)
    zeros = unpack_rows(_read(linear, "qzeros").to(device).T.contiguous(), linear.bits).T.short() + linear.zero_offset
    scales = torch.from_numpy(read_float32(linear.tensors["scales"])).to(device).half()
    scales = pack_gptq_scales(F.pad(scales, (0, padding)), F.pad(zeros, (0, padding)), runs[0])
    strips = (columns + padding) // STRIP
    return Tiled(packed, scales, runs, order.to(device).int(), strips, columns, True, bias)


def _pack(words: Tensor, run: Run, order: Tensor | None, filler: int, device: torch.device) -> Tensor:
    """The words of a run [W, N] as int32 [strips * quads * bits * 128], by columns; missing rows are `filler`."""
    rows = words.shape[0] * 32 // run.bits
    step = max(STRIP, CODES_AT_A_TIME // rows // STRIP * STRIP)
    packed = []
    for start in range(0, words.shape[1], step):
        codes = unpack_rows(words[:, start : start + step].to(device).contiguous(), run.bits)
        codes = codes if order is None else codes[order]
        packed.append(pack_codes(F.pad(codes, (0, 0, 0, run.quads * 4 * TILE - rows), value=filler), run.bits))
    return torch.cat(packed)


def _read(linear: Linear, role: str) -> Tensor:
    return torch.from_numpy(read_array(linear.tensors[role]))
