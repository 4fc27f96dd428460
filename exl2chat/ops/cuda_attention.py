"""Attention over the cache through our CUDA kernels: of a few tokens (attention.cu) and of a prompt's (rope_cache.cu,
cuda_prefill.py). Contract: `exl2chat.ops.reference.attends`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exl2chat.kernels import Argument, load
from exl2chat.ops.attention import PLAIN_BITS, Heads, Store
from exl2chat.ops.cache_format import TOKENS, CacheFormat
from exl2chat.ops.cuda_prefill import Span, address, prefill_attention
from exl2chat.ops.packed import Norm, Weight
from exl2chat.ops.partial import count_parts, suffix
from exl2chat.ops.tiled import TiledWeight

MAX_ROWS = 16  # of attention.cu
MAX_SPLITS = 128
ROPE_WARPS = 8  # of a block of rope_cache.cu
SMALL_DIM = 128  # four tiles of 8 queries, or three of heads larger than this, do not fit the registers
# Bytes of keys and values that a block has on their way, and how many blocks share a multiprocessor: one of the few of
# a single sequence, so that no two of them meet on one multiprocessor while another is idle; two of many.
RINGS = {1: 140 << 10, 2: 70 << 10}

# The structs of rope.cuh and attention.cu
TURNING = [("scale", np.uint64), ("floor", np.uint64), ("cos", np.uint64), ("sin", np.uint64), ("rotary", np.int64)]
PROBLEM = np.dtype(
    [("qkv", np.uint64), ("turning", TURNING)]
    + [(name, np.uint64) for name in ("cache", "position", "pages", "places", "out", "partial", "stats", "arrived")]
    + [("stride", np.int64)]
    + [(name, np.int32) for name in ("parts", "rows", "heads", "groups", "window", "splits", "most")]
    + [("scale", np.float32), ("cap", np.float32), ("padding", np.int32)]
)

# Memory for float16 activations [rows, width] in the form that a weight takes, and where each column goes in it.
Activations = Callable[[int, int, Weight], tuple[Tensor, Argument]]


@dataclass(frozen=True, slots=True)
class Shape:
    """How attention.cu is compiled for heads of `size` and a cache of `bits`: `tiles` of 8 queries a block, `blocks` of
    a multiprocessor."""

    size: int
    bits: int
    warps: int
    ring: int
    tiles: int
    blocks: int

    @property
    def defines(self) -> dict[str, int]:
        return {
            "HEAD_DIM": self.size, "CACHE_BITS": self.bits, "WARPS": self.warps, "RING": self.ring,
            "QTILES": self.tiles, "RESIDENT": self.blocks,
        }  # fmt: skip

    def dynamic(self, rows: int) -> int:
        """Bytes of shared memory that it is launched with for `rows` tokens."""
        padded = self.size if self.bits == PLAIN_BITS else -(-self.size // 32) * 32
        pitch = padded + 8 if self.bits == PLAIN_BITS else padded + 32 * (padded % 64 == 0)
        fresh = 2 * rows * pitch * 2 if self.bits == PLAIN_BITS else 4 * tokens_bytes(self.size, self.bits)
        queries = 8 * self.tiles
        room = max(self.ring * self.slot_bytes, self.warps * queries * (self.size + 4) * 4)  # first tokens, then sums
        return room + queries * pitch * 2 + (queries + 2 * rows) * self.size * 4 + fresh

    @property
    def shared(self) -> int:
        """The most shared memory that it takes in all."""
        return self.dynamic(MAX_ROWS) + 8 * self.tiles * (8 * self.warps + 24) + 32 * MAX_ROWS + 64

    @property
    def slot_bytes(self) -> int:
        """Bytes of what all warps fetch at a time."""
        return self.warps * tokens_bytes(self.size, self.bits)


def tokens_bytes(size: int, bits: int) -> int:
    """Bytes of 16 tokens' keys (or values) of one head in shared memory."""
    return TOKENS * ((size + 8) * 2 if bits == PLAIN_BITS else CacheFormat(bits, size).row_bytes)


def max_tiles(size: int) -> int:
    return 3 if size <= SMALL_DIM else 2


