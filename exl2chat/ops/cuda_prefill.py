"""Attention of more new tokens than attention.cu takes, over a cache that already holds them: a chunk of a prompt."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from exl2chat.kernels import load
from exl2chat.ops.attention import Heads

# Warps, tiles of 16 queries a warp, and tokens a step of prefill_attention.cu, best first: the first that fits the
# shared memory is taken. Two tiles of queries of larger heads do not fit the registers.
SMALL_DIM = 128
SMALL_SHAPES = ((4, 2, 64), (2, 2, 32))
LARGE_SHAPES = ((8, 1, 64), (4, 1, 32), (2, 1, 32))
LEAST_PART = 256  # tokens: with fewer, adding parts up takes longer than they save
MERGED_ROWS = 4  # of a block of merge_parts

# The struct Problem of prefill_attention.cu
PROBLEM = np.dtype(
    [(name, np.uint64) for name in ("q", "cache", "out", "partial", "stats")]
    + [("room", np.int64)]
    + [(name, np.int32) for name in ("start", "rows", "heads", "groups", "parts", "window")]
    + [("scale", np.float32), ("cap", np.float32)]
)


@dataclass(frozen=True, slots=True)
class Shape:
    """How prefill_attention.cu is compiled."""

    warps: int
    tiles: int
    keys: int

    @property
    def queries(self) -> int:
        """(token, head) pairs of a block."""
        return 16 * self.tiles * self.warps

    def shared(self, size: int) -> int:
        """Bytes of shared memory for heads of `size`."""
        return (self.queries + 2 * self.keys) * 2 * (size + 8)


def prefill_attention(q: Tensor, layer: Tensor, start: int, heads: Heads, window: int | None, bits: int = 16) -> Tensor:
    """Attention of q float16 [T, H, D], of tokens from `start` on, over `layer` [2, G, S, D], which holds these too:
    float16 [T, H * D]. Each looks at the tokens up to its own, within the window.

    Plain causal attention is torch's (flash attention), the rest our kernel's.
    """
    total = start + len(q)
    plain = heads.cap is None and (window is None or total <= window)
    if plain and torch.cuda.get_device_capability(q.device) >= (8, 0):
        return _by_torch(q, layer[:, :, :total], heads.scale)
    return by_kernel(q, layer, start, heads, window)


def _by_torch(q: Tensor, seen: Tensor, scale: float) -> Tensor:
    count, total = len(q), seen.shape[2]
    keys, values = seen.unsqueeze(1)
    query = q.transpose(0, 1).unsqueeze(0)
    mask = causal_lower_right(count, total)
    out = F.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1).reshape(count, -1)


def by_kernel(q: Tensor, layer: Tensor, start: int, heads: Heads, window: int | None) -> Tensor:
    """`prefill_attention` through our kernel."""
    device, rows, size = q.device, len(q), heads.size
    properties = torch.cuda.get_device_properties(device)
    shape = choose_shape(size, properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]
    tiles = -(-rows * (heads.queries // heads.groups) // shape.queries)
    span = start + rows if window is None else min(start + rows, window + rows)
    parts = count_parts(tiles * heads.groups, span, properties.multi_processor_count)
    out = torch.empty(rows, heads.queries * size, dtype=torch.float16, device=device)
    work = torch.empty(parts if parts > 1 else 0, rows * heads.queries, size + 2, device=device)
    problem = np.zeros((), PROBLEM)
    for name, tensor in {"q": q, "cache": layer, "out": out, "partial": work}.items():
        problem[name] = tensor.data_ptr()
    problem["stats"] = work.data_ptr() + 4 * size * len(work) * rows * heads.queries
    problem["room"], problem["start"], problem["rows"], problem["parts"] = layer.shape[2], start, rows, parts
    problem["heads"], problem["groups"], problem["window"] = heads.queries, heads.groups, window or 0
    problem["scale"], problem["cap"] = heads.scale, heads.cap or 0
    defines = {"HEAD_DIM": size, "WARPS": shape.warps, "MTILES": shape.tiles, "KEYS": shape.keys}
    kernel = load("prefill_attention.cu", "prefill_attention", device, **defines)
    kernel.launch((heads.groups * parts, tiles), shape.warps * 32, shape.shared(size), problem)
    if parts > 1:
        merge = load("prefill_attention.cu", "merge_parts", device, **defines)
        merge.launch((-(-rows * heads.queries // MERGED_ROWS), 1), 32 * MERGED_ROWS, 0, problem)
    return out


def choose_shape(size: int, shared: int) -> Shape:
    """The best shape for heads of `size` that fits `shared` bytes."""
    shapes = [Shape(*shape) for shape in (SMALL_SHAPES if size <= SMALL_DIM else LARGE_SHAPES)]
    return next(shape for shape in shapes if shape == shapes[-1] or shape.shared(size) <= shared)


def count_parts(blocks: int, span: int, processors: int) -> int:
    """Into how many parts to cut `span` tokens, so that few blocks still keep every multiprocessor busy with two."""
    return 1 if blocks >= processors else max(1, min(2 * processors // blocks, span // LEAST_PART))
