"""The ops through our CUDA kernels (exl2chat/kernels), for float16 models. Contracts: `exl2chat.ops.reference`.

Activations between ops are float16, the residual stream and logits float32; matrices may give float16 or float32. Few
rows pass between packed matrices as these take and give them: fragments, and partial sums (kernels/rows.cuh).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exl2chat import kernels
from exl2chat.kernels import Argument, Kernel
from exl2chat.ops.attention import Heads, Store
from exl2chat.ops.cuda_prefill import prefill_attention
from exl2chat.ops.packed import Norm, Weight
from exl2chat.ops.tiled import TiledWeight

MAX_ROWS = 16
MAX_WIDTH = 16384  # of a row that norm.cu holds in registers: 1024 threads, 4 * 4 numbers each
MAX_HEAD_DIM = 256
TILE = 16
MAX_SPLITS = 128
ROPE_WARPS = 8  # of a block of rope_cache.cu
MAX_TILED_DIM = 128  # two tiles of queries of larger heads do not fit the registers
# Warps and stages of attention.cu, best first: the first that fits the shared memory is taken.
SHAPES = ((8, 3), (4, 3), (4, 2), (2, 2), (1, 2))

# The structs of rope.cuh and attention.cu
TURNING = [("scale", np.uint64), ("floor", np.uint64), ("cos", np.uint64), ("sin", np.uint64), ("rotary", np.int64)]
PROBLEM = np.dtype(
    [("qkv", np.uint64), ("turning", TURNING)]
    + [(name, np.uint64) for name in ("cache", "position", "places", "out", "partial", "stats", "arrived")]
    + [("room", np.int64)]
    + [(name, np.int32) for name in ("parts", "rows", "heads", "groups", "window")]
    + [("scale", np.float32), ("cap", np.float32), ("padding", np.int32)]
)


def supports(dtype: torch.dtype, head_dim: int, hidden: int, inner: int) -> bool:
    """Whether the kernels can run a model (see `ops.select`)."""
    heads = head_dim % TILE == 0 and head_dim <= MAX_HEAD_DIM
    return dtype == torch.float16 and heads and hidden % 4 == 0 and hidden <= MAX_WIDTH and inner % 4 == 0


class CudaOps:
    """The ops on one device. One step at a time: the attention kernel keeps count of its blocks in `arrived`."""

    recorded_rows = MAX_ROWS

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrived = torch.zeros(1 << 14, dtype=torch.int32, device=device)
        properties = torch.cuda.get_device_properties(device)
        self._processors = properties.multi_processor_count
        self._shared = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]

    def embed(self, tokens: Tensor, table: Tensor, factor: float) -> Tensor:
        size = table.shape[1]
        x = torch.empty(tokens.shape[0], size, device=self._device)
        kernel, threads = self._row_kernel(f"embed_{_suffix(table)}", size)
        kernel.launch((tokens.shape[0], 1), threads, 0, tokens, table, _float(factor), x, size)
        return x

    def norm(self, x: Tensor, norm: Norm, into: Weight) -> Tensor:
        rows, size = x.shape
        y, places = self._activations(rows, size, into)
        kernel, threads = self._row_kernel("norm_only", size)
        kernel.launch((rows, 1), threads, 2 * size, x, norm.scale, norm.floor, places, y, size)
        return y

    def add_norm(self, x: Tensor, out: Tensor, post: Norm | None, norm: Norm, into: Weight) -> Tensor:
        rows, size = x.shape
        y, places = self._activations(rows, size, into)
        sandwich = (_NOWHERE, _NOWHERE) if post is None else (post.scale, post.floor)
        kernel, threads = self._row_kernel(f"add_norm_{_suffix(out)}", size)
        kernel.launch(
            (rows, 1), threads, 2 * size, x, out, _parts(out), *sandwich, norm.scale, norm.floor, places, y, size
        )  # fmt: skip
        return y

    def gate(self, x: Tensor, activation: str, into: Weight) -> Tensor:
        rows, inner = x.shape[-2], x.shape[-1] // 2
        y, places = self._activations(rows, inner, into)
        kernel = kernels.load("gate.cu", f"{activation}_{_suffix(x)}", self._device)
        kernel.launch((-(-inner // 512), rows), 128, 0, x, _parts(x), places, y, inner)
        return y

    def logits(self, out: Tensor, cap: float | None) -> Tensor:
        rows, size = out.shape[-2:]
        if _parts(out) == 1 and out.dtype == torch.float32 and cap is None:
            return out.view(rows, size)
        y = torch.empty(rows, size, device=self._device)
        kernel = kernels.load("gate.cu", f"logits_{_suffix(out)}", self._device)
        kernel.launch((-(-y.numel() // 256), 1), 256, 0, out, _parts(out), y, _float(cap or 0), y.numel())
        return y

    def attends(self, store: Store, count: int, heads: Heads, windows: Sequence[int | None]) -> "list[_Attend]":
        """As the reference; with up to MAX_ROWS tokens, nothing in it depends on `store.length`."""
        layers = store.storage.flatten(3, 4).unbind(0)
        prompt = count > MAX_ROWS
        return [_Attend(self, store, layer, heads, w, prompt) for layer, w in zip(layers, windows, strict=True)]

    def rope_cache(self, qkv: Tensor, head_norm: Norm | None, store: Store, layer: Tensor, heads: Heads) -> Tensor:
        """The queries of qkv, normalised and turned, float16 [T, H, D]; its keys and values go to `layer`
        [2, G, S, D] from `store.position` on."""
        count, size = qkv.shape[-2], heads.size
        q = torch.empty(count, heads.queries, size, dtype=torch.float16, device=self._device)
        kernel = kernels.load("rope_cache.cu", f"rope_cache_{_suffix(qkv)}", self._device, HEAD_DIM=size)
        kernel.launch(
            (-(-(heads.queries + 2 * heads.groups) // ROPE_WARPS), count), 32 * ROPE_WARPS, 0,
            qkv, _parts(qkv), _turning(head_norm, store), store.position, q, layer, heads.queries, heads.groups,
            np.array(layer.shape[2], np.int64),
        )  # fmt: skip
        return q

    def attention(
        self, qkv: Tensor, head_norm: Norm | None, store: Store, layer: Tensor, heads: Heads, window: int | None,
        into: Weight,
    ) -> Tensor:  # fmt: skip
        """An Attend of up to MAX_ROWS tokens from `store.position` on, over `layer` [2, G, S, D]."""
        count, size = qkv.shape[-2], heads.size
        share = heads.queries // heads.groups
        tiles = 2 if count * share > TILE and size <= MAX_TILED_DIM else 1
        warps, stages = next(
            shape for shape in SHAPES if shape == SHAPES[-1] or _shared(tiles, *shape, size) <= self._shared
        )
        blocks = -(-count * share // (tiles * TILE)) * heads.groups
        splits = min(MAX_SPLITS, max(1, self._processors // blocks))
        out, places = self._activations(count, heads.queries * size, into)
        partial = torch.empty(blocks, splits, tiles * TILE, size + 2, device=self._device)
        problem = np.zeros((), PROBLEM)
        tensors = {"qkv": qkv, "cache": layer, "position": store.position, "out": out, "partial": partial,
                   "arrived": self._arrived}  # fmt: skip
        for name, tensor in tensors.items():
            problem[name] = tensor.data_ptr()
        problem["turning"] = _turning(head_norm, store)
        problem["places"] = places.data_ptr() if isinstance(places, Tensor) else 0
        problem["stats"] = partial.data_ptr() + 4 * size * partial[..., 0].numel()
        problem["room"], problem["parts"], problem["rows"] = layer.shape[2], _parts(qkv), count
        problem["heads"], problem["groups"], problem["window"] = heads.queries, heads.groups, window or 0
        problem["scale"], problem["cap"] = heads.scale, heads.cap or 0
        kernel = kernels.load(
            "attention.cu", f"attention_{_suffix(qkv)}", self._device,
            HEAD_DIM=size, WARPS=warps, STAGES=stages, QTILES=tiles,
        )  # fmt: skip
        kernel.launch((splits, blocks), warps * 32, _dynamic(tiles, warps, stages, size), problem)
        return out

    def _activations(self, rows: int, width: int, into: Weight) -> tuple[Tensor, Argument]:
        """Memory for float16 activations in the form that `into` takes, and where each column goes in it."""
        if isinstance(into, TiledWeight) and rows <= into.most_rows:
            return torch.empty(width // 32, rows, 4, 8, dtype=torch.float16, device=self._device), into.places
        return torch.empty(rows, width, dtype=torch.float16, device=self._device), _NOWHERE

    def _row_kernel(self, name: str, size: int) -> tuple[Kernel, int]:
        """A kernel of norm.cu for rows of `size`, and how many threads take one."""
        threads = min(1024, -(-size // 128) * 32)
        units = next(units for units in (1, 2, 4) if units * threads * 4 >= size)
        return kernels.load("norm.cu", name, self._device, UNITS=units), threads


@dataclass(frozen=True, slots=True)
class _Attend:
    """An Attend, of a few tokens or of a prompt."""

    ops: CudaOps
    store: Store
    layer: Tensor
    heads: Heads
    window: int | None
    prompt: bool

    def __call__(self, qkv: Tensor, head_norm: Norm | None, into: Weight) -> Tensor:
        if not self.prompt:
            return self.ops.attention(qkv, head_norm, self.store, self.layer, self.heads, self.window, into)
        q = self.ops.rope_cache(qkv, head_norm, self.store, self.layer, self.heads)
        return prefill_attention(q, self.layer, self.store.length, self.heads, self.window)


_NOWHERE = np.array(0, np.uint64)


def _float(value: float) -> NDArray[np.float32]:
    return np.array(value, np.float32)


def _parts(x: Tensor) -> int:
    """How many partial sums x is made of."""
    return x.shape[0] if x.dim() == 3 else 1


def _suffix(x: Tensor) -> str:
    """How the kernels call the dtype of their input."""
    return {torch.float16: "half", torch.bfloat16: "bfloat", torch.float32: "float"}[x.dtype]


def _turning(head_norm: Norm | None, store: Store) -> NDArray[np.void]:
    """The struct Turning of rope.cuh."""
    turning = np.zeros((), TURNING)
    if head_norm is not None:
        turning["scale"], turning["floor"] = head_norm.scale.data_ptr(), head_norm.floor.data_ptr()
    turning["cos"], turning["sin"] = store.cos.data_ptr(), store.sin.data_ptr()
    turning["rotary"] = 2 * store.cos.shape[-1]
    return turning


def _dynamic(tiles: int, warps: int, stages: int, size: int) -> int:
    """Bytes of shared memory that attention.cu is launched with."""
    return (tiles * TILE + warps * stages * 2 * TILE) * 2 * (size + 8)


def _shared(tiles: int, warps: int, stages: int, size: int) -> int:
    """All of attention.cu's shared memory: what it declares itself, too."""
    return _dynamic(tiles, warps, stages, size) + warps * (tiles * TILE * 8 + size * 4) + 64
