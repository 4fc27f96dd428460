"""Products of 17 and more rows with packed weights, decoded on the way to the tensor cores, against float64."""

from pathlib import Path

import numpy as np
import pytest
import torch

from exl2chat.engine.tiling import tile
from exl2chat.model.quant_config import QuantConfig
from exl2chat.ops import tiled
from exl2chat.ops.gemm import HEIGHTS
from exl2chat.ops.packed import Weight
from exl2chat.ops.tiled import SideBySide, TiledWeight
from tests.gpu.packed_cases import PLANS
from tests.model.model_files import random_exl2, random_gptq, save_linear

pytestmark = pytest.mark.usefixtures("poisoned")
DEVICE = torch.device("cuda")
COUNTS = (17, 33, 64, 65, 96, 128, 257)


def check(weight: Weight | None, dense: np.ndarray, bias: np.ndarray | float = 0) -> None:
    """x W + bias as float64 has it, with W as the format rounds it, to the rounding of float32 sums."""
    assert weight is not None
    exact = torch.from_numpy(dense.astype(np.float64)).to(DEVICE)
    for rows in COUNTS:
        x = torch.randn(rows, len(dense), device=DEVICE).half()
        truth = x.double() @ exact + torch.as_tensor(bias, device=DEVICE)
        y = weight(x)
        assert y.dtype == torch.float32
        assert y.shape == truth.shape
        error = (y.double() - truth).norm() / truth.norm()
        assert error < 1e-5, (rows, error)


def make_exl2(folder: Path, plan: list[tuple[int, int]], columns: int, seed: int = 0) -> tuple[TiledWeight, np.ndarray]:
    tensors, dense = random_exl2(plan, columns, seed)
    weight = tile([save_linear(folder, tensors, dense.shape, QuantConfig())], DEVICE)
    assert isinstance(weight, TiledWeight)
    return weight, dense


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_exl2(plan: list[tuple[int, int]], tmp_path: Path) -> None:
    check(*make_exl2(tmp_path, plan, 352, seed=len(plan)))


@pytest.mark.parametrize("size", [32, 64, 128, 160, 320])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits: int, size: int, tmp_path: Path) -> None:
    tensors, dense = random_gptq(bits, 320, 96, np.arange(320) // size, seed=bits)
    check(tile([save_linear(tmp_path, tensors, dense.shape, QuantConfig(group_size=size))], DEVICE), dense)


@pytest.mark.parametrize("columns", [16, 80])
def test_gptq_with_act_order_and_columns_that_fill_no_strip(columns: int, tmp_path: Path) -> None:
    group_of = np.random.default_rng(1).permutation(np.arange(512) // 64)
    tensors, dense = random_gptq(4, 512, columns, group_of, seed=1)
    check(tile([save_linear(tmp_path, tensors, dense.shape, QuantConfig())], DEVICE), dense)


@pytest.mark.parametrize("plan", [[(5, 128)] * 3 + [(4, 128)] * 29, [(8, 128)] * 4 + [(3, 64)] * 40], ids=len)
def test_many_parts_of_k(plan: list[tuple[int, int]], tmp_path: Path) -> None:
    weight, dense = make_exl2(tmp_path, plan, 1024)
    assert weight.gemm is not None
    assert weight.gemm.splits[0].parts > 4
    check(weight, dense)


@pytest.mark.parametrize("same_order", [True, False])
def test_projections_side_by_side(same_order: bool, tmp_path: Path) -> None:
    plans = [[(6, 128), *[(4, 128)] * 3], [(8, 64), *[(5, 64)] * 7], [(4, 128)] * 4]
    linears, denses, biases = [], [], []
    for i, (plan, columns) in enumerate(zip(plans, (288, 64, 32), strict=True)):
        tensors, dense = random_exl2(plan, columns, seed=i)
        if same_order:
            dense = dense[np.argsort(tensors["q_invperm"])][::-1]
            tensors["q_invperm"] = np.arange(512, dtype=np.int32)[::-1].copy()
        biases.append(np.random.default_rng(i).normal(size=columns).astype(np.float16))
        (tmp_path / str(i)).mkdir()
        linears.append(save_linear(tmp_path / str(i), {**tensors, "bias": biases[-1]}, dense.shape, QuantConfig()))
        denses.append(dense)
    weight = tile(linears, DEVICE)
    assert isinstance(weight, TiledWeight if same_order else SideBySide)
    check(weight, np.concatenate(denses, 1), np.concatenate(biases).astype(np.float64))


def test_a_row_does_not_depend_on_those_beside_it(tmp_path: Path) -> None:
    weight, dense = make_exl2(tmp_path, [(5, 128), *[(4, 128)] * 15], 512)
    x = torch.randn(max(HEIGHTS), len(dense), device=DEVICE).half()
    every = weight(x)
    for rows in (17, 32, 33, 64, 65, 127):
        assert torch.equal(weight(x[:rows].contiguous()), every[:rows]), rows
        assert torch.equal(weight(x[-rows:].contiguous()), every[-rows:]), rows


@pytest.mark.parametrize("rows", [17, 64, 128, 257])
def test_a_hundred_repeats_are_bit_equal(rows: int, tmp_path: Path) -> None:
    weight, dense = make_exl2(tmp_path, [(5, 128), *[(4, 128)] * 15], 512)
    x = torch.randn(rows, len(dense), device=DEVICE).half()
    first = weight(x)
    assert all(torch.equal(weight(x), first) for _ in range(100))


def test_arranged_activations_give_partial_sums(tmp_path: Path) -> None:
    weight, dense = make_exl2(tmp_path, [(4, 128)] * 16, 256)
    x = torch.randn(40, len(dense), device=DEVICE).half()
    places = weight.places_for(40)
    assert places is not None
    arranged = torch.zeros(len(dense) // 32, 40, 32, dtype=torch.float16, device=DEVICE)
    arranged[places.long() // 32, :, places.long() % 32] = x.T
    parts = weight(arranged.view(-1, 40, 4, 8))
    assert parts.dim() == 3
    assert torch.equal(tiled.add_up(parts), weight(x))


def test_a_captured_graph_computes_on_what_x_holds_at_replay(tmp_path: Path) -> None:
    weight, _ = make_exl2(tmp_path, [(4, 128)] * 16, 512)
    x = torch.randn(48, 2048, device=DEVICE).half()
    weight(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = weight(x)
    for _ in range(3):
        x.copy_(torch.randn(48, 2048))
        graph.replay()
        assert torch.equal(y, weight(x))


@pytest.mark.parametrize("make", [torch.half, torch.float32, torch.bfloat16], ids=str)
def test_x_of_any_float_dtype_is_rounded_to_float16(make: torch.dtype, tmp_path: Path) -> None:
    weight, _ = make_exl2(tmp_path, [(4, 128)] * 4, 64)
    x = torch.randn(20, 512, device=DEVICE).to(make)
    assert torch.equal(weight(x), weight(x.half()))
