"""Products with packed weights on the GPU against float64 on the exactly dequantised weights."""

from pathlib import Path

import numpy as np
import pytest
import torch

from exl2chat.engine.tiling import tile, tile_one
from exl2chat.model.dequant import dequantize, exl2_scales, unpack_columns, unpack_rows
from exl2chat.model.quant import Linear
from exl2chat.model.quant_config import QuantConfig
from exl2chat.model.tensors import read_array
from exl2chat.ops import tiled
from exl2chat.ops.packed import Weight
from exl2chat.ops.plan import ALIKE, ROWS, lay_out
from exl2chat.ops.tiled import SideBySide, TiledWeight, prepare, reconstruct
from tests.gpu.packed_cases import PLANS
from tests.model.model_files import random_exl2, random_gptq, save_linear

pytestmark = pytest.mark.usefixtures("poisoned")
DEVICE = torch.device("cuda")
COUNTS = (1, 2, 3, 4, 5, 8, 16, 513)


def exact_weight(linear: Linear) -> np.ndarray:
    """W float64 [K, N] before the formats round each value to float16, which a product from codes does not."""
    role = "q_weight" if linear.kind == "exl2" else "qweight"
    words = read_array(linear.tensors[role])
    if linear.kind == "exl2":
        scales = exl2_scales(linear).astype(np.float64)
        rows = [
            (unpack_rows(words[g.word_start : g.word_end], g.bits) - float(1 << g.bits - 1)) * scale
            for g, scale in zip(linear.groups, scales, strict=True)
        ]
        return np.concatenate(rows)[read_array(linear.tensors["q_invperm"])]
    count = np.arange(linear.in_features)
    group_of = read_array(linear.tensors["g_idx"]) if linear.act_order else count // linear.group_size
    zeros = unpack_columns(read_array(linear.tensors["qzeros"]), linear.bits).astype(np.float64) + linear.zero_offset
    codes = unpack_rows(words, linear.bits)
    return (codes - zeros[group_of]) * read_array(linear.tensors["scales"]).astype(np.float64)[group_of]


def assert_close(y: torch.Tensor, x: torch.Tensor, dense: np.ndarray, bias: np.ndarray | float = 0) -> None:
    """y = x W + bias as float64 has it: to 1e-5 in sums of float32, and as float16 rounds it where cuBLAS made it."""
    truth = x.double() @ torch.from_numpy(dense) + bias
    error = (y.double().cpu() - truth).norm() / truth.norm()
    assert error < (1e-5 if y.dtype == torch.float32 else 5e-4), (len(x), error)


def make_exl2(folder: Path, plan: list[tuple[int, int]], columns: int, seed: int = 0) -> tuple[Linear, np.ndarray]:
    tensors, dense = random_exl2(plan, columns, seed)
    linear = save_linear(folder, tensors, dense.shape, QuantConfig())
    return linear, exact_weight(linear)


def check(weight: Weight, dense: np.ndarray, bias: np.ndarray | float = 0) -> None:
    for rows in COUNTS:
        x = torch.randn(rows, len(dense)).half()
        y = weight(x.to(DEVICE))
        assert (y.dtype == torch.float32) == (rows <= tiled.SOME_ROWS)
        assert_close(y, x, dense, bias)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_exl2(plan: list[tuple[int, int]], tmp_path: Path) -> None:
    linear, dense = make_exl2(tmp_path, plan, 96, seed=len(plan))
    weight = tile([linear], DEVICE)
    assert weight is not None
    check(weight, dense)


