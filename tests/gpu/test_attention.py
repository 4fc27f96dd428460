"""Attention over the cache (rope_cache.cu, attention.cu) against the reference in float32, over the same numbers: a
cache in float16 beside one in float32, a quantised one beside its copy."""

from dataclasses import replace

import pytest
import torch

from exl2chat.ops import Heads, reference
from exl2chat.ops.attention import PLAIN_BITS
from exl2chat.ops.cache_format import CacheFormat
from exl2chat.ops.cuda import CudaOps
from exl2chat.ops.kernel_benchmark import random_weight
from exl2chat.ops.packed import Norm, pack_norm
from exl2chat.ops.tiled import arrange
from tests.gpu.attention_cases import (
    BITS,
    CUDA,
    NEXT,
    POISON,
    QUANTIZED,
    Memory,
    Shape,
    make_room,
    memory,
    random,
    ready,
)

pytestmark = pytest.mark.gpu
SHAPES = {(32, 8, 128): "llama-8b", (32, 8, 64): "llama-1b", (9, 3, 64): "smollm2", (8, 4, 256): "gemma2",
          (32, 32, 80): "phi2", (32, 32, 96): "phi3", (20, 1, 128): "multi-query", (4, 2, 16): "tiny"}  # fmt: skip
LLAMA, SMALL = (32, 8, 128), (8, 4, 128)
PACKED = (LLAMA, (9, 3, 64), (8, 4, 256), (6, 6, 80), (6, 6, 96), (4, 2, 16))


@pytest.fixture(scope="module")
def ops() -> CudaOps:
    counts = (1, 2, 3, 5, 8, 16)
    return ready(
        [(SHAPES, counts, (PLAIN_BITS,), 1), (PACKED, counts, QUANTIZED, 1), ((LLAMA, SMALL), (1, 4, 200), BITS, 1)]
    )


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(1)


def check(ops: CudaOps, shape: Shape, count: int, length: int, bits: int = PLAIN_BITS, **options: object) -> None:
    window, cap, with_norm, rotary = (options.get(name) for name in ("window", "cap", "norm", "rotary"))
    queries, groups, size = shape
    heads = Heads(queries, groups, size, size**-0.5, cap)  # type: ignore[arg-type]
    ours = memory(shape, length, make_room(length + count), bits, rotary)  # type: ignore[arg-type]
    theirs = replace(ours, storage=ours.storage.float() if bits == PLAIN_BITS else ours.storage.clone())
    norm: Norm | None = pack_norm(random(queries + groups, size), 1e-6, CUDA) if with_norm else None
    qkv = random(count, (queries + 2 * groups) * size).half()
    (attend,) = ops.attends(ours, count, heads, [window])  # type: ignore[list-item]
    (expect,) = reference.attends(theirs, count, heads, [window])  # type: ignore[list-item]
    out, expected = attend(qkv, norm, NEXT), expect(qkv.float(), norm, NEXT)
    assert out.dtype == torch.float16
    off = (out.float() - expected).abs()
    # a quantised key on the edge between two codes may fall to either side of it, which moves what few tokens come to
    assert (off > 4e-3).float().mean() <= (0 if bits == PLAIN_BITS else 3e-2)
    assert off.max() < 5e-2
    check_written(ours, theirs, size, length, length + count)


def check_written(ours: Memory, theirs: Memory, size: int, start: int, end: int) -> None:
    """Keys may differ by rounding, values not at all, and nothing else is written."""
    written, right = ours.rows(size, start, end), theirs.rows(size, start, end)
    if ours.bits == PLAIN_BITS:
        torch.testing.assert_close(written, right, rtol=1e-3, atol=1e-3)
        assert (ours.storage.view(torch.uint8).flatten(3, 4)[:, :, :, end:] == POISON).all()
        return
    # less than a step is a scale that was rounded the other way
    assert ((written[0] - right[0]).abs() > 4e-3).float().mean() < 3e-3
    form = CacheFormat(ours.bits, size)
    both = [store.tiles(form).clone() for store in (ours, theirs)]
    assert torch.equal(*(tiles.chunk(2)[1] for tiles in both))
    for tiles in both:
        form.write(tiles, start, torch.zeros(len(tiles), end - start, form.row_bytes, dtype=torch.uint8, device=CUDA))
    assert torch.equal(*both)


@pytest.mark.parametrize("length", [0, 1, 15, 63, 64, 255, 300, 1000, 4095])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=SHAPES.get)
def test_attention_over_lengths_and_rows(ops: CudaOps, shape: Shape, count: int, length: int) -> None:
    check(ops, shape, count, length)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 245, 255, 256, 1000, 4095])
