"""Attention over the cache (rope_cache.cu, attention.cu) against the reference in float32, over the same numbers."""

from dataclasses import dataclass

import pytest
import torch

from exl2chat.ops import Heads, reference
from exl2chat.ops.cuda import CudaOps
from exl2chat.ops.packed import Norm, Plain, pack_norm
from exl2chat.ops.tiled import TiledWeight, arrange
from exl2chat.ops.tiles import fragment_order

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
PAGE = 256
NEXT = Plain(torch.empty(0), None)  # a matrix that takes rows as they are
SHAPES = {(32, 8, 128): "llama-8b", (32, 8, 64): "llama-1b", (9, 3, 64): "smollm2", (8, 4, 256): "gemma2",
          (32, 32, 80): "phi2", (32, 32, 96): "phi3", (20, 1, 128): "multi-query", (4, 2, 16): "tiny"}  # fmt: skip


@dataclass
class Memory:
    """A Store of one layer."""

    storage: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    position: torch.Tensor
    length: int


@pytest.fixture(scope="module")
def ops() -> CudaOps:
    return CudaOps(CUDA)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=CUDA)


def memory(shape: tuple[int, int, int], length: int, room: int, rotary: int) -> Memory:
    """`length` random tokens of values up to 3; what lies behind them is poison."""
    _, groups, size = shape
    storage = torch.full((1, 2, groups, room // PAGE, PAGE, size), float("nan"), dtype=torch.float16, device=CUDA)
    storage.flatten(3, 4)[:, :, :, :length] = random(1, 2, groups, length, size).clamp(-3, 3)
    angles = torch.rand(room, rotary // 2, device=CUDA) * 6
    cos, sin = angles.cos(), angles.sin()
    position = torch.tensor([length], dtype=torch.int32, device=CUDA)
    tables = torch.stack((cos, cos), 1).unsqueeze(1), torch.stack((-sin, sin), 1).unsqueeze(1)
    return Memory(storage, *tables, position, length)


def check(ops: CudaOps, shape: tuple[int, int, int], count: int, length: int, **options: object) -> None:
    window, cap, with_norm, rotary = (options.get(name) for name in ("window", "cap", "norm", "rotary"))
    queries, groups, size = shape
    heads = Heads(queries, groups, size, size**-0.5, cap)  # type: ignore[arg-type]
    room = (length + count + PAGE - 1) // PAGE * PAGE
    ours = memory(shape, length, room, rotary or size)  # type: ignore[arg-type]
    theirs = Memory(ours.storage.float(), ours.cos, ours.sin, ours.position, length)
    norm: Norm | None = pack_norm(random(queries + groups, size), 1e-6, CUDA) if with_norm else None
    qkv = random(count, (queries + 2 * groups) * size).half()
    (attend,) = ops.attends(ours, count, heads, [window])  # type: ignore[list-item]
    (expect,) = reference.attends(theirs, count, heads, [window])  # type: ignore[list-item]
    out, expected = attend(qkv, norm, NEXT), expect(qkv.float(), norm, NEXT)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=4e-3)
    total = length + count
    written, right = (m.storage.flatten(3, 4)[0, :, :, length:total].float() for m in (ours, theirs))
    torch.testing.assert_close(written, right, rtol=1e-3, atol=1e-3)
    assert ours.storage.flatten(3, 4)[0, :, :, total:].isnan().all()


@pytest.mark.parametrize("length", [0, 1, 15, 63, 64, 255, 300, 1000, 4095])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=SHAPES.get)
def test_attention_over_lengths_and_rows(ops: CudaOps, shape: tuple[int, int, int], count: int, length: int) -> None:
    check(ops, shape, count, length)


@pytest.mark.parametrize("window", [1, 7, 64, 500])
@pytest.mark.parametrize("cap", [None, 20.0])
@pytest.mark.parametrize("count", [1, 5, 16, 40])
def test_windows_and_caps(ops: CudaOps, count: int, cap: float | None, window: int) -> None:
    for length in (0, 3, 70, 900):
        check(ops, (8, 4, 128), count, length, window=window, cap=cap)


@pytest.mark.parametrize("count", [1, 4, 33])
def test_head_norms_and_partial_rotation(ops: CudaOps, count: int) -> None:
    check(ops, (8, 4, 128), count, 77, norm=True)
    check(ops, (8, 4, 128), count, 77, rotary=64)


@pytest.mark.parametrize("length", [0, 100, 1000])
def test_a_prompt_goes_through_torch(ops: CudaOps, length: int) -> None:
    check(ops, (32, 8, 128), 200, length)


def test_long_contexts(ops: CudaOps) -> None:
    check(ops, (32, 8, 128), 1, 40000)
    check(ops, (32, 8, 128), 5, 40000)


def test_attention_gives_the_same_bits_at_every_call(ops: CudaOps) -> None:
    shape = (32, 8, 128)
    store = memory(shape, 3000, 3072, 128)
    qkv = random(3, 48 * 128).half()
    (attend,) = ops.attends(store, 3, Heads(*shape, 0.09, None), [None])
    first = attend(qkv, None, NEXT)
    assert all(torch.equal(attend(qkv, None, NEXT), first) for _ in range(100))


def test_partial_sums_of_queries_keys_and_values_are_added(ops: CudaOps) -> None:
    shape = (8, 4, 128)
    stores = [memory(shape, 60, 256, 128) for _ in range(2)]
    stores[1].storage, stores[1].cos, stores[1].sin = stores[0].storage.clone(), stores[0].cos, stores[0].sin
    parts = random(4, 3, 16 * 128)
    outs = []
    for store, qkv in zip(stores, (parts, parts.sum(0)), strict=True):
        (attend,) = ops.attends(store, 3, Heads(*shape, 0.09, None), [None])
        outs.append(attend(qkv, None, NEXT))
    torch.testing.assert_close(outs[0].float(), outs[1].float(), rtol=0, atol=2e-3)


@pytest.mark.parametrize(("rows", "length"), [(1, 0), (3, 100), (8, 900)])
def test_the_result_arrives_in_the_form_of_the_next_matrix(ops: CudaOps, rows: int, length: int) -> None:
    tiles = TiledWeight((), fragment_order(torch.randperm(256, device=CUDA)), {8: None}, 0)  # type: ignore[dict-item]
    store = memory((4, 2, 64), length, 1024, 64)
    qkv = random(rows, 8 * 64).half()
    (attend,) = ops.attends(store, rows, Heads(4, 2, 64, 0.1, None), [None])
    assert torch.equal(attend(qkv, None, tiles), arrange(attend(qkv, None, NEXT), tiles.order))
