"""Codes and scales of EXL2 and GPTQ in the tiles that the kernels read: `exl2chat/kernels/tiles.cuh` draws the layout.

Everything here is torch on whatever device the tensors are on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

STRIP = 32  # columns
TILE = 32  # rows
QUAD = 4 * TILE
LANES = 32


@dataclass(frozen=True, slots=True)
class Plane:
    """Bits `low` to `low + bits` of a code, `positions` those of the codes that share a 32-bit word."""

    low: int
    bits: int
    positions: tuple[int, ...]


def _positions(*starts: int) -> tuple[int, ...]:
    """A pair per start: the second code of a pair lies 16 bits above the first."""
    return tuple(start + 16 * pair for start in starts for pair in (0, 1))


_LOW4 = Plane(0, 4, _positions(0, 4, 8, 12))
_LOW2 = Plane(0, 2, _positions(*range(0, 16, 2)))
# The high bits of an even register land at bit 4, of an odd one at bit 8, after a shift by s.
_FIFTH = Plane(4, 1, _positions(*(t + s for s in (-4, -3, -2, -1, 4, 5, 6, 7) for t in (4, 8))))
_SIXTH = Plane(4, 2, _positions(*(t + s for s in (-4, -2, 4, 6) for t in (4, 8))))
_THIRD = Plane(2, 1, _positions(*(t + s for s in (-2, -1, 6, 7) for t in (2, 4, 6, 8))))
PLANES: Mapping[int, tuple[Plane, ...]] = {
    2: (_LOW2,),
    3: (_LOW2, _THIRD),
    4: (_LOW4,),
    5: (_LOW4, _FIFTH),
    6: (_LOW4, _SIXTH),
    8: (Plane(0, 8, _positions(0, 8)),),
}


@dataclass(frozen=True, slots=True)
class Run:
    """Tiles of one width whose scales hold for `span` tiles. groups[i] is the group of tile i; in the last quad's
    padding it is -1."""

    bits: int
    span: int
    tile: int
    groups: tuple[int, ...]

    @property
    def quads(self) -> int:
        return len(self.groups) // 4


def find_runs(bits: Sequence[int], groups: Sequence[int], repeat_last: bool) -> tuple[Run, ...]:
    """The runs of a matrix, of which tile i has width bits[i] and lies in group groups[i].

    The padding of a run's last quad is -1, or the run's last group again with `repeat_last`: then its codes must be the
    zero point.
    """
    runs = []
    start = 0
    for end in range(1, len(bits) + 1):
        if end < len(bits) and bits[end] == bits[start]:
            continue
        held = list(groups[start:end])
        held += [held[-1] if repeat_last else -1] * (-len(held) % 4)
        span = next(s for s in (4, 2, 1) if all(len(set(held[i : i + s])) == 1 for i in range(0, len(held), s)))
        runs.append(Run(bits[start], span, start, tuple(held)))
        start = end
    return tuple(runs)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [quads * 128, strips * 32] as int32 [strips * quads * bits * 128]."""
    parts = codes.view(-1, 4, 2, 2, 4, 2, codes.shape[1] // STRIP, 2, 2, 8)  # quad, j, h, e, t, pair; strip, nt, n8, g
    order = parts.permute(6, 0, 9, 4, 1, 7, 2, 3, 8, 5)  # strip, quad, lane = (g, t), j, f = (nt, h), a = (e, n8), pair
    flat = order.reshape(order.shape[0], order.shape[1], LANES, QUAD)
    planes = []
    for plane in PLANES[bits]:
        shifts = torch.tensor(plane.positions, dtype=torch.int32, device=codes.device)
        values = (flat >> plane.low & (1 << plane.bits) - 1).int()
        values = values.view(*flat.shape[:3], -1, len(plane.positions))
        words = (values << shifts).sum(-1, dtype=torch.int32)
        planes.append(words.view(*flat.shape[:3], -1, 4).transpose(2, 3))  # strip, quad, chunk, lane, word
    return torch.cat(planes, 2).flatten()


def pack_exl2_scales(codes: Tensor, units: Tensor, run: Run) -> Tensor:
    """Scale codes below 16 [groups, N] and units float16 [groups] as int32 [strips * quads * 32 / span]."""
    of_quad = torch.tensor(run.groups[:: run.span], device=codes.device).view(run.quads, -1)
    c = codes.int()[of_quad].view(*of_quad.shape, -1, 4, 8)  # quad, span, strip, column / 8, g
    unit = units.view(torch.int16).int()[of_quad] & 0xFFFF
    words = c[..., 0, :] | c[..., 1, :] << 16 | c[..., 2, :] << 4 | c[..., 3, :] << 20
    words |= ((unit & 0xFF) << 8 | unit >> 8 << 24)[:, :, None, None]
    return words.permute(2, 0, 3, 1).flatten()


def pack_gptq_scales(scales: Tensor, zeros: Tensor, run: Run) -> Tensor:
    """Scales float16 [groups, N] and zero points [groups, N] up to 256 as int32 [strips * quads * 128 / span]."""
    of_quad = torch.tensor(run.groups[:: run.span], device=scales.device).view(run.quads, -1)
    low, high = scales.view(torch.int16).int() & 0xFFFF, zeros.half().view(torch.int16).int()
    words = (low | high << 16)[of_quad.clamp(min=0)]
    words[of_quad < 0] = 0
    parts = words.view(*of_quad.shape, -1, 4, 8)  # quad, span, strip, column / 8, g
    return parts.permute(2, 0, 1, 4, 3).flatten()


def fragment_order(order: Tensor) -> Tensor:
    """order [K], the column of x for each packed row, as the kernels take x: int32 [K / 32 * 4, 8], of tile i and t the
    rows 32 i + 16 h + 8 e + 2 t + pair in the order (h, e, pair)."""
    return order.view(-1, 2, 2, 4, 2).permute(0, 3, 1, 2, 4).reshape(-1, 8).int()


def unpack_rows(words: Tensor, bits: int) -> Tensor:
    """int32 words [W, N], each column a little-endian bit stream, to codes uint8 [W * 32 / bits, N]."""
    period = {2: 16, 3: 32, 4: 8, 5: 32, 6: 16, 8: 4}[bits]
    blocks = words.view(-1, period * bits // 32, words.shape[1])
    codes = torch.empty((len(blocks), period, words.shape[1]), dtype=torch.uint8, device=words.device)
    mask = (1 << bits) - 1
    for i in range(period):
        word, shift = divmod(i * bits, 32)
        value = blocks[:, word] >> shift & (1 << min(32 - shift, bits)) - 1
        if shift + bits > 32:
            value = value | blocks[:, word + 1] << 32 - shift & mask
        codes[:, i] = value
    return codes.view(-1, words.shape[1])