@pytest.mark.parametrize("size", [32, 64, 128, 160, 320])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits: int, size: int, tmp_path: Path) -> None:
    tensors, dense = random_gptq(bits, 320, 96, np.arange(320) // size, seed=bits)
    linear = save_linear(tmp_path, tensors, dense.shape, QuantConfig(group_size=size))
    weight = tile([linear], DEVICE)
    assert weight is not None
    check(weight, exact_weight(linear))


@pytest.mark.parametrize("columns", [16, 80])
def test_gptq_with_act_order_and_columns_that_fill_no_strip(columns: int, tmp_path: Path) -> None:
    group_of = np.random.default_rng(1).permutation(np.arange(512) // 64)
    tensors, dense = random_gptq(4, 512, columns, group_of, seed=1)
    linear = save_linear(tmp_path, tensors, dense.shape, QuantConfig())
    weight = tile([linear], DEVICE)
    assert weight is not None
    check(weight, exact_weight(linear))


@pytest.mark.parametrize("blocks", [1, 3, 16])
@pytest.mark.parametrize("split", [0, 1, 2])
@pytest.mark.parametrize("rows", ROWS)
def test_every_variant_and_split(blocks: int, split: int, rows: int, tmp_path: Path) -> None:
    linear, dense = make_exl2(tmp_path, [(5, 128), *[(4, 128)] * 9, (3, 64)], 160)
    weight = tile([linear], DEVICE)
    assert isinstance(weight, TiledWeight)
    plan = lay_out([weight.matrices[0].size], rows, blocks, split)
    x = torch.randn(rows, len(dense)).half()
    variant = TiledWeight(weight.matrices, weight.order, {rows: prepare(plan, weight.matrices)}, 160)
    assert_close(variant(x.to(DEVICE)), x, dense)


@pytest.mark.parametrize("rows", range(2, ALIKE + 1))
def test_a_row_is_the_same_in_any_company(rows: int, tmp_path: Path) -> None:
    linear, dense = make_exl2(tmp_path, [(6, 128), *[(4, 32)] * 20, (3, 64)], 480)
    weight = tile([linear], DEVICE)
    assert weight is not None
    x = torch.randn(rows, len(dense), device=DEVICE).half()
    together = weight(x)
    assert all(torch.equal(weight(x[i : i + 1])[0], together[i]) for i in range(rows))


@pytest.mark.parametrize("same_order", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_projections_side_by_side(same_order: bool, bias: bool, tmp_path: Path) -> None:
    plans = [[(6, 128), *[(4, 128)] * 3], [(8, 64), *[(5, 64)] * 7], [(4, 128)] * 4]
    linears, denses, biases = [], [], []
    for i, (plan, columns) in enumerate(zip(plans, (256, 64, 32), strict=True)):
        tensors, dense = random_exl2(plan, columns, seed=i)
        if same_order:
            tensors["q_invperm"] = np.arange(512, dtype=np.int32)[::-1].copy()
        added = np.random.default_rng(i).normal(size=columns).astype(np.float16) if bias else np.zeros(columns, "f2")
        (tmp_path / str(i)).mkdir()
        linears.append(save_linear(tmp_path / str(i), {**tensors, "bias": added}, dense.shape, QuantConfig()))
        denses.append(exact_weight(linears[-1]))
        biases.append(added)
    weight = tile(linears, DEVICE)
    assert isinstance(weight, TiledWeight if same_order else SideBySide)
    check(weight, np.concatenate(denses, 1), np.concatenate(biases).astype(np.float64))


@pytest.mark.parametrize("columns", [100, 128])
def test_a_head_is_cut_to_the_vocabulary(columns: int, tmp_path: Path) -> None:
    linear, dense = make_exl2(tmp_path, [(6, 128)] * 2, 128)
    weight = tile([linear], DEVICE, columns)
    assert weight is not None
    check(weight, dense[:, :columns])


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_reconstruction_is_exact(plan: list[tuple[int, int]], tmp_path: Path) -> None:
    linear, _ = make_exl2(tmp_path, plan, 96, seed=7)
    dense = dequantize(linear)
    matrix = tile_one(linear, DEVICE)
    assert matrix is not None
    halves = [reconstruct(matrix, 0, 64), reconstruct(matrix, 64, 96)]
    np.testing.assert_array_equal(torch.cat(halves, 1).cpu().numpy().view("u2"), dense.view("u2"))


@pytest.mark.parametrize("make", [torch.half, torch.float32, torch.bfloat16], ids=str)
def test_x_of_any_float_dtype_is_rounded_to_float16(make: torch.dtype, tmp_path: Path) -> None:
    linear, _ = make_exl2(tmp_path, [(4, 128)] * 4, 64)
    weight = tile([linear], DEVICE)
    assert weight is not None
    x = torch.randn(3, 512, device=DEVICE).to(make)
    assert torch.equal(weight(x), weight(x.half()))


def test_activations_from_tiny_to_huge(tmp_path: Path) -> None:
    linear, dense = make_exl2(tmp_path, [(4, 128)] * 4, 64)
    weight = tile([linear], DEVICE)
    assert weight is not None
    for size in (1e-5, 1e-3, 1.0, 1e4):
        x = (torch.randn(2, 512) * size).half()
        assert_close(weight(x.to(DEVICE)), x, dense)


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_a_hundred_repeats_are_bit_equal(rows: int, tmp_path: Path) -> None:
    linear, _ = make_exl2(tmp_path, [(5, 128), *[(4, 128)] * 15], 512)
    weight = tile([linear], DEVICE)
    assert weight is not None
    x = torch.randn(rows, 2048, device=DEVICE).half()
    first = weight(x)
    assert all(torch.equal(weight(x), first) for _ in range(100))


def test_a_captured_graph_computes_on_what_x_holds_at_replay(tmp_path: Path) -> None:
    linear, dense = make_exl2(tmp_path, [(4, 128)] * 16, 512)
    weight = tile([linear], DEVICE)
    assert weight is not None
    x = torch.randn(1, 2048, device=DEVICE).half()
    weight(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = weight(x)
    for _ in range(3):
        x.copy_(torch.randn(1, 2048))
        graph.replay()
        assert_close(y, x.cpu(), dense)
