"""Attention of several sequences, whose pages lie anywhere, against each of them alone with its pages in order: the
same bits."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice

import pytest
import torch

from exl2chat.ops import Heads
from exl2chat.ops.cuda import CudaOps
from exl2chat.ops.kernel_benchmark import random_weight
from exl2chat.ops.tiled import arrange
from tests.gpu.attention_cases import (
    BITS,
    CUDA,
    NEXT,
    PAGE,
    POISON,
    Memory,
    Shape,
    attend,
    make_room,
    memory,
    random,
    ready,
)

pytestmark = pytest.mark.gpu
SHAPE: Shape = (8, 2, 128)
OTHERS: list[Shape] = [(32, 8, 128), (9, 3, 64), (8, 4, 256), (6, 6, 80)]
LENGTHS = (0, 255, 700, 5000, 16, 511, 1024, 9000)
NOWHERE = 1 << 20  # a page that there is not
COUNTS = (1, 2, 5, 16)


@pytest.fixture(scope="module")
def ops() -> CudaOps:
    alone = [([SHAPE], (*COUNTS, 40), BITS, 1), (OTHERS, (1, 2), BITS, 1)]
    return ready([*alone, ([SHAPE], COUNTS, BITS, 32), (OTHERS, (1, 2), BITS, 4)])


def stores_of(shape: Shape, lengths: Sequence[int], count: int, bits: int) -> list[Memory]:
    """A sequence of each length with room for `count` tokens more, all turned by the same angles."""
    torch.manual_seed(1)
    longest = max(lengths)
    angles = memory(shape, longest, make_room(longest + count), bits)
    stores = (memory(shape, length, make_room(length + count), bits) for length in lengths)
    return [replace(store, cos=angles.cos, sin=angles.sin) for store in stores]


def scatter(stores: Sequence[Memory], spare: int = 5) -> Memory:
    """All of them in one pool, in no order; the pages of nobody are poison."""
    counts = [store.storage.shape[3] for store in stores]
    places = torch.randperm(sum(counts) + spare, device=CUDA)
    first = stores[0].storage
    pool = torch.full_like(first.view(torch.uint8)[:, :, :, :1].expand(-1, -1, -1, len(places), -1, -1), POISON)
    pool = pool.contiguous().view(first.dtype)
    pages = torch.full((len(stores), max(counts) + 2), NOWHERE, dtype=torch.int32, device=CUDA)
    for i, (store, own) in enumerate(zip(stores, places[spare:].split(counts), strict=True)):
        pages[i, : len(own)] = own
        pool[:, :, :, own] = store.storage
    position = torch.cat([store.position for store in stores])
    return replace(stores[0], storage=pool, position=position, pages=pages)


def gather(pool: Memory, sequence: int, count: int) -> torch.Tensor:
    """The bytes of the first `count` pages of a sequence."""
    assert pool.pages is not None
    return pool.storage[:, :, :, pool.pages[sequence, :count].long()].view(torch.uint8)


def check(ops: CudaOps, shape: Shape, lengths: Sequence[int], count: int, bits: int, window: int | None = None,
          cap: float | None = None) -> None:  # fmt: skip
    heads = Heads(*shape, 0.09, cap)
    stores = stores_of(shape, lengths, count, bits)
    pool = scatter(stores)
    qkv = random(len(lengths) * count, (shape[0] + 2 * shape[1]) * shape[2]).half()
    out = attend(ops, pool, count, heads, qkv, window)
    for i, (store, rows) in enumerate(zip(stores, qkv.split(count), strict=True)):
        assert torch.equal(attend(ops, store, count, heads, rows, window), out[i * count : (i + 1) * count])
        assert torch.equal(gather(pool, i, store.storage.shape[3]), store.storage.view(torch.uint8))
    assert pool.pages is not None
    free = torch.ones(pool.storage.shape[3], dtype=torch.bool, device=CUDA)
    free[pool.pages[pool.pages != NOWHERE].long()] = False
    assert (pool.storage[:, :, :, free].view(torch.uint8) == POISON).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("sequences", [1, 3, 8, 32])
def test_each_sequence_of_a_batch_is_as_it_is_alone(ops: CudaOps, sequences: int, count: int, bits: int) -> None:
    check(ops, SHAPE, list(islice(cycle(LENGTHS), sequences)), count, bits)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", OTHERS, ids=str)
def test_shapes(ops: CudaOps, shape: Shape, bits: int) -> None:
    check(ops, shape, (300, 0, 2000, 256), 1, bits)
    check(ops, shape, (300, 0, 2000, 256), 2, bits)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("window", "cap"), [(7, None), (700, None), (4096, 20.0), (None, 20.0)])
def test_windows_and_caps(ops: CudaOps, window: int | None, cap: float | None, bits: int) -> None:
    check(ops, SHAPE, LENGTHS, 1, bits, window, cap)
    check(ops, SHAPE, LENGTHS, 5, bits, window, cap)


@pytest.mark.parametrize("bits", BITS)
def test_a_context_of_more_pages_than_a_warp_looks_up_at_once(ops: CudaOps, bits: int) -> None:
    """32 pages of each of 16 blocks of a group are 131072 tokens."""
    check(ops, (32, 8, 64), (32 * 16 * PAGE + 777, 100), 1, bits)


@pytest.mark.parametrize("bits", BITS)
def test_a_sequence_of_a_batch_goes_on(ops: CudaOps, bits: int) -> None:
    """Steps of one token, over what the steps before have written."""
    heads = Heads(*SHAPE, 0.09, None)
    stores = stores_of(SHAPE, (250, 3, 600), 20, bits)
    pool = scatter(stores)
    for _ in range(20):
        qkv = random(3, (SHAPE[0] + 2 * SHAPE[1]) * SHAPE[2]).half()
        out = attend(ops, pool, 1, heads, qkv)
        alone = [attend(ops, store, 1, heads, qkv[i : i + 1]) for i, store in enumerate(stores)]
        assert torch.equal(out, torch.cat(alone))
        for store in (pool, *stores):
            store.position += 1


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("length", [0, 200, 1000])
def test_prompts(ops: CudaOps, length: int, bits: int) -> None:
    check(ops, SHAPE, [length], 40, bits)
    check(ops, SHAPE, [length], 300, bits, 500)


def test_the_result_arrives_in_the_form_of_the_next_matrix(ops: CudaOps) -> None:
    shape: Shape = (4, 2, 64)
    tiles = random_weight(256, (96,), [(4, 1.0)], CUDA)
    pool = scatter(stores_of(shape, (3, 900, 260), 2, 16))
    qkv = random(6, 8 * 64).half()
    (layer,) = ops.attends(pool, 2, Heads(*shape, 0.1, None), [None])
    assert torch.equal(layer(qkv, None, tiles), arrange(layer(qkv, None, NEXT), tiles.order))
