"""The format of the quantised KV cache: rotations, error bounds, packing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exl2chat.ops.cache_decode import basis, change, decode
from exl2chat.ops.cache_format import TOKENS, CacheFormat, rotate

CPU = torch.device("cpu")
BITS = (4, 6, 8)
SIZES = (16, 64, 80, 96, 128, 256)


@pytest.mark.parametrize("size", SIZES)
def test_rotations_keep_products_and_undo_themselves(size: int) -> None:
    x, y = torch.randn(2, 5, 3, size)
    torch.testing.assert_close(rotate(rotate(x)), x, rtol=0, atol=1e-5)
    torch.testing.assert_close((rotate(x) * rotate(y)).sum(-1), (x * y).sum(-1), rtol=0, atol=1e-4)


def test_a_rotation_is_the_walsh_hadamard_matrix() -> None:
    matrix = torch.ones(1, 1)
    while len(matrix) < 32:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    torch.testing.assert_close(rotate(torch.eye(64))[:32, :32], matrix / 32**0.5)
    assert not rotate(torch.eye(64))[:32, 32:].any()


@pytest.mark.parametrize("bits", BITS)
@given(size=st.sampled_from(SIZES), seed=st.integers(0, 2**31), magnitude=st.floats(1e-3, 1e3))
@settings(max_examples=40, deadline=None)
def test_no_value_moves_farther_than_half_a_step(bits: int, size: int, seed: int, magnitude: float) -> None:
    shape = CacheFormat(bits, size)
    rows = torch.randn(3, size, generator=torch.Generator().manual_seed(seed)) * magnitude
    found = shape.dequantize(shape.quantize(rows)).float()
    blocks = rows.unflatten(-1, (-1, shape.block))
    steps = blocks.abs().amax(-1, keepdim=True) / (1 << (bits - 1))
    # scales and results are rounded to float16: 2^-11 of the largest value, and of a scale below 2^-14 its 2^-25
    allowed = steps / 2 + blocks.abs().amax(-1, keepdim=True) * 2**-10 + 2**-25 * (1 << bits)
    assert ((found.unflatten(-1, (-1, shape.block)) - blocks).abs() <= allowed).all()


@pytest.mark.parametrize(("bits", "error"), [(4, 0.091), (6, 0.023), (8, 0.0058)])
def test_the_error_of_gaussian_numbers_is_that_of_the_header(bits: int, error: float) -> None:
    shape = CacheFormat(bits, 128)
    rows = torch.randn(1000, 128, generator=torch.Generator().manual_seed(1))
    moved = shape.dequantize(shape.quantize(rows)).float() - rows
    assert 0.9 * error < moved.norm() / rows.norm() < error


@pytest.mark.parametrize("bits", BITS)
def test_rows_of_zeros_stay_zeros(bits: int) -> None:
    shape = CacheFormat(bits, 96)
    assert not shape.dequantize(shape.quantize(torch.zeros(2, 96))).any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", SIZES)
def test_a_tile_has_room_for_every_byte_once(bits: int, size: int) -> None:
    shape = CacheFormat(bits, size)
    places = shape.places(CPU)
    assert places.shape == (TOKENS, shape.row_bytes)
    assert sorted(places.flatten().tolist()) == list(range(TOKENS * shape.row_bytes))
    assert shape.row_bytes * 8 == size * bits + 16 * (size // shape.block)


def test_fields_lie_as_the_header_says() -> None:
    """Values 0 .. 7 of an octet: even ones first, 4 bits each; 6 bits: the high two in bytes of their own."""
    codes = torch.tensor([0, 63, 1, 62, 2, 61, 3, 60])
    rows = torch.zeros(32)
    rows[:8] = codes - 32 + 0.5
    rows[8] = 32  # step 1
    four, six = CacheFormat(4, 32), CacheFormat(6, 32)
    found = six.quantize(rows).tolist()
    assert found[:4] == [0x10, 0x32, 0xEF, 0xCD]
    assert found[16:18] == [0x00, 0xFF]
    rows[:8] = torch.tensor([0, 15, 1, 14, 2, 13, 3, 12]) - 7.5
    rows[8] = 8
    assert four.quantize(rows).tolist()[:4] == [0x10, 0x32, 0xEF, 0xCD]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("start", "end"), [(0, 1), (5, 16), (13, 40), (32, 48)])
def test_what_a_cpu_reads_is_the_same_to_the_bit_in_another_order(bits: int, size: int, start: int, end: int) -> None:
    shape = CacheFormat(bits, size)
    tiles = torch.full((2, 3, TOKENS * shape.row_bytes), 255, dtype=torch.uint8)
    shape.write(tiles, 0, shape.quantize(torch.randn(2, 48, size)))
    expected = shape.dequantize(shape.read(tiles, start, end)).float()
    order = change(rotate(torch.arange(size).float()), basis(shape, CPU)).round().long()
    assert torch.equal(decode(shape, tiles, start, end), expected[..., order])


@pytest.mark.parametrize("bits", BITS)
def test_an_order_is_undone_and_keeps_products(bits: int) -> None:
    shape, (x, y) = CacheFormat(bits, 96), torch.randn(2, 5, 96)
    matrix = basis(shape, CPU)
    torch.testing.assert_close(change(change(x, matrix), matrix.T), x, rtol=0, atol=1e-5)
    ours = change(x, matrix) * change(y, matrix)
    torch.testing.assert_close(ours.sum(-1), (x * y).sum(-1), rtol=0, atol=1e-4)
