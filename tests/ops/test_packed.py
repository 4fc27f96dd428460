"""Every layout of a weight against the product in float64."""

import pytest
import torch

from exl2chat.ops.packed import FEW_ROWS, NIBBLE_GROUPS, Nibbles, pack, pack_nibbles

CPU = torch.device("cpu")
# A sum of K products, each rounded to the dtype's step: relative to the norm of the row and column.
STEP = {torch.float32: 2**-22, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def error(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> float:
    """The largest error of y = x W^T + bias relative to what the products could add up to."""
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    size = x.double().norm(dim=-1, keepdim=True) * weight.double().norm(dim=-1) + (0 if bias is None else bias.abs())
    return float(((y.double() - expected).abs() / size).max())


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("rows", [1, 2, FEW_ROWS, FEW_ROWS + 1, 33])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (7, 13), (1, 1), (160, 576)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_product_of_every_dtype(dtype: torch.dtype, rows: int, outputs: int, inputs: int, with_bias: bool) -> None:
    weight, x = random(outputs, inputs), random(rows, inputs, seed=1)
    bias = random(outputs, seed=2) if with_bias else None
    packed = pack(weight, bias, CPU, dtype)
    with torch.inference_mode():
        y = packed(x)
    assert y.shape == (rows, outputs)
    assert error(y, x, weight, bias) < STEP[dtype]
    assert packed.nbytes == outputs * inputs * dtype.itemsize


def test_float16_keeps_every_weight_and_sums_in_float32() -> None:
    """One 1 and 4095 times 2^-12: a float16 sum would stay at 1."""
    weight = torch.full((1, 4096), 2.0**-12)
    weight[0, 0] = 1
    for rows in (1, FEW_ROWS + 1):
        y = pack(weight, None, CPU, torch.float16)(torch.ones(rows, 4096))
        torch.testing.assert_close(y.float(), torch.full((rows, 1), 2.0 - 2**-12), rtol=2**-11, atol=0)


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("group_size", sorted(NIBBLE_GROUPS))
@pytest.mark.parametrize("shuffled", [False, True])
def test_nibbles_multiply_like_the_weights_they_stand_for(rows: int, group_size: int, shuffled: bool) -> None:
    inputs, outputs = 512, 48
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (inputs, outputs), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 17, (inputs // group_size, outputs), generator=generator).float()
    scales = random(inputs // group_size, outputs).abs() * 0.01
    order = torch.randperm(inputs, generator=generator) if shuffled else None
    bias = random(outputs, seed=2)
    group = torch.arange(inputs) // group_size
    decoded = (codes.float() - zeros[group]) * scales[group]
    weight = torch.empty_like(decoded)
    weight[order if order is not None else slice(None)] = decoded
    packed = pack_nibbles(codes, zeros, scales, order, bias)
    assert isinstance(packed, Nibbles)
    x = random(rows, inputs, seed=1)
    with torch.inference_mode():
        y = packed(x)
    assert error(y, x, weight.T, bias) < STEP[torch.bfloat16]
    assert packed.nbytes == inputs * outputs // 2 + scales.numel() * 2 * 2
