"""Plans of the fused product: every quad of K in one part, in order, whatever the shape; all of it within the GPU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl2chat.ops.gemm import HEIGHTS, LEAST_STAGES, choose_parts, cut, make_gemm, slot_bytes
from exl2chat.ops.plan import MATRIX, MAX_MATRICES, MAX_PIECES, Gpu, Size
from exl2chat.ops.tiles import find_runs

H200 = Gpu(132, 232_448)
GPUS = {"H200": H200, "RTX 4090": Gpu(128, 101_376), "RTX 3090": Gpu(82, 101_376)}


@st.composite
def sizes(draw: st.DrawFn) -> Size:
    widths = draw(st.lists(st.sampled_from([8, 6, 5, 4, 3, 2]), min_size=1, max_size=6, unique=True))
    bits = [width for width in widths for _ in range(draw(st.integers(1, 60)))]
    groups = [tile // draw(st.sampled_from([1, 2, 4])) for tile in range(len(bits))]
    return Size(
        find_runs(bits, sorted(groups), True), draw(st.integers(1, 700)), len(bits), draw(st.sampled_from([8, 32]))
    )


@given(sizes(), st.integers(1, 8))
def test_parts_hold_every_quad_once_and_in_order(size: Size, parts: int) -> None:
    wanted, weights, scales = [], 0, 0
    for run in size.runs:
        for quad in range(run.quads):
            first = (weights + quad * run.bits * 32, scales + quad * size.scale_words * 4 // run.span)
            wanted.append((*first, run.tile + 4 * quad, run.quads, run.bits, run.span))
        weights += size.strips * run.quads * run.bits * 32
        scales += size.strips * run.quads * size.scale_words * 4 // run.span
    held = []
    for part in cut(size, parts):
        busy = part[part["quads"] > 0]
        assert (part["quads"][len(busy) :] == 0).all()
        for first, scale, tile, quads, stride, bits, span, *_ in busy.tolist():
            steps = [(i * bits * 32, i * size.scale_words * 4 // span, 4 * i) for i in range(quads)]
            held += [(first + w, scale + s, tile + t, stride, bits, span) for w, s, t in steps]
    assert held == wanted


@given(sizes(), st.sampled_from(list(GPUS.values())))
def test_launches_fit_the_gpu(size: Size, gpu: Gpu) -> None:
    gemm = make_gemm([size] * MAX_MATRICES, np.zeros(MAX_MATRICES, MATRIX), gpu)
    assert gemm is not None
    assert gemm.column_tiles * gemm.warps >= MAX_MATRICES * size.strips
    for height in HEIGHTS:
        stages = gemm.stages(height)
        assert stages == 0 or LEAST_STAGES * gemm.slot(height) <= stages * gemm.slot(height) <= gpu.shared
    assert gemm.most_rows >= 4 * HEIGHTS[0]
    for split in gemm.splits:
        assert split.parts * len(size.runs) <= MAX_PIECES
        begins = split.matrices["begin"].tolist()
        assert [b - a for a, b in zip(begins, [*begins[1:], gemm.column_tiles], strict=True)] == [begins[1]] * 3


@pytest.mark.parametrize(("tiles", "quads", "parts"), [(24, 32, 5), (16, 32, 8), (112, 32, 1), (16, 112, 8)])
def test_few_column_tiles_are_spread_over_an_h200(tiles: int, quads: int, parts: int) -> None:
    assert choose_parts(tiles, quads, 16, H200.processors) == parts


def test_a_gpu_that_holds_no_two_stages_beside_the_barriers_has_narrower_blocks_or_none() -> None:
    size = Size(find_runs([8] * 8, [tile // 4 for tile in range(8)], True), 64, 8, 32)
    records = np.zeros(MAX_MATRICES, MATRIX)
    for warps, narrower in ((8, 4), (4, None)):
        shared = LEAST_STAGES * slot_bytes(HEIGHTS[0], warps, 8, 32)
        gemm = make_gemm([size], records, Gpu(100, shared))
        assert (gemm and gemm.warps) == narrower
        assert gemm is None or gemm.most_rows > 0
