"""Plans of the packed product: every quad of every strip is multiplied by exactly one warp, whatever the shape."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl2chat.ops.plan import MATRIX, MAX_MATRICES, MAX_PIECES, ROWS, WARPS, Gpu, Size, cut, make_plan, share_out
from exl2chat.ops.tiles import Run, find_runs

GPUS = {"H200": Gpu(132, 232_448), "RTX 3090": Gpu(82, 101_376), "RTX 2060": Gpu(30, 65_536)}
EIGHT_B = {"qkv": (4096, [4096, 1024, 1024]), "o": (4096, [4096]), "gate_up": (4096, [14336, 14336]),
           "down": (14336, [4096]), "head": (4096, [128256])}  # fmt: skip


def size_of(k: int, columns: int, split_at: int = 0) -> Size:
    bits = [5] * split_at + [4] * (k // 32 - split_at)
    runs = find_runs(bits, [tile // 4 for tile in range(k // 32)], True)
    return Size(runs, -(-columns // 32), k // 32, 8)


@st.composite
def sizes(draw: st.DrawFn) -> Size:
    widths = draw(st.lists(st.sampled_from([8, 6, 5, 4, 3, 2]), min_size=1, max_size=6, unique=True))
    tiles = [draw(st.integers(1, 60)) for _ in widths]
    bits = [width for width, count in zip(widths, tiles, strict=True) for _ in range(count)]
    groups = [tile // draw(st.sampled_from([1, 2, 3, 4])) for tile in range(len(bits))]
    return Size(find_runs(bits, sorted(groups), True), draw(st.integers(1, 700)), len(bits), 8)


@given(sizes(), st.integers(0, 2), st.integers(1, 20))
def test_pieces_cover_every_quad_once_and_in_order(size: Size, split: int, strips: int) -> None:
    parts = cut(size, split, strips)
    weights = scales = 0
    seen = []
    for run in size.runs:
        for quad in range(run.quads):
            seen.append((weights + quad * run.bits * 32, scales + quad * 32 // run.span, run.tile + quad * 4, run.bits))
        weights += size.strips * run.quads * run.bits * 32
        scales += size.strips * run.quads * 32 // run.span
    made = []
    for part in parts:
        busy = part[part["warps"] > 0]
        assert (part["warps"][len(busy) :] == 0).all()
        assert (busy["warp"] == np.cumsum([0, *busy["warps"][:-1]])).all()
        assert busy["warps"].sum() <= WARPS
        assert (busy["warps"] <= busy["quads"] * max(1, strips - 1)).all()  # a block may have one strip less
        for first, scale, tile, quads, _, bits, span, *_ in busy.tolist():
            made += [(first + i * bits * 32, scale + i * 32 // span, tile + i * 4, bits) for i in range(quads)]
    assert made == seen


@given(st.integers(1, 20), st.integers(1, 60), st.integers(1, 16))
def test_the_kernel_finds_the_warps_that_have_a_strip(strips: int, quads: int, warps: int) -> None:
    n = strips * quads
    warps = min(warps, n)
    owners = [warp for warp in range(warps) for _ in range((warp + 1) * n // warps - warp * n // warps)]
    for strip in range(strips):
        mine = owners[strip * quads : (strip + 1) * quads]
        assert ((strip * quads + 1) * warps - 1) // n == mine[0]
        assert ((strip + 1) * quads * warps - 1) // n == mine[-1]
        assert set(mine) == set(range(mine[0], mine[-1] + 1))


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 9000)), min_size=1, max_size=8), st.integers(8, 400))
def test_sharing_out_is_within_the_slots_and_no_better_share_exists(items: list[tuple[int, int]], slots: int) -> None:
    counts, costs = zip(*items, strict=True)
    shares = share_out(counts, costs, slots)
    assert sum(shares) <= slots
    dearest = max(-(-n // share) * cost for n, cost, share in zip(counts, costs, shares, strict=True))
    cheaper = [-(-n // ((dearest - 1) // cost)) if cost < dearest else slots + 1 for n, cost in items]
    assert sum(cheaper) > slots


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS.keys())
@pytest.mark.parametrize(("k", "columns"), EIGHT_B.values(), ids=EIGHT_B.keys())
def test_every_matrix_of_an_8b_model_has_plans(k: int, columns: list[int], gpu: Gpu) -> None:
    plans = [make_plan([size_of(k, n, 12) for n in columns], rows, gpu) for rows in ROWS]
    assert plans[0] is not None
    assert plans[1] is not None
    assert plans[0].rows == 1
    assert all(np.array_equal(a, b) for a, b in zip(plans[0].pieces, plans[1].pieces, strict=True))
    assert plans[0].columns == plans[1].columns
    for plan in plans:
        if plan is not None:
            assert plan.shared(plan.rows) <= gpu.shared
            assert max(table.size for table in plan.pieces) <= MAX_PIECES
            assert all(1 <= n <= -(-c // 32) for n, c in zip(plan.columns, columns, strict=True))


def test_the_arguments_of_a_launch_fit_the_4_kib_that_cuda_gives_them() -> None:
    assert MATRIX.itemsize == 1016
    assert MATRIX.itemsize * MAX_MATRICES + 24 <= 4096


def test_a_wide_run_gets_more_warps_than_a_narrow_one() -> None:
    runs = (Run(8, 4, 0, (0,) * 64), Run(2, 4, 64, (1,) * 64))
    assert cut(Size(runs, 1, 128, 8), 0, 1)["warps"].tolist() == [[8, 3]]
