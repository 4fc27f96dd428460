"""What prefill_attention.cu is launched with, which needs no GPU."""

import pytest

from exl2chat.ops.cache_format import CacheFormat
from exl2chat.ops.cuda_prefill import MOST_KEYS, SHAPES, WGMMA_DIMS, WGMMA_SHAPE, count_parts

TURING, HOPPER = 64 << 10, 227 << 10  # bytes of shared memory of a block


@pytest.mark.parametrize("bits", [None, 4, 6, 8])
@pytest.mark.parametrize("size", range(16, 257, 16))
def test_every_head_fits_the_smallest_gpu(size: int, bits: int | None) -> None:
    shapes = SHAPES[min(largest for largest in SHAPES if largest >= size)]
    assert shapes[-1].shared(size, bits and CacheFormat(bits, size).row_bytes) <= TURING


@pytest.mark.parametrize("bits", [None, 4, 6, 8])
@pytest.mark.parametrize("size", WGMMA_DIMS)
def test_heads_fit_a_hopper_twice_where_registers_do(size: int, bits: int | None) -> None:
    most = HOPPER if size > 128 else HOPPER // 2
    assert WGMMA_SHAPE.shared(size, bits and CacheFormat(bits, size).row_bytes) <= most


def test_copies_begin_where_every_shape_begins() -> None:
    assert all(MOST_KEYS % shape.keys == 0 for shapes in (*SHAPES.values(), (WGMMA_SHAPE,)) for shape in shapes)


def test_few_blocks_share_a_long_context_out() -> None:
    assert count_parts(blocks=8, span=32768, processors=132) == 33
    assert count_parts(blocks=8, span=1000, processors=132) == 3
    assert count_parts(blocks=8, span=100, processors=132) == 1
    assert count_parts(blocks=132, span=32768, processors=132) == 1
