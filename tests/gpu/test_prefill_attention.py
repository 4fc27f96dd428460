"""Attention of prompts (prefill_attention.cu) against attention written down in float64, over the same numbers."""

import math

import pytest
import torch
from torch import Tensor

from exl2chat.ops import Heads
from exl2chat.ops.cache_format import CacheFormat, rotate
from exl2chat.ops.cuda_prefill import prefill_attention

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
Shape = tuple[int, int, int]
SHAPES = {(32, 8, 128): "llama-8b", (9, 3, 64): "smollm2", (8, 4, 256): "gemma2", (4, 4, 80): "phi2",
          (4, 4, 96): "phi3", (20, 1, 128): "multi-query", (14, 2, 64): "qwen2-0.5b", (4, 2, 16): "tiny"}  # fmt: skip
SMALL: Shape = (8, 2, 128)


def make(shape: Shape, count: int, start: int, cap: float | None = None) -> tuple[Tensor, Tensor, Heads]:
    """Queries, keys and values float16 [2, G, start + count, D], and the heads. Scores reach about 20."""
    queries, groups, size = shape
    q, seen = (
        torch.randn(*sizes, device=CUDA).half() for sizes in ((count, queries, size), (2, groups, start + count, size))
    )
    return q, seen, Heads(queries, groups, size, 4 * size**-0.5, cap)


def exact(q: Tensor, seen: Tensor, heads: Heads, window: int | None) -> Tensor:
    """float64 [T, H * D]."""
    count, total = len(q), seen.shape[2]
    keys, values = seen.double().repeat_interleave(heads.queries // heads.groups, 1)
    scores = q.double().transpose(0, 1) @ keys.transpose(1, 2) * heads.scale
    if heads.cap is not None:
        scores = heads.cap * torch.tanh(scores / heads.cap)
    behind = torch.arange(total - count, total, device=CUDA).unsqueeze(1) - torch.arange(total, device=CUDA)
    hidden = (behind < 0) | (behind >= (window or total))
    weights = scores.masked_fill_(hidden, -math.inf).softmax(-1)
    out: Tensor = weights @ values
    return out.transpose(0, 1).reshape(count, -1)


def with_poison(seen: Tensor) -> Tensor:
    """A layer that holds these tokens, with NaN (all bits set) behind them, to a whole number of pages and one more."""
    room = (seen.shape[2] // 256 + 2) * 256
    layer = torch.full((*seen.shape[:2], room, seen.shape[3]), 255, dtype=torch.uint8, device=CUDA)
    layer = layer.repeat_interleave(seen.itemsize, -1).view(seen.dtype)
    layer[:, :, : seen.shape[2]] = seen
    return layer


def poison_free_memory() -> None:
    """What is allocated next, results and work space, holds NaN."""
    torch.full((1 << 24,), math.nan, device=CUDA)


def compare(out: Tensor, expected: Tensor) -> None:
    assert out.dtype == torch.float16
    assert out.shape == expected.shape
    assert (out - expected).abs().max() < 8e-3
    assert (out - expected).norm() < 5e-4 * expected.norm()


def check(shape: Shape, count: int, start: int, window: int | None = None, cap: float | None = None) -> None:
    q, seen, heads = make(shape, count, start, cap)
    expected = exact(q, seen, heads, window)
    poison_free_memory()
    compare(prefill_attention(q, with_poison(seen), start, heads, window), expected)


@pytest.mark.parametrize("start", [0, 1, 255, 256, 1000])
@pytest.mark.parametrize("count", [17, 33, 64, 65, 257])
@pytest.mark.parametrize("shape", SHAPES, ids=SHAPES.get)
def test_chunks(shape: Shape, count: int, start: int) -> None:
    check(shape, count, start)


@pytest.mark.parametrize("start", [0, 1000])
@pytest.mark.parametrize("shape", [SMALL, (4, 2, 64), (4, 2, 256), (4, 4, 80)])
def test_large_chunks(shape: Shape, start: int) -> None:
    check(shape, 2047, start)


@pytest.mark.parametrize("window", [1, 40, 64, 300, 5000])
@pytest.mark.parametrize("cap", [None, 15.0])
@pytest.mark.parametrize(("count", "start"), [(17, 0), (65, 255), (257, 1000), (20, 9000)])
def test_windows_and_caps(count: int, start: int, cap: float | None, window: int) -> None:
    check(SMALL, count, start, window, cap)


@pytest.mark.parametrize("shape", [(32, 8, 128), (20, 1, 128), (9, 3, 64)])
def test_few_queries_over_a_long_context_are_shared_out(shape: Shape) -> None:
    check(shape, 17, 20000)
    check(shape, 100, 20000)


@pytest.mark.parametrize(
    ("shape", "bits"), [(SMALL, 4), (SMALL, 6), (SMALL, 8), ((4, 4, 80), 8), ((4, 2, 256), 4), ((9, 3, 64), 6)]
)
@pytest.mark.parametrize(
    ("count", "start", "window", "cap"),
    [(17, 0, None, None), (300, 250, None, None), (300, 1000, 400, None), (33, 3000, None, 15.0), (33, 700, 90, None)],
)
def test_quantised_caches(
    shape: Shape, bits: int, count: int, start: int, window: int | None, cap: float | None
) -> None:
    """As they are for few queries, and for many from a copy in float16."""
    q, seen, heads = make(shape, count, start, cap)
    cache = CacheFormat(bits, heads.size)
    rows = cache.quantize(rotate(seen.float()))
    turned = rotate(q.float()).half()
    expected = exact(rotate(turned.float()), rotate(cache.dequantize(rows).float()), heads, window)
    poison_free_memory()
    layer = into_tiles(with_poison(rows), cache)
    compare(prefill_attention(turned, layer, start, heads, window, bits), expected)


def into_tiles(rows: Tensor, cache: CacheFormat) -> Tensor:
    """Rows [2, G, S, bytes] as a cache holds them."""
    groups = torch.unflatten(rows, 2, (-1, 16)).flatten(3)
    tiles = torch.empty_like(groups)
    tiles[..., cache.places(rows.device).flatten()] = groups
    return tiles.view(rows.shape)


@pytest.mark.parametrize(("count", "start", "window"), [(2048, 777, None), (40, 9000, None), (300, 2000, 500)])
def test_the_same_bits_at_every_call(count: int, start: int, window: int | None) -> None:
    q, seen, heads = make((32, 8, 128), count, start)
    layer = with_poison(seen)
    first = prefill_attention(q, layer, start, heads, window)
    assert all(torch.equal(prefill_attention(q, layer, start, heads, window), first) for _ in range(20))


@pytest.mark.parametrize("cut", [999, 1024, 2030])
def test_chunks_do_not_show(cut: int) -> None:
    """With blocks for every multiprocessor, which `count_parts` does not cut, a prompt in two chunks is the same."""
    q, seen, heads = make((128, 32, 64), 2048, 100)
    layer = with_poison(seen)
    whole = prefill_attention(q, layer, 100, heads, 1500)
    assert torch.equal(prefill_attention(q[:cut], layer, 100, heads, 1500), whole[:cut])
    if cut < 2000:
        assert torch.equal(prefill_attention(q[cut:], layer, 100 + cut, heads, 1500), whole[cut:])
