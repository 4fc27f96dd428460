"""Attention over the cache through our CUDA kernels: of a few tokens (attention.cu) and of a prompt's (rope_cache.cu,
cuda_prefill.py). Contract: `exl2chat.ops.reference.attends`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exl2chat.kernels import Argument, load
from exl2chat.ops.attention import PLAIN_BITS, Heads, Store
from exl2chat.ops.cache_format import TOKENS, CacheFormat
from exl2chat.ops.cuda_prefill import Pages, prefill_attention
from exl2chat.ops.packed import Norm, Weight
from exl2chat.ops.partial import count_parts, suffix

MAX_ROWS = 16  # of attention.cu
MAX_SPLITS = 128
ROPE_WARPS = 8  # of a block of rope_cache.cu
SMALL_DIM = 128  # four tiles of 8 queries, or three of heads larger than this, do not fit the registers
# Bytes that a block has on their way, of 4.5 TB/s for 1 us, and the most that they take of shared memory: the product
# after attention begins to fetch its weights beside it.
ON_THEIR_WAY = 56 << 10
RING_BYTES = 105 << 10

# The structs of rope.cuh and attention.cu
TURNING = [("scale", np.uint64), ("floor", np.uint64), ("cos", np.uint64), ("sin", np.uint64), ("rotary", np.int64)]
PROBLEM = np.dtype(
    [("qkv", np.uint64), ("turning", TURNING)]
    + [(name, np.uint64) for name in ("cache", "position", "places", "out", "partial", "stats", "arrived")]
    + [("stride", np.int64)]
    + [(name, np.int32) for name in ("parts", "rows", "heads", "groups", "window")]
    + [("scale", np.float32), ("cap", np.float32), ("padding", np.int32)]
)

# Memory for float16 activations [rows, width] in the form that a weight takes, and where each column goes in it.
Activations = Callable[[int, int, Weight], tuple[Tensor, Argument]]


@dataclass(frozen=True, slots=True)
class Shape:
    """How attention.cu is compiled for heads of `size` and a cache of `bits`: `tiles` of 8 queries a block."""

    size: int
    bits: int
    warps: int
    ring: int
    tiles: int

    @property
    def tokens(self) -> int:
        """Tiles of 16 tokens that a warp takes at a time. Two of a quantised cache: one lets its instructions wait."""
        return 1 if self.bits == PLAIN_BITS else 2

    @property
    def defines(self) -> dict[str, int]:
        return {
            "HEAD_DIM": self.size, "CACHE_BITS": self.bits, "WARPS": self.warps, "RING": self.ring,
            "QTILES": self.tiles, "TILES": self.tokens,
        }  # fmt: skip

    def dynamic(self, rows: int) -> int:
        """Bytes of shared memory that it is launched with for `rows` tokens."""
        padded = self.size if self.bits == PLAIN_BITS else -(-self.size // 32) * 32
        pitch = padded + 8 if self.bits == PLAIN_BITS else padded + 32 * (padded % 64 == 0)
        fresh = 2 * rows * pitch * 2 if self.bits == PLAIN_BITS else 4 * tokens_bytes(self.size, self.bits)
        return 8 * self.tiles * pitch * 2 + self.warps * self._each + fresh

    @property
    def shared(self) -> int:
        """The most shared memory that it takes in all."""
        return self.dynamic(MAX_ROWS) + self.warps * (8 * self.tiles * 8 + self.size * 4) + 64

    @property
    def _each(self) -> int:
        """Bytes of a warp: its ring, whose memory its sums take over."""
        return max(self.ring * self.tokens * tokens_bytes(self.size, self.bits), 8 * self.tiles * (self.size + 4) * 4)


def tokens_bytes(size: int, bits: int) -> int:
    """Bytes of 16 tokens' keys (or values) of one head in shared memory."""
    return TOKENS * ((size + 8) * 2 if bits == PLAIN_BITS else CacheFormat(bits, size).row_bytes)


def max_tiles(size: int) -> int:
    return 3 if size <= SMALL_DIM else 2


def choose_shape(queries: int, size: int, bits: int, shared: int) -> Shape:
    """The shape for `queries` per group (tokens times heads) within `shared` bytes. Warps and ring are the same for all
    `queries`: a token's sums must not depend on how many tokens there are (see attention.cu)."""
    most = max_tiles(size)
    blocks = -(-queries // (8 * most))
    tiles = -(-queries // (8 * blocks))
    for warps in (8, 4, 2, 1):
        each = warps * Shape(size, bits, warps, 1, 1).tokens * tokens_bytes(size, bits)
        ring = max(3, min(8, 1 + -(-ON_THEIR_WAY // each)))
        if ring * each <= RING_BYTES and Shape(size, bits, warps, ring, most).shared <= shared:
            return Shape(size, bits, warps, ring, tiles)
    return Shape(size, bits, 1, 2, tiles)


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
            qkv, count_parts(qkv), _turning(head_norm, store), store.position, q, layer, _stride(layer),
            _or_none(store.pages), _or_none(store.last), heads.queries, heads.groups,
        )  # fmt: skip
        return q

    def attention(
        self, qkv: Tensor, head_norm: Norm | None, store: Store, layer: Tensor, heads: Heads, window: int | None,
        into: Weight,
    ) -> Tensor:  # fmt: skip
        """An Attend of up to MAX_ROWS tokens from `store.position` on, over `layer` [2, G, S, D or row_bytes]."""
        count, size = qkv.shape[-2], heads.size
        queries = count * (heads.queries // heads.groups)
        shape = choose_shape(queries, size, store.bits, self._shared)
        blocks = -(-queries // (8 * shape.tiles)) * heads.groups
        splits = min(MAX_SPLITS, max(1, self._processors // heads.groups))
        out, places = self._activations(count, heads.queries * size, into)
        partial = torch.empty(blocks, splits, 8 * shape.tiles, size + 2, device=self._device)
        problem = np.zeros((), PROBLEM)
        tensors = {"qkv": qkv, "cache": layer, "position": store.position, "out": out, "partial": partial,
                   "arrived": self._arrived}  # fmt: skip
        for name, tensor in tensors.items():
            problem[name] = tensor.data_ptr()
        problem["turning"] = _turning(head_norm, store)
        problem["places"] = places.data_ptr() if isinstance(places, Tensor) else 0
        problem["stats"] = partial.data_ptr() + 4 * size * partial[..., 0].numel()
        problem["stride"], problem["parts"], problem["rows"] = _stride(layer), count_parts(qkv), count
        problem["heads"], problem["groups"], problem["window"] = heads.queries, heads.groups, window or 0
        problem["scale"], problem["cap"] = heads.scale, heads.cap or 0
        kernel = load("attention.cu", f"attention_{suffix(qkv)}", self._device, **shape.defines)
        kernel.launch((splits, blocks), shape.warps * 32, shape.dynamic(count), problem)
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
        store = self.store
        q = self.ops.rope_cache(qkv, head_norm, store, self.layer, self.heads)
        pages = None
        if store.pages is not None:
            pages = Pages(store.pages[0], None if store.last is None else store.position, store.last)
        return prefill_attention(q, self.layer, store.length, self.heads, self.window, store.bits, pages)


def _or_none(tensor: Tensor | None) -> Argument:
    """A pointer, which may be null."""
    return np.array(0, np.uint64) if tensor is None else tensor


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
