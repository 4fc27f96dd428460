"""Weights decoded bit for bit: against the golden files' truth, and against matrices packed with Python integers."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from exl2chat.model.checkpoint import open_checkpoint
from exl2chat.model.dequant import dequantize, unpack_columns, unpack_rows
from exl2chat.model.quant_config import QuantConfig
from tests.model.model_files import GOLDEN, pack, random_exl2, random_gptq, save_linear, weights_name

PLANS = {
    **{f"{bits} bits": [(bits, 32), (bits, 64)] for bits in (8, 6, 5, 4, 3, 2)},
    "all widths": [
        (8, 32),
        (8, 96),
        (6, 64),
        (6, 16),
        (5, 128),
        (5, 32),
        (4, 128),
        (4, 16),
        (3, 64),
        (2, 128),
        (2, 16),
    ],
    "short last group": [(4, 128), (4, 128), (4, 48)],
}


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype == np.float16
    np.testing.assert_array_equal(actual.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_golden_weights_are_exact(name: str) -> None:
    checkpoint = open_checkpoint(GOLDEN / name)
    linears = {linear.key: linear for layer in checkpoint.layers for linear in layer.linears}
    truth = {key: value for key, value in load_file(GOLDEN / name / "expected.safetensors").items() if "dequant" in key}
    if name == "llama-fp16":
        raw = load_file(GOLDEN / name / weights_name(name))
        truth = {f"dequant.{key}": raw[f"{key}.weight"].T for key in linears}
    assert len(truth) >= 3
    for key, weight in truth.items():
        assert_same_bits(dequantize(linears[key.removeprefix("dequant.")]), np.ascontiguousarray(weight))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_exl2_matches_the_format(plan: list[tuple[int, int]], tmp_path: Path) -> None:
    tensors, weight = random_exl2(plan, 64, seed=len(plan))
    linear = save_linear(tmp_path, tensors, weight.shape, QuantConfig())
    assert [(group.bits, group.row_end - group.row_start) for group in linear.groups] == plan
    assert_same_bits(dequantize(linear), weight)


def test_exl2_group_starts_are_unsigned(tmp_path: Path) -> None:
    rows = [4 * 40_000, 32]  # the second group starts at word 40,000, beyond a signed 16-bit number
    tensors = {
        "q_weight": np.zeros((sum(rows) // 4, 32), np.int32),
        "q_groups": np.array([8, 0, 8, 40_000], np.uint16).view(np.int16),
        "q_scale": np.zeros((2, 4), np.int32),
        "q_scale_max": np.array([256, 512], np.float16),
        "q_invperm": np.arange(sum(rows), dtype=np.int32),
    }
    linear = save_linear(tmp_path, tensors, (sum(rows), 32), QuantConfig())
    assert linear.groups[1].word_start == 40_000
    weight = dequantize(linear)
    assert (weight[: rows[0]] == -128).all()
    assert (weight[rows[0] :] == -256).all()


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("size", [32, 48, 64, 160], ids="groups of {}".format)
def test_gptq_matches_the_format(bits: int, size: int, v2: bool, tmp_path: Path) -> None:
    group_of = np.arange(160) // size  # 48 and 64 leave a short last group; 160 is one group for all
    tensors, weight = random_gptq(bits, 160, 64, group_of, seed=bits + size, v2=v2)
    linear = save_linear(tmp_path, tensors, weight.shape, QuantConfig(v2=v2))
    assert (linear.bits, linear.group_size, linear.act_order) == (bits, size, False)
    assert_same_bits(dequantize(linear), weight)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_act_order(bits: int, tmp_path: Path) -> None:
    group_of = np.random.default_rng(bits).permutation(np.arange(160) // 64)
    tensors, weight = random_gptq(bits, 160, 32, group_of, seed=bits)
    linear = save_linear(tmp_path, tensors, weight.shape, QuantConfig())
    assert linear.act_order
    assert_same_bits(dequantize(linear), weight)


@pytest.mark.parametrize(
    ("size", "stated"), [(32, 0), (48, 48), (64, 0), (160, 0), (40, 0)], ids=["32", "48", "64 short", "one", "40"]
)
@pytest.mark.parametrize("zeros", [False, True], ids=["absent", "all zero"])
def test_gptq_without_a_useful_g_idx(size: int, stated: int, zeros: bool, tmp_path: Path) -> None:
    tensors, weight = random_gptq(4, 160, 32, np.arange(160) // size, seed=size)
    tensors["g_idx"] *= 0
    if not zeros:
        del tensors["g_idx"]
    linear = save_linear(tmp_path, tensors, weight.shape, QuantConfig(group_size=stated))
    assert (linear.group_size, linear.act_order) == (size, False)
    assert_same_bits(dequantize(linear), weight)


def test_gptq_zero_point_of_sixteen_is_not_masked(tmp_path: Path) -> None:
    tensors, _ = random_gptq(4, 32, 32, np.zeros(32, int), seed=1)
    tensors["qzeros"] = np.full_like(tensors["qzeros"], -1)  # every stored zero point is 15, and so means 16
    tensors["qweight"] = np.zeros_like(tensors["qweight"])
    tensors["scales"] = np.ones_like(tensors["scales"])
    assert (dequantize(save_linear(tmp_path, tensors, (32, 32), QuantConfig())) == -16).all()


def test_bfloat16_and_float32_round_to_half(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    linear = save_linear(tmp_path, {"weight": weight}, (64, 32), QuantConfig())
    assert linear.bits == 32
    assert_same_bits(dequantize(linear), weight.T.astype(np.float16))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_unpacking_inverts_packing(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (96, 7))
    np.testing.assert_array_equal(unpack_rows(pack(codes, bits), bits), codes)
    np.testing.assert_array_equal(unpack_columns(pack(codes, bits).T, bits), codes.T)