@pytest.mark.parametrize("count", [1, 5, 16])
@pytest.mark.parametrize("shape", PACKED, ids=str)
@pytest.mark.parametrize("bits", QUANTIZED)
def test_quantised_caches(ops: CudaOps, bits: int, shape: Shape, count: int, length: int) -> None:
    check(ops, shape, count, length, bits)


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("bits", QUANTIZED)
def test_rows_that_cross_a_tile_of_a_quantised_cache(ops: CudaOps, bits: int, count: int) -> None:
    for length in range(250, 262):
        check(ops, LLAMA, count, length, bits)


@pytest.mark.parametrize("window", [1, 7, 64, 500])
@pytest.mark.parametrize("cap", [None, 20.0])
@pytest.mark.parametrize("count", [1, 5, 16, 40])
@pytest.mark.parametrize("bits", BITS)
def test_windows_and_caps(ops: CudaOps, bits: int, count: int, cap: float | None, window: int) -> None:
    for length in (0, 3, 70, 900):
        check(ops, SMALL, count, length, bits, window=window, cap=cap)


@pytest.mark.parametrize("bits", BITS)
def test_a_window_over_some_of_the_blocks(ops: CudaOps, bits: int) -> None:
    """More pages than blocks of a group, fewer in the window: the blocks that have one are not the first ones."""
    for length in (9000, 9210, 9216):
        check(ops, SMALL, 1, length, bits, window=600)
        check(ops, SMALL, 5, length, bits, window=2000)


@pytest.mark.parametrize("count", [1, 4, 33])
@pytest.mark.parametrize("bits", BITS)
def test_head_norms_and_partial_rotation(ops: CudaOps, bits: int, count: int) -> None:
    check(ops, SMALL, count, 77, bits, norm=True)
    check(ops, SMALL, count, 77, bits, rotary=64)


@pytest.mark.parametrize("length", [0, 100, 1000])
@pytest.mark.parametrize("bits", BITS)
def test_prompts(ops: CudaOps, bits: int, length: int) -> None:
    check(ops, LLAMA, 200, length, bits)


@pytest.mark.parametrize("bits", BITS)
def test_long_contexts(ops: CudaOps, bits: int) -> None:
    check(ops, LLAMA, 1, 40000, bits)
    check(ops, LLAMA, 5, 40000, bits)


@pytest.mark.parametrize("bits", BITS)
def test_attention_gives_the_same_bits_at_every_call(ops: CudaOps, bits: int) -> None:
    store = memory(LLAMA, 3000, 3072, bits)
    qkv = random(3, 48 * 128).half()
    (attend,) = ops.attends(store, 3, Heads(*LLAMA, 0.09, None), [None])
    first = attend(qkv, None, NEXT)
    assert all(torch.equal(attend(qkv, None, NEXT), first) for _ in range(100))


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("length", [0, 250, 2000, 9210])
@pytest.mark.parametrize("bits", BITS)
def test_a_row_does_not_depend_on_how_many_there_are(ops: CudaOps, bits: int, length: int, window: int | None) -> None:
    heads, most = Heads(*LLAMA, 0.09, None), 16
    store = memory(LLAMA, length, make_room(length + most), bits)
    qkv = random(most, 48 * 128).half()
    (attend,) = ops.attends(store, most, heads, [window])
    together = attend(qkv, None, NEXT)
    for count in (1, 2, 3, 4, 5, 8):
        for first in range(0, most - count + 1, count):
            store.length = length + first
            store.position.fill_(store.length)
            (attend,) = ops.attends(store, count, heads, [window])
            some = qkv[first : first + count].clone()  # the position must not come from the kernel just before
            assert torch.equal(attend(some, None, NEXT), together[first : first + count])


@pytest.mark.parametrize("bits", BITS)
def test_partial_sums_of_queries_keys_and_values_are_added(ops: CudaOps, bits: int) -> None:
    first = memory(SMALL, 60, 256, bits)
    stores = [first, replace(first, storage=first.storage.clone())]
    parts = random(6, 3, 16 * 128)
    outs = []
    for store, qkv in zip(stores, (parts, parts.sum(0)), strict=True):
        (attend,) = ops.attends(store, 3, Heads(*SMALL, 0.09, None), [None])
        outs.append(attend(qkv, None, NEXT))
    torch.testing.assert_close(outs[0].float(), outs[1].float(), rtol=0, atol=2e-3)


@pytest.mark.parametrize(("rows", "length"), [(1, 0), (3, 100), (8, 900), (40, 300)])
def test_the_result_arrives_in_the_form_of_the_next_matrix(ops: CudaOps, rows: int, length: int) -> None:
    tiles = random_weight(256, (96,), [(4, 1.0)], CUDA)
    store = memory((4, 2, 64), length, 1024)
    qkv = random(rows, 8 * 64).half()
    (attend,) = ops.attends(store, rows, Heads(4, 2, 64, 0.1, None), [None])
    order = tiles.order if rows <= tiles.most_rows else tiles.tile_order
    assert torch.equal(attend(qkv, None, tiles), arrange(attend(qkv, None, NEXT), order))
