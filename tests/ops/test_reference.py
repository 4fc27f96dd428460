"""The reference ops against their formulas spelled out in float64 numpy, one row and head at a time."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import torch

from exl2chat.ops import reference, select
from exl2chat.ops.packed import Plain, pack_norm

CPU = torch.device("cpu")
NEXT = Plain(torch.empty(0), None)
Array = npt.NDArray[np.float64]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(ours: torch.Tensor, expected: Array, atol: float = 2e-6) -> None:
    np.testing.assert_allclose(ours.double().numpy(), expected, rtol=0, atol=atol)


def test_the_cpu_runs_the_reference() -> None:
    assert select(CPU, torch.float16, 64, 256, 512) is reference


@pytest.mark.parametrize("size", [1, 8, 577])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm(size: int, scale: float) -> None:
    x, weight = random(3, size) * scale, random(size, seed=1)
    rows = x.double().numpy()
    expected = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-5) * weight.double().numpy()
    close(reference.rms_norm(x, pack_norm(weight, 1e-5, CPU)), expected, 1e-5)


def test_rms_norm_of_zeros_is_zero() -> None:
    assert torch.equal(reference.rms_norm(torch.zeros(2, 8), pack_norm(torch.ones(8), 1e-6, CPU)), torch.zeros(2, 8))


def test_rms_norm_per_head_takes_a_weight_per_head() -> None:
    x, weight = random(2, 3, 8), random(3, 8, seed=1)
    heads = [reference.rms_norm(x[:, h], pack_norm(weight[h], 1e-5, CPU)) for h in range(3)]
    torch.testing.assert_close(reference.rms_norm(x, pack_norm(weight, 1e-5, CPU)), torch.stack(heads, 1))


@pytest.mark.parametrize("rotary", [8, 4, 2])
def test_rope_turns_pairs_half_a_rotary_dimension_apart(rotary: int) -> None:
    x = random(3, 2, 8)
    half = rotary // 2
    angles = random(3, half, seed=1).double().numpy()
    expected = x.double().numpy().copy()
    for t in range(3):
        for i in range(half):
            a, b = x[t, :, i].double().numpy(), x[t, :, i + half].double().numpy()
            c, s = math.cos(angles[t, i]), math.sin(angles[t, i])
            expected[t, :, i], expected[t, :, i + half] = a * c - b * s, b * c + a * s
    cos, sin = torch.from_numpy(np.cos(angles)).float(), torch.from_numpy(np.sin(angles)).float()
    reference.rope_(x, torch.stack((cos, cos), 1).unsqueeze(1), torch.stack((-sin, sin), 1).unsqueeze(1))
    close(x, expected)


def softmax_attention(
    q: Array, k: Array, v: Array, scale: float, window: int | None, cap: float | None
) -> Array:  # q [T, H, D], k and v [G, S, D]
    count, heads, _ = q.shape
    groups, total, _ = k.shape
    out = np.zeros_like(q)
    for t in range(count):
        own = total - count + t
        first = 0 if window is None else max(0, own - window + 1)
        for h in range(heads):
            g = h // (heads // groups)
            scores = k[g, first : own + 1] @ q[t, h] * scale
            if cap is not None:
                scores = cap * np.tanh(scores / cap)
            weights = np.exp(scores - scores.max())
            out[t, h] = weights / weights.sum() @ v[g, first : own + 1]
    return out.reshape(count, -1)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize(("count", "total"), [(1, 1), (1, 9), (5, 5), (5, 9), (9, 9)])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 3), (4, 1)])
def test_attention(heads: int, groups: int, count: int, total: int, window: int | None, cap: float | None) -> None:
    q, k, v = random(count, heads, 8) * 3, random(groups, total, 8, seed=1), random(groups, total, 8, seed=2)
    expected = softmax_attention(*(x.double().numpy() for x in (q, k, v)), 0.3, window, cap)
    mask = reference.visible(count, total, window, CPU)
    close(reference.attention(q, k.unsqueeze(0), v.unsqueeze(0), 0.3, mask, cap), expected)


def test_no_mask_where_causal_order_says_it_all() -> None:
    assert reference.visible(1, 9, None, CPU) is None
    assert reference.visible(9, 9, None, CPU) is None
    assert reference.visible(9, 9, 9, CPU) is None
    assert reference.visible(1, 9, 9, CPU) is None
    assert reference.visible(1, 9, 8, CPU) is not None


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate(activation: str) -> None:
    x = random(3, 10)
    gate, up = x[:, :5].double().numpy(), x[:, 5:].double().numpy()
    if activation == "silu":
        opened = gate / (1 + np.exp(-gate))
    else:
        opened = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    close(reference.gate(x, activation, NEXT), opened * up)


def test_softcap() -> None:
    x = random(4, 5) * 100
    close(reference.softcap(x, 30.0), 30 * np.tanh(x.double().numpy() / 30), 2e-5)
