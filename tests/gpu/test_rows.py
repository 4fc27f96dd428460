"""The kernels of rows (norm.cu, gate.cu) against the reference ops."""

import pytest
import torch

from exl2chat.ops import reference
from exl2chat.ops.cuda import CudaOps
from exl2chat.ops.kernel_benchmark import random_weight
from exl2chat.ops.packed import Plain, pack_norm
from exl2chat.ops.tiled import arrange

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
ROWS = (1, 2, 5, 16, 300)
SIZES = (4, 48, 256, 576, 2560, 4096, 8192, 16384)
NEXT = Plain(torch.empty(0), None)  # a matrix that takes rows as they are
HALF = 1e-3  # the last bit of a float16, doubled


@pytest.fixture(scope="module")
def ops() -> CudaOps:
    return CudaOps(CUDA)


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape, device=CUDA) * scale).to(dtype)


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours.float(), expected.float(), rtol=HALF, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_embed(ops: CudaOps, size: int, dtype: torch.dtype) -> None:
    table, tokens = random(50, size, dtype=dtype), torch.randint(50, (7,), device=CUDA)
    assert torch.equal(ops.embed(tokens, table, 1.0), reference.embed(tokens, table, 1.0))
    torch.testing.assert_close(ops.embed(tokens, table, 3.7), reference.embed(tokens, table, 3.7))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_norm(ops: CudaOps, rows: int, size: int) -> None:
    x, norm = random(rows, size, scale=30), pack_norm(random(size), 1e-5, CUDA)
    close(ops.norm(x, norm, NEXT), reference.norm(x, norm, NEXT))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sandwich", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", ROWS)
def test_add_norm(ops: CudaOps, rows: int, size: int, sandwich: bool, dtype: torch.dtype) -> None:
    x, out = random(rows, size, scale=30), random(rows, size, scale=5, dtype=dtype)
    post = pack_norm(random(size), 1e-6, CUDA) if sandwich else None
    norm = pack_norm(random(size), 1e-5, CUDA)
    ours, theirs = x.clone(), x.clone()
    y, expected = ops.add_norm(ours, out, post, norm, NEXT), reference.add_norm(theirs, out, post, norm, NEXT)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    close(y, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("inner", [4, 80, 1536, 14336])
@pytest.mark.parametrize("rows", ROWS)
def test_gate(ops: CudaOps, rows: int, inner: int, activation: str, dtype: torch.dtype) -> None:
    x = random(rows, 2 * inner, scale=4, dtype=dtype)
    close(ops.gate(x, activation, NEXT), reference.gate(x.float(), activation, NEXT))


@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_logits(ops: CudaOps, dtype: torch.dtype, cap: float | None) -> None:
    out = random(3, 1021, scale=40, dtype=dtype)
    torch.testing.assert_close(ops.logits(out, cap), reference.logits(out, cap), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_partial_sums_are_added(ops: CudaOps, parts: int, rows: int) -> None:
    out, norm = random(parts, rows, 512), pack_norm(random(512), 1e-5, CUDA)
    x = random(rows, 512)
    expected = reference.add_norm(x.clone(), out.sum(0), norm, norm, NEXT)
    close(ops.add_norm(x, out, norm, norm, NEXT), expected)
    close(ops.gate(out, "silu", NEXT), reference.gate(out.sum(0), "silu", NEXT))
    close(ops.logits(out, 30.0), reference.logits(out.sum(0), 30.0))


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_activations_arrive_in_the_form_of_the_next_matrix(ops: CudaOps, rows: int) -> None:
    """As `arrange` would put them."""
    tiles = random_weight(256, (96,), [(4, 1.0)], CUDA)
    x, norm = random(rows, 256), pack_norm(random(256), 1e-5, CUDA)
    assert torch.equal(ops.norm(x, norm, tiles), arrange(ops.norm(x, norm, NEXT), tiles.order))
    y = ops.add_norm(x.clone(), x, None, norm, tiles)
    assert torch.equal(y, arrange(ops.add_norm(x.clone(), x, None, norm, NEXT), tiles.order))
    wide = random(rows, 512)
    assert torch.equal(ops.gate(wide, "silu", tiles), arrange(ops.gate(wide, "silu", NEXT), tiles.order))


def test_rows_give_the_same_bits_at_every_call(ops: CudaOps) -> None:
    x, out, norm = random(5, 4096), random(5, 4096), pack_norm(random(4096), 1e-5, CUDA)
    first = ops.add_norm(x.clone(), out, norm, norm, NEXT)
    assert all(torch.equal(ops.add_norm(x.clone(), out, norm, norm, NEXT), first) for _ in range(100))
