"""Packing into tiles, against a reader of single codes that follows the drawing in kernels/tiles.cuh."""

from pathlib import Path

import numpy as np
import pytest
import torch

from exl2chat.engine.tiling import tile_one
from exl2chat.model.dequant import dequantize
from exl2chat.model.quant_config import QuantConfig
from exl2chat.ops.tiled import Tiled
from exl2chat.ops.tiles import find_runs, fragment_order, unpack_rows
from tests.model.model_files import pack, random_exl2, random_gptq, save_linear

PLANS = {
    **{f"{bits} bits": [(bits, 32), (bits, 64), (bits, 32)] for bits in (8, 6, 5, 4, 3, 2)},
    "all widths": [(8, 32), (8, 96), (6, 64), (5, 128), (5, 32), (4, 128), (3, 64), (3, 32), (2, 128), (2, 256)],
    "short last group": [(4, 128), (4, 128), (4, 96)],
}
# How far left of bit 4 (8 for odd registers) the high bits of codes lie, by 2 f + a / 2.
FIFTH = (-4, -3, -2, -1, 4, 5, 6, 7)
SIXTH = (-4, -2, 4, 6)
THIRD = (-2, -1, 6, 7)


def read_code(words: np.ndarray, bits: int, lane: int, j: int, f: int, a: int, pair: int) -> int:
    """One code out of a quad's words [bits, 32, 4]."""

    def bit(plane_chunk: int, index: int, position: int, width: int) -> int:
        word = words[plane_chunk + index // 4, lane, index % 4]
        return int(word) >> (position + 16 * pair) & (1 << width) - 1

    target = 8 if a % 2 else 4
    if bits == 8:
        return bit(0, 8 * j + 2 * f + a // 2, 8 * (a % 2), 8)
    if bits in (2, 3):
        low = bit(0, 2 * j + f // 2, 2 * a + 8 * (f % 2), 2)
        return low if bits == 2 else low | bit(2, j, 2 * a + 2 + THIRD[f], 1) << 2
    low = bit(0, 4 * j + f, 4 * a, 4)
    if bits == 5:
        low |= bit(4, j, target + FIFTH[2 * f + a // 2], 1) << 4
    if bits == 6:
        low |= bit(4, 2 * j + f // 2, target + SIXTH[2 * (f % 2) + a // 2], 2) << 4
    return low


def read_scale(matrix: Tiled, words: np.ndarray, span: int, bits: int, quad: int, j: int, c: int) -> tuple[float, int]:
    """(scale, zero point) of column c of a strip, in tile j of a quad; words: the run's part of the strip's scales."""
    g, quarter, block = c % 8, c // 8, j // span
    if matrix.is_gptq:
        word = int(words.reshape(-1, 4 // span, 8, 4)[quad, block, g, quarter])
        scale, zero = np.array([word & 0xFFFF, word >> 16], np.uint16).view(np.float16)
        return float(scale), int(zero)
    word = int(words.reshape(-1, 8, 4 // span)[quad, g, block])
    unit = np.array([word >> 8 & 0xFF, word >> 24], np.uint8).view(np.float16)[0]
    code = word >> (0, 16, 4, 20)[quarter] & 15
    return float(np.float16(np.float32(unit) * (code + 1) ** 2)), 1 << bits - 1


def read_matrix(matrix: Tiled) -> np.ndarray:
    """W float16 [K, columns], code by code."""
    weights, scales = (t.numpy().view(np.uint32) for t in (matrix.weights, matrix.scales))
    out = np.full((len(matrix.order), matrix.strips * 32), np.nan, np.float16)
    at_weight = at_scale = 0
    for index, run in enumerate(matrix.runs):
        end = matrix.runs[index + 1].tile if index + 1 < len(matrix.runs) else len(matrix.order) // 32
        size, scale_size = run.quads * run.bits * 128, run.quads * (32 if matrix.is_gptq else 8) * 4 // run.span
        for strip in range(matrix.strips):
            quads = weights[at_weight : at_weight + size].reshape(run.quads, run.bits, 32, 4)
            mine = scales[at_scale : at_scale + scale_size]
            at_weight, at_scale = at_weight + size, at_scale + scale_size
            for tile in range(end - run.tile):
                for k in range(32):
                    to = matrix.order[(run.tile + tile) * 32 + k]
                    h, e, t, pair = k // 16, k // 8 % 2, k // 2 % 4, k % 2
                    for c in range(32):
                        lane, f, a = c % 8 * 4 + t, c // 16 * 2 + h, c // 8 % 2 + 2 * e
                        code = read_code(quads[tile // 4], run.bits, lane, tile % 4, f, a, pair)
                        scale, zero = read_scale(matrix, mine, run.span, run.bits, tile // 4, tile % 4, c)
                        out[to, strip * 32 + c] = np.float16((code - zero) * scale)
    assert at_weight == len(weights)
    assert at_scale == len(scales)
    return out[:, : matrix.columns]


def assert_same(matrix: Tiled | None, weight: np.ndarray) -> None:
    assert matrix is not None
    np.testing.assert_array_equal(read_matrix(matrix), weight)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_exl2(plan: list[tuple[int, int]], tmp_path: Path) -> None:
    tensors, weight = random_exl2(plan, 64, seed=len(plan))
    linear = save_linear(tmp_path, tensors, weight.shape, QuantConfig())
    assert_same(tile_one(linear, torch.device("cpu")), weight)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [32, 64, 128, 192])
def test_gptq(bits: int, size: int, tmp_path: Path) -> None:
    tensors, weight = random_gptq(bits, 192, 64, np.arange(192) // size, seed=bits)
    linear = save_linear(tmp_path, tensors, weight.shape, QuantConfig(group_size=size))
    assert_same(tile_one(linear, torch.device("cpu")), weight)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq_with_act_order_and_columns_that_fill_no_strip(bits: int, tmp_path: Path) -> None:
    group_of = np.random.default_rng(bits).permutation(np.arange(256) // 64)
    tensors, weight = random_gptq(bits, 256, 48, group_of, seed=bits)
    linear = save_linear(tmp_path, tensors, weight.shape, QuantConfig())
    assert_same(tile_one(linear, torch.device("cpu")), weight)


def test_what_tiles_cannot_hold_is_left_to_a_plain_weight(tmp_path: Path) -> None:
    exl2, weight = random_exl2([(4, 32), (2, 16), (2, 16)], 32, seed=0)
    assert tile_one(save_linear(tmp_path, exl2, weight.shape, QuantConfig()), torch.device("cpu")) is None
    gptq, weight = random_gptq(4, 96, 32, np.arange(96) // 48, seed=0)
    assert tile_one(save_linear(tmp_path, gptq, weight.shape, QuantConfig(group_size=48)), torch.device("cpu")) is None


def test_the_reader_agrees_with_the_decoder_of_the_formats(tmp_path: Path) -> None:
    tensors, weight = random_exl2([(6, 128), (4, 32)], 32, seed=3)
    np.testing.assert_array_equal(dequantize(save_linear(tmp_path, tensors, weight.shape, QuantConfig())), weight)


def test_a_scale_holds_for_as_many_tiles_as_its_group_allows() -> None:
    assert [run.span for run in find_runs([4] * 8, [0, 0, 0, 0, 1, 1, 1, 1], True)] == [4]
    assert [run.span for run in find_runs([4] * 8, [0, 0, 0, 0, 1, 1, 2, 2], True)] == [2]
    assert [run.span for run in find_runs([4] * 6, [0, 0, 0, 1, 1, 1], True)] == [1]  # groups of 96 rows
    short = find_runs([6, 4, 4], [0, 1, 1], False)
    assert [(run.bits, run.tile, run.span, run.groups) for run in short] == [
        (6, 0, 1, (0, -1, -1, -1)),
        (4, 1, 2, (1, 1, -1, -1)),
    ]


def test_x_is_taken_in_the_order_of_the_fragments() -> None:
    order = fragment_order(torch.arange(64)).view(2, 4, 8)
    assert order[1, 3].tolist() == [32 + row for row in (6, 7, 14, 15, 22, 23, 30, 31)]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_unpacking_inverts_packing(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (96, 5))
    np.testing.assert_array_equal(unpack_rows(torch.from_numpy(pack(codes, bits)), bits).numpy(), codes)
