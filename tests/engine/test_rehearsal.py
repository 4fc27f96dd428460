"""Which steps a load rehearses, so that no kernel is compiled in the middle of a reply. It needs no GPU."""

import numpy as np
import pytest
import torch

from exl2chat import kernels
from exl2chat.engine.transformer import GPU_PREFILL_CHUNK, REHEARSED, rehearsed
from exl2chat.ops.cuda_attention import MAX_ROWS, choose_shape
from exl2chat.ops.gemm import make_gemm
from exl2chat.ops.plan import MATRIX, MAX_MATRICES, Gpu, Size
from exl2chat.ops.tiled import SOME_ROWS
from exl2chat.ops.tiles import find_runs

HOPPER = Gpu(132, 227 << 10)
AMPERE = Gpu(84, 99 << 10)


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("share", range(1, 33))
def test_every_shape_of_attention_is_rehearsed(share: int, size: int) -> None:
    """`share`: queries per group of a token."""

    def shapes(counts: list[int]) -> set[int]:
        return {choose_shape(count * share, size, 16, HOPPER.shared).tiles for count in counts}

    assert shapes([count for count in REHEARSED if count <= MAX_ROWS]) == shapes(list(range(1, MAX_ROWS + 1)))


@pytest.mark.parametrize("gpu", [HOPPER, AMPERE])
def test_every_height_of_the_fused_product_is_rehearsed(gpu: Gpu) -> None:
    tiles = 128
    size = Size(find_runs([4] * tiles, [tile // 4 for tile in range(tiles)], repeat_last=True), 128, tiles, 8)
    gemm = make_gemm([size], np.zeros(MAX_MATRICES, MATRIX), gpu)
    assert gemm is not None
    most = min(SOME_ROWS, gemm.most_rows)

    def launched(counts: list[int]) -> set[kernels.Kernel]:
        with kernels.rehearsal() as noted:
            for rows in counts:
                gemm(torch.empty(tiles, rows, 4, 8, dtype=torch.float16), 32 * size.strips)
        return noted

    counts = [count for count in REHEARSED if MAX_ROWS < count <= most]
    assert launched(counts) == launched(list(range(MAX_ROWS + 1, most + 1)))


@pytest.mark.parametrize("capacity", [1, 256, 600, 1024, 2047, 2048, 8192])
def test_the_largest_step_that_there_is_room_for_is_rehearsed(capacity: int) -> None:
    assert rehearsed(capacity)[-1] == min(capacity, GPU_PREFILL_CHUNK)
