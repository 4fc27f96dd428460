"""Attention of more new tokens than attention.cu takes, over a cache that already holds them: a chunk of a prompt.

All of it is our kernel's. On an NVIDIA H200, for 2048 tokens of 32 / 8 heads of 128, torch's flash attention (2.11)
takes 164 us at the start of a prompt and 764 us after 6144 tokens, ours 101 and 532. cuDNN's takes 87 at the start, and
30 ms more for every length of a prompt that it has not seen.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exl2chat.kernels import load
from exl2chat.ops.attention import Heads

PAGE = 256  # tokens
TILE = 16  # tokens of a quantised cache that lie together
MOST_KEYS = 64  # tokens that a kernel takes at a time, at most: it begins at a multiple of what it takes
LEAST_PART = 256  # tokens: with fewer, adding parts up takes longer than they save
MERGED_ROWS = EXPANDED_TILES = 4  # of a block of merge_parts, of expand_cache
# So many queries of a group or more are served from a copy of a quantised cache in float16, of up to so many bytes:
# 256 tokens after 4096 take 70 instead of 92 us (8 bits), 32 after 8192 61 instead of 46.
EXPANDED_FOR, EXPANDED_BYTES = 256, 1 << 28

# The struct Problem of prefill_attention.cu
PROBLEM = np.dtype(
    [(name, np.uint64) for name in ("q", "cache", "pages", "position", "last", "out", "partial", "stats")]
    + [("room", np.int64)]
    + [(name, np.int32) for name in ("start", "rows", "heads", "groups", "parts", "window")]
    + [("scale", np.float32), ("cap", np.float32)]
)


@dataclass(frozen=True, slots=True)
class Shape:
    """How prefill_attention.cu is compiled: warps, tiles of 16 queries a warp, tokens a step; with wgmma (sm_90)."""

    warps: int
    tiles: int
    keys: int
    wgmma: bool = False

    @property
    def queries(self) -> int:
        """(token, head) pairs of a block."""
        return 16 * self.tiles * self.warps

    def defines(self, size: int, bits: int, turned: bool, repeated: bool) -> dict[str, int]:
        """The macros for heads of `size` and a cache of `bits` per value, in a step that a graph repeats or another."""
        return {
            "HEAD_DIM": size, "CACHE_BITS": bits, "TURNED": int(turned), "WARPS": self.warps, "MTILES": self.tiles,
            "KEYS": self.keys, "WGMMA": int(self.wgmma), "REPEATED": int(repeated),
        }  # fmt: skip

    def shared(self, size: int, row_bytes: int | None) -> int:
        """Bytes of shared memory for heads of `size`, which a quantised cache holds in `row_bytes`."""
        pitch = 2 * (size if self.wgmma else size + 8)
        if row_bytes is None:
            return (self.queries + 4 * self.keys) * pitch
        return (self.queries + 2 * self.keys) * pitch + 2 * self.keys * row_bytes


# By the largest head, best first: the first that fits the shared memory is taken. More tiles do not fit the registers.
SHAPES = {
    96: (Shape(4, 2, 64), Shape(4, 2, 32), Shape(2, 2, 32)),
    128: (Shape(4, 2, 32), Shape(2, 2, 32)),
    256: (Shape(8, 1, 32), Shape(4, 1, 16), Shape(2, 1, 16)),
}
WGMMA_SHAPE, WGMMA_DIMS = Shape(8, 1, 64, wgmma=True), (64, 128, 256)


@dataclass(frozen=True, slots=True)
class Cached:
    """Keys and values of one layer's tokens from `first` on: rows [2, G, S, ...] float16, or of 4, 6 or 8 `bits` as
    bytes (ops/cache_format.py); `turned` as a quantised cache has them. With `pages` int32 [1, most], page i of the
    sequence lies at pages[0, i]."""

    rows: Tensor
    first: int
    bits: int
    turned: bool
    pages: Tensor | None

    @property
    def row_bytes(self) -> int:
        return self.rows.shape[-1] * self.rows.itemsize


@dataclass(frozen=True, slots=True)
class Span:
    """Where a chunk begins and the last token that there is, int32 [1] each, on the device: a graph can repeat a step
    that has them. What lies in the chunk behind the last token is not cached, and taken for zeros."""

    position: Tensor
    last: Tensor


def prefill_attention(
    q: Tensor, layer: Tensor, start: int, heads: Heads, window: int | None, bits: int = 16,
    pages: Tensor | None = None, span: Span | None = None,
) -> Tensor:  # fmt: skip
    """Attention of q float16 [T, H, D], of tokens from `start` on, over a layer's cache, which holds these too: float16
    [T, H * D]. Each looks at the tokens up to its own, within the window.

    layer: float16 [2, G, S, D], or of `bits` 4, 6 or 8 as uint8 [2, G, S, bytes of a token], and q turned as the keys;
    `pages` as a Cached has them. A `span`, with pages, counts instead of `start`.
    """
    total = start + len(q)
    cached = Cached(layer, 0, bits, bits < 16, pages)
    if bits < 16 and len(q) * (heads.queries // heads.groups) >= EXPANDED_FOR and span is None:
        first = 0 if window is None else max(0, start + 1 - window) // MOST_KEYS * MOST_KEYS
        if 4 * heads.groups * heads.size * (total - first) <= EXPANDED_BYTES:
            cached = expand(cached, first, total, heads.size)
    return attend(q, cached, start, heads, window, span)


def expand(cached: Cached, first: int, end: int, size: int) -> Cached:
    """Tokens [first, end) of a quantised cache in float16, up to a whole tile; `first` a multiple of MOST_KEYS."""
    _, groups, room, _ = cached.rows.shape
    tiles = -(-(end - first) // TILE)
    rows = torch.empty(2, groups, tiles * TILE, size, dtype=torch.float16, device=cached.rows.device)
    kernel = load("expand_cache.cu", "expand_cache", rows.device, HEAD_DIM=size, CACHE_BITS=cached.bits)
    kernel.launch(
        (-(-tiles // EXPANDED_TILES), 2 * groups), 32 * EXPANDED_TILES, 0,
        cached.rows, address(cached.pages), rows, np.array(room, np.int64), first // TILE, tiles,
    )  # fmt: skip
    return Cached(rows, first, 16, cached.turned, None)


def attend(q: Tensor, cached: Cached, start: int, heads: Heads, window: int | None, span: Span | None = None) -> Tensor:
    """`prefill_attention` over what is cached."""
    device, rows, size = q.device, len(q), heads.size
    row_bytes = None if cached.bits == 16 else cached.row_bytes
    shape = choose_shape(size, row_bytes, device)
    tiles = -(-rows * (heads.queries // heads.groups) // shape.queries)
    seen = start + rows if span is None or cached.pages is None else PAGE * cached.pages.shape[1]
    seen = seen if window is None else min(seen, window + rows)
    parts = count_parts(tiles * heads.groups, seen, torch.cuda.get_device_properties(device).multi_processor_count)
    out = torch.empty(rows, heads.queries * size, dtype=torch.float16, device=device)
    work = torch.empty(parts if parts > 1 else 0, rows * heads.queries, size + 2, device=device)
    problem = _problem(q, cached, start, heads, window)
    problem["out"], problem["partial"], problem["parts"] = out.data_ptr(), work.data_ptr(), parts
    if span is not None:
        problem["position"], problem["last"] = span.position.data_ptr(), span.last.data_ptr()
    problem["stats"] = work.data_ptr() + 4 * size * len(work) * rows * heads.queries
    defines = shape.defines(size, cached.bits, cached.turned, span is not None)
    kernel = load("prefill_attention.cu", "prefill_attention", device, **defines)
    kernel.launch((heads.groups * parts, tiles), shape.warps * 32, shape.shared(size, row_bytes), problem)
    if parts > 1:
        merge = load("prefill_attention.cu", "merge_parts", device, **defines)
        merge.launch((-(-rows * heads.queries // MERGED_ROWS), 1), 32 * MERGED_ROWS, 0, problem)
    return out


def choose_shape(size: int, row_bytes: int | None, device: torch.device) -> Shape:
    """The best shape for heads of `size` (and see Shape.shared) on a GPU."""
    properties = torch.cuda.get_device_properties(device)
    if properties.major == 9 and size in WGMMA_DIMS:
        return WGMMA_SHAPE
    most: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    shapes = SHAPES[min(largest for largest in SHAPES if largest >= size)]
    return next(shape for shape in shapes if shape == shapes[-1] or shape.shared(size, row_bytes) <= most)


def count_parts(blocks: int, span: int, processors: int) -> int:
    """Into how many parts to cut `span` tokens, so that few blocks still keep every multiprocessor busy with two."""
    return 1 if blocks >= processors else max(1, min(2 * processors // blocks, span // LEAST_PART))


def _problem(q: Tensor, cached: Cached, start: int, heads: Heads, window: int | None) -> NDArray[np.void]:
    problem = np.zeros((), PROBLEM)
    problem["q"], problem["room"] = q.data_ptr(), cached.rows.shape[2]
    problem["cache"] = cached.rows.data_ptr() - cached.first * cached.row_bytes
    problem["pages"] = address(cached.pages)
    problem["start"], problem["rows"], problem["window"] = start, len(q), window or 0
    problem["heads"], problem["groups"] = heads.queries, heads.groups
    problem["scale"], problem["cap"] = heads.scale, heads.cap or 0
    return problem


def address(tensor: Tensor | None) -> NDArray[np.uint64]:
    """That of the tensor's memory as a kernel takes it, 0 of none."""
    return np.array(0 if tensor is None else tensor.data_ptr(), np.uint64)