def choose_shape(queries: int, size: int, bits: int, shared: int, many: bool = False) -> Shape:
    """The shape for `queries` per group (tokens times heads) within `shared` bytes, for few blocks or for `many`. Warps
    are the same for all: a token's sums must not depend on how many tokens or sequences there are (see attention.cu).
    """
    most = max_tiles(size)
    tiles = -(-queries // (8 * -(-queries // (8 * most))))
    blocks = 2 if many and tiles == 1 else 1
    for warps in (8, 4, 2, 1):
        slot = Shape(size, bits, warps, 1, most, 1)
        rings = [max(2, min(8, RINGS[n] // slot.slot_bytes)) for n in (1, blocks)]
        if replace(slot, ring=rings[0]).shared <= shared:
            break
    return Shape(size, bits, warps, rings[1], tiles, blocks)


class CudaAttention:
    """The attention of a model on one device. One step at a time: the kernel keeps count of its blocks in `arrived`."""

    def __init__(self, device: torch.device, activations: Activations) -> None:
        self._device = device
        self._activations = activations
        self._arrived = torch.zeros(1 << 14, dtype=torch.int32, device=device)
        properties = torch.cuda.get_device_properties(device)
        self._processors = properties.multi_processor_count
        self._shared = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]

    def attends(self, store: Store, count: int, heads: Heads, windows: Sequence[int | None]) -> "list[CudaAttend]":
        """As the reference; with up to MAX_ROWS tokens, nothing in it depends on `store.length`."""
        layers = store.storage.flatten(3, 4).unbind(0)
        prompt = count > MAX_ROWS
        return [CudaAttend(self, store, layer, heads, w, prompt) for layer, w in zip(layers, windows, strict=True)]

    def rope_cache(self, qkv: Tensor, head_norm: Norm | None, store: Store, layer: Tensor, heads: Heads) -> Tensor:
        """The queries of qkv, normalised and turned, and rotated as the keys of a quantised cache are, float16
        [T, H, D]; its keys and values go to `layer` [2, G, S, D or row_bytes] from `store.position` on."""
        count, size = qkv.shape[-2], heads.size
        q = torch.empty(count, heads.queries, size, dtype=torch.float16, device=self._device)
        defines = {"HEAD_DIM": size, "CACHE_BITS": store.bits}
        kernel = load("rope_cache.cu", f"rope_cache_{suffix(qkv)}", self._device, **defines)
        kernel.launch(
            (-(-(heads.queries + 2 * heads.groups) // ROPE_WARPS), count), 32 * ROPE_WARPS, 0,
            qkv, count_parts(qkv), _turning(head_norm, store), store.position, address(store.pages),
            address(store.last), q, layer, _stride(layer), heads.queries, heads.groups,
        )  # fmt: skip
        return q

    def attention(
        self, qkv: Tensor, head_norm: Norm | None, store: Store, layer: Tensor, heads: Heads, window: int | None,
        into: Weight,
    ) -> Tensor:  # fmt: skip
        """An Attend of up to MAX_ROWS tokens of each sequence, over `layer` [2, G, S, D or row_bytes]."""
        sequences, size, share = len(store.position), heads.size, heads.queries // heads.groups
        rows = qkv.shape[-2]
        count = rows // sequences
        splits = min(MAX_SPLITS, max(1, self._processors // heads.groups))
        grid = min(splits, store.storage.shape[3] if store.pages is None else store.pages.shape[1])
        many = grid * heads.groups * sequences > self._processors
        shape = choose_shape(count * share, size, store.bits, self._shared, many)
        blocks = -(-count * share // (8 * shape.tiles)) * heads.groups
        if sequences * blocks > len(self._arrived):
            raise ValueError(f"attention of {sequences} sequences of {count} tokens is more than one launch takes")
        out, places = self._activations(rows, heads.queries * size, into)
        partial = torch.empty(sequences, blocks, grid, 8 * shape.tiles, size + 2, device=self._device)
        problem = np.zeros((), PROBLEM)
        tensors = {"qkv": qkv, "cache": layer, "position": store.position, "pages": store.pages, "places": places,
                   "out": out, "partial": partial, "arrived": self._arrived}  # fmt: skip
        for name, tensor in tensors.items():
            problem[name] = tensor.data_ptr() if isinstance(tensor, Tensor) else 0
        problem["turning"] = _turning(head_norm, store)
        problem["stats"] = partial.data_ptr() + 4 * size * partial[..., 0].numel()
        problem["stride"], problem["parts"], problem["rows"] = _stride(layer), count_parts(qkv), count
        problem["heads"], problem["groups"], problem["window"] = heads.queries, heads.groups, window or 0
        problem["splits"], problem["most"] = splits, 0 if store.pages is None else store.pages.shape[1]
        problem["scale"], problem["cap"] = heads.scale, heads.cap or 0
        kernel = load("attention.cu", f"attention_{suffix(qkv)}", self._device, **shape.defines)
        # with more than half of its memory a block has a multiprocessor to itself
        least = self._shared // 2 if shape.blocks == 1 else 0
        kernel.launch((grid, blocks, sequences), shape.warps * 32, max(least, shape.dynamic(count)), problem)
        return out


@dataclass(frozen=True, slots=True)
class CudaAttend:
    """An Attend, of a few tokens or of a prompt."""

    ops: CudaAttention
    store: Store
    layer: Tensor
    heads: Heads
    window: int | None
    prompt: bool

    def __call__(self, qkv: Tensor, head_norm: Norm | None, into: Weight) -> Tensor:
        if not self.prompt:
            return self.ops.attention(qkv, head_norm, self.store, self.layer, self.heads, self.window, into)
        q = self.ops.rope_cache(qkv, head_norm, self.store, self.layer, self.heads)
        store = self.store
        span = None if store.last is None else Span(store.position, store.last)
        out = prefill_attention(q, self.layer, store.length, self.heads, self.window, store.bits, store.pages, span)
        return into.arranged(out) if isinstance(into, TiledWeight) else out  # so that nobody adds its sums up before


def _stride(layer: Tensor) -> NDArray[np.int64]:
    """Bytes from group to group of a layer's cache [2, G, S, D or row_bytes]."""
    return np.array(layer.stride(1) * layer.itemsize, np.int64)


def _turning(head_norm: Norm | None, store: Store) -> NDArray[np.void]:
    """The struct Turning of rope.cuh."""
    turning = np.zeros((), TURNING)
    if head_norm is not None:
        turning["scale"], turning["floor"] = head_norm.scale.data_ptr(), head_norm.floor.data_ptr()
    turning["cos"], turning["sin"] = store.cos.data_ptr(), store.sin.data_ptr()
    turning["rotary"] = 2 * store.cos.shape[-1]
    return turning
