"""How plain torch reads a quantised KV cache: the numbers of ops/cache_format.py, in the order they are stored in.

A row is not put in order: queries are brought into that of the keys instead, and what attention makes of the values
out of it, by the same matrix that turns them. Words of the tiles are moved as they are, not byte by byte.
"""

from functools import lru_cache

import torch
from torch import Tensor

from exl2chat.ops.cache_format import ORDER, SLOTS, TOKENS, CacheFormat, rotate

# Of keys, and then of values, that are decoded at once, unless one head's are more: 1 MiB in float32, which stays in
# a core's own cache.
AT_ONCE = 1 << 18
BYTES_PER_NUMBER = 16  # while it is decoded: keys that already are, and values on their way through float16
SPAN = 4  # octets of a token that follow each other in a tile
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def decode(shape: CacheFormat, tiles: Tensor, start: int, end: int) -> Tensor:
    """The tokens [start, end) of tiles [heads, n, 16 * row_bytes] as float32 [heads, end - start, D]: those numbers of
    `CacheFormat.dequantize`, turned and in the order of `basis`."""
    first = start // TOKENS
    tiles = tiles[:, first : -(-end // TOKENS)]
    octets, blocks = shape.size // 8, shape.size // shape.block
    widths = {8: (8,), 6: (4, 2), 4: (4,)}[shape.bits]
    parts = tiles.split_with_sizes([*(TOKENS * octets * width for width in widths), TOKENS * 2 * blocks], -1)
    planes = [_rows(part.view(WORDS[width]), octets) for part, width in zip(parts, widths, strict=False)]
    codes = _codes(shape.bits, [plane.view(torch.uint8).unflatten(-1, (blocks, -1)) for plane in planes])  # type: ignore[no-untyped-call]
    scales = parts[-1].view(torch.float16).unflatten(-1, (blocks, TOKENS))  # type: ignore[no-untyped-call]
    scales = scales.index_select(-1, _slots(tiles.device)).transpose(-1, -2).float().unsqueeze(-1)
    values = codes.float().add_(0.5 - (1 << (shape.bits - 1))).mul_(scales).half().float()
    return values.flatten(-2).flatten(1, 2)[:, start - first * TOKENS : end - first * TOKENS]


@lru_cache(maxsize=8)
def basis(shape: CacheFormat, device: torch.device) -> Tensor:
    """[block, block] float32: a block of a row times it is turned, and ordered as `decode` leaves rows. Its transpose
    is its inverse."""
    fields = torch.arange(shape.block).view(-1, 8)[:, ORDER]
    if shape.bits == 4:
        fields = fields.unflatten(1, (4, 2)).permute(2, 0, 1)  # type: ignore[no-untyped-call]
    elif shape.bits == 6:
        fields = fields.unflatten(1, (2, 4)).permute(2, 0, 1)  # type: ignore[no-untyped-call]
    matrix: Tensor = rotate(torch.eye(shape.block))[:, fields.flatten()]
    return matrix.to(device)


def change(rows: Tensor, matrix: Tensor) -> Tensor:
    """Every block of rows [..., D] times matrix [block, block]."""
    blocks: Tensor = rows.unflatten(-1, (-1, len(matrix)))  # type: ignore[no-untyped-call]
    return torch.matmul(blocks, matrix).flatten(-2)


def decoding_bytes(groups: int, size: int, context: int) -> int:
    """Bytes that attention over `context` tokens takes to decode `groups` key/value heads of `size`."""
    return BYTES_PER_NUMBER * min(groups * size * context, max(AT_ONCE, size * context))


def _rows(words: Tensor, octets: int) -> Tensor:
    """Words [heads, n, 16 * octets] of tiles, a word an octet, as rows [heads, n, 16, octets]."""
    whole = octets // SPAN * SPAN
    spans: Tensor = words[..., : TOKENS * whole].unflatten(-1, (-1, TOKENS, SPAN))  # type: ignore[no-untyped-call]
    spans = spans.transpose(-3, -2).flatten(-2)
    if whole == octets:
        return spans
    rest = words[..., TOKENS * whole :].unflatten(-1, (TOKENS, -1))  # type: ignore[no-untyped-call]
    return torch.cat((spans, rest), -1)


def _codes(bits: int, planes: list[Tensor]) -> Tensor:
    """Codes [..., block] of the bytes of a block in each of its planes."""
    if bits == 8:
        return planes[0]
    if bits == 4:
        return torch.cat((planes[0] & 15, planes[0] >> 4), -1)
    low, high = planes[0].view(torch.int16), planes[1].short()  # four fields of an octet each
    return torch.cat([(low >> 4 * i & 15).add_((high >> 2 * i & 3) << 4) for i in range(4)], -1)


@lru_cache(maxsize=8)
def _slots(device: torch.device) -> Tensor:
    """Which scale of a block of a tile is that of each token."""
    return torch.tensor([SLOTS.index(token) for token in range(TOKENS)], device=device)
