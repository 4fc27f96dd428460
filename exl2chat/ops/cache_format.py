"""The quantised KV cache in torch: the format that kernels/cache.cuh states, bit for bit.

A head's row x of D values is turned, y = H x, in blocks of 32 (of 16 where 32 does not divide D), H the Walsh-Hadamard
matrix over the root of its size, and every block rounded to codes of 4, 6 or 8 bits and a float16 scale. Attention is
the same if queries are turned too, and what it makes of the values is turned once more: H is its own inverse.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

TOKENS = 16  # of a tile
BLOCK, LEAST_BLOCK = 32, 16  # values that are turned together and share a scale
# Where the values x0 .. x7 of an octet lie among its fields: the even ones first.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# Which token's scale lies where among those of a block of a tile.
SLOTS = (0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15)


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """`bits` (4, 6 or 8) for each value of heads of `size`, a multiple of 16.

    A row as `quantize` gives it is [row_bytes] uint8: octets' low fields, their high 2 bits (6 bits only), scales. In
    the cache the bytes of 16 rows are mixed into tiles of 16 * row_bytes, so that a warp reads them in order.
    """

    bits: int
    size: int

    @property
    def block(self) -> int:
        return block_size(self.size)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of one head: bits * D / 8, and 2 per block."""
        return self.bits * self.size // 8 + 2 * (self.size // self.block)

    def quantize(self, rows: Tensor) -> Tensor:
        """Rows [..., D] that `rotate` has turned, float32, to bytes [..., row_bytes]."""
        middle = 1 << (self.bits - 1)
        blocks = torch.unflatten(rows, -1, (-1, self.block))
        scales = (blocks.abs().amax(-1, keepdim=True) / middle).half()
        wide = scales.float()
        inverse = torch.where(wide > 0, 1 / wide, 0)
        codes = (blocks * inverse).floor().add(middle).clamp_(0, 2 * middle - 1).to(torch.uint8)
        fields = torch.unflatten(codes.flatten(-2), -1, (-1, 8))[..., ORDER]
        planes = [fields] if self.bits == 8 else [_join(fields & 15, 4)]
        if self.bits == 6:
            planes.append(_join(fields >> 4, 2))
        planes.append(scales.view(torch.uint8).flatten(-2).unsqueeze(-1))
        return torch.cat([plane.flatten(-2) for plane in planes], -1)

    def dequantize(self, rows: Tensor) -> Tensor:
        """Bytes [..., row_bytes] to rows [..., D] float16, still turned."""
        middle = 1 << (self.bits - 1)
        low, end = self.size * (8 if self.bits == 8 else 4) // 8, self.size * self.bits // 8
        octets = torch.unflatten(rows[..., :low], -1, (self.size // 8, -1))
        fields = octets if self.bits == 8 else _split(octets, 4)
        if self.bits == 6:
            fields = fields | _split(torch.unflatten(rows[..., low:end], -1, (self.size // 8, -1)), 2) << 4
        codes = torch.empty_like(fields)
        codes[..., ORDER] = fields
        scales = rows[..., end:].contiguous().view(torch.float16).unsqueeze(-1).float()
        values = (torch.unflatten(codes.flatten(-2), -1, (-1, self.block)).float() + (0.5 - middle)) * scales
        return values.half().flatten(-2)

    def write(self, tiles: Tensor, start: int, rows: Tensor) -> None:
        """Rows [heads, T, row_bytes] as the tokens from `start` on of tiles [heads, n, 16 * row_bytes]."""
        self.put(tiles, torch.arange(start, start + rows.shape[1], device=tiles.device), rows)

    def put(self, tiles: Tensor, tokens: Tensor, rows: Tensor) -> None:
        """Rows [heads, T, row_bytes] as `tokens`, int64 [T], of tiles [heads, n, 16 * row_bytes]."""
        tiles[:, tokens.unsqueeze(1) // TOKENS, self.places(tiles.device)[tokens % TOKENS]] = rows

    def read(self, tiles: Tensor, start: int, end: int) -> Tensor:
        """Rows [heads, end - start, row_bytes] of tokens in tiles [heads, n, 16 * row_bytes]."""
        first = start // TOKENS
        rows = tiles[:, first : -(-end // TOKENS)][..., self.places(tiles.device).flatten()]
        return rows.view(len(tiles), -1, self.row_bytes)[:, start - first * TOKENS : end - first * TOKENS]

    def places(self, device: torch.device) -> Tensor:
        """Where in a tile each byte of each of its 16 rows lies, int64 [16, row_bytes]."""
        return _places(self.bits, self.size, device)


def block_size(size: int) -> int:
    """How many values of a head of `size` are turned together and share a scale."""
    return LEAST_BLOCK if size % BLOCK else BLOCK


def rotate(x: Tensor) -> Tensor:
    """H x for every block of rows [..., D], float32. Its own inverse, but for rounding."""
    size = x.shape[-1]
    block, step = block_size(size), 1
    while step < block:
        pairs = x.reshape(*x.shape[:-1], -1, 2, step)
        x = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2)
        x = x.reshape(*pairs.shape[:-3], size)
        step *= 2
    return x * (1 / math.sqrt(block))


def _join(fields: Tensor, width: int) -> Tensor:
    """Fields [..., n] of `width` bits to bytes [..., n * width / 8], from the lowest bits on."""
    parts = torch.unflatten(fields, -1, (-1, 8 // width))
    return torch.stack([parts[..., i] << width * i for i in range(8 // width)]).sum(0, dtype=torch.uint8)


def _split(octets: Tensor, width: int) -> Tensor:
    """The inverse of `_join`."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=octets.device)
    return ((octets.unsqueeze(-1) >> shifts) & ((1 << width) - 1)).flatten(-2)


@lru_cache(maxsize=8)
def _places(bits: int, size: int, device: torch.device) -> Tensor:
    octets, end = size // 8, 0
    planes = []
    for width in (8,) if bits == 8 else (4, 2)[: bits // 2 - 1]:
        token, octet, byte = _grid(TOKENS, octets, width)
        span = octet // 4
        in_span = (octets - 4 * span).clamp(max=4)
        planes.append(end + (TOKENS * 4 * span + token * in_span + octet % 4) * width + byte)
        end += TOKENS * octets * width
    token, block, byte = _grid(TOKENS, size // block_size(size), 2)
    slot = torch.tensor([SLOTS.index(i) for i in range(TOKENS)])[token]
    planes.append(end + (block * TOKENS + slot) * 2 + byte)
    return torch.cat([plane.flatten(1) for plane in planes], 1).to(device)


def _grid(*sizes: int) -> tuple[Tensor, ...]:
    return torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
