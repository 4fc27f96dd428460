"""A KV cache as a pool of pages, and how tokens of several sequences look each at its own text in one step.

The pool is the memory of a `KVCache`, [layers, 2, G, pages, 256, D]: a sequence's pages may lie anywhere in it. Our
kernels follow page tables; elsewhere pages that are apart are gathered.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from exl2chat.engine.cache import PAGE, KVCache
from exl2chat.engine.pages import PageCopy
from exl2chat.engine.scheduler import Row
from exl2chat.ops import Ops, reference
from exl2chat.ops.attention import PLAIN_BITS, Attend, Heads
from exl2chat.ops.cache_format import TOKENS, CacheFormat, rotate
from exl2chat.ops.packed import Norm, Weight


class PagedCache:
    """The pages of `cache`, which nobody else may use meanwhile."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.pages = cache.storage.shape[3]

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """Carry out page copies, in their order."""
        storage = self.cache.storage
        for copy in copies:
            end = -(-copy.tokens // TOKENS) * TOKENS  # whole tiles, in which a quantised cache mixes tokens' bytes
            storage[:, :, :, copy.target, :end] = storage[:, :, :, copy.source, :end]

    def store(self, position: Tensor, pages: Tensor, last: Tensor | None = None, length: int = 0) -> "PagedStore":
        """The pages of sequences, as ops know a cache: see there."""
        cache = self.cache
        return PagedStore(cache.storage, cache.bits, cache.cos, cache.sin, position, pages, last, length)

    def attends(self, ops: Ops, rows: Sequence[Row], heads: Heads, windows: Sequence[int | None]) -> Sequence[Attend]:
        """Each layer's attention in a step that runs the tokens of all `rows`, one row after another."""
        if ops.recorded_rows:
            return self._by_kernels(ops, rows, heads, windows)
        device = self.cache.storage.device
        written = torch.cat([_places(row, device) for row in rows])
        positions = torch.cat([torch.arange(row.start, row.start + len(row.tokens)) for row in rows]).to(device)
        cos, sin = self.cache.cos[positions], self.cache.sin[positions]
        views = {window: [_view(row, window, device) for row in rows] for window in set(windows)}
        layers = self.cache.storage
        attend: Callable[..., Attend] = _PagedAttend
        if self.cache.bits != PLAIN_BITS:
            shape = CacheFormat(self.cache.bits, heads.size)
            layers = layers.flatten(1, 2).flatten(3, 4).unflatten(3, (-1, TOKENS * shape.row_bytes))  # type: ignore[no-untyped-call]
            attend = partial(_QuantizedPagedAttend, shape=shape)
        return [
            attend(heads, cos, sin, layer, written, views[window])
            for layer, window in zip(layers.unbind(0), windows, strict=True)
        ]

    def _by_kernels(
        self, ops: Ops, rows: Sequence[Row], heads: Heads, windows: Sequence[int | None]
    ) -> Sequence[Attend]:
        """A launch for each row."""
        device = self.cache.storage.device
        alone = []
        for row in rows:
            position = torch.tensor([row.start], dtype=torch.int32, device=device)
            pages = torch.tensor([row.pages], dtype=torch.int32, device=device)
            alone.append(ops.attends(self.store(position, pages, length=row.start), len(row.tokens), heads, windows))
        counts = [len(row.tokens) for row in rows]
        return alone[0] if len(rows) == 1 else [_OneByOne(layer, counts) for layer in zip(*alone, strict=True)]


@dataclass(slots=True)
class PagedStore:
    """A Store (ops.attention) of sequences whose pages lie anywhere: that of page i of sequence b is pages[b, i]."""

    storage: Tensor
    bits: int
    cos: Tensor
    sin: Tensor
    position: Tensor
    pages: Tensor | None
    last: Tensor | None
    length: int


@dataclass(frozen=True, slots=True)
class _OneByOne:
    """An Attend of several sequences with `counts` new tokens each, which follow each other in qkv."""

    attends: Sequence[Attend]
    counts: Sequence[int]

    def __call__(self, qkv: Tensor, head_norm: Norm | None, into: Weight) -> Tensor:  # noqa: ARG002
        parts = qkv.split_with_sizes(list(self.counts), -2)
        outs = [attend(part.contiguous(), head_norm, ANY) for attend, part in zip(self.attends, parts, strict=True)]
        return torch.cat(outs)


@dataclass(frozen=True, slots=True)
class _AnyWeight:
    """For an Attend whose result is to be plain [T, H * D], whatever takes it."""

    nbytes: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        return x


ANY = _AnyWeight()


@dataclass(frozen=True, slots=True)
class _View:
    """What `count` tokens of a step, one sequence's, look at: the `reach` tokens before `end`, counted from the first
    of `pages` on, and a mask as `visible` made it."""

    count: int
    pages: slice | Tensor
    end: int
    reach: int
    mask: Tensor | None

    def read(self, layer: Tensor, dim: int) -> Tensor:
        """The pages out of dimension `dim` of a layer, and what they are made of in one: a view where they follow each
        other."""
        if isinstance(self.pages, slice):
            found = layer.narrow(dim, self.pages.start, self.pages.stop - self.pages.start)
        else:
            found = layer.index_select(dim, self.pages)
        return found.flatten(dim, dim + 1)


@dataclass(frozen=True, slots=True)
class _PagedAttend:
    """An Attend over `layer` [2, G, pages, 256, D]. The tokens, turned by cos and sin [T, 1, 2, R / 2], go to the
    places `written` [T] of its pages; then each sequence looks at its own."""

    heads: Heads
    cos: Tensor
    sin: Tensor
    layer: Tensor
    written: Tensor
    views: Sequence[_View]

    def __call__(self, qkv: Tensor, head_norm: Norm | None, into: Weight) -> Tensor:  # noqa: ARG002
        qkv = qkv.sum(0) if qkv.dim() == 3 else qkv  # partial sums of the GPU's matrices
        q, kv = reference.turn(qkv, self.heads, head_norm, self.cos, self.sin)
        self.write(kv)
        parts = q.split_with_sizes([view.count for view in self.views])
        return torch.cat([self.look(part, view) for part, view in zip(parts, self.views, strict=True)])

    def write(self, kv: Tensor) -> None:
        """Keys and values [T, 2 * G, D] of the step."""
        new = kv.unflatten(1, (2, -1)).permute(1, 2, 0, 3)  # type: ignore[no-untyped-call]
        self.layer.flatten(2, 3).index_copy_(2, self.written, new.to(self.layer.dtype))

    def look(self, q: Tensor, view: _View) -> Tensor:
        """Attention of one sequence's queries [T, H, D]."""
        found = view.read(self.layer, 2)[:, :, view.end - view.reach : view.end].unsqueeze(1)
        return reference.attention(q, found[0], found[1], self.heads.scale, view.mask, self.heads.cap)


@dataclass(frozen=True, slots=True)
class _QuantizedPagedAttend(_PagedAttend):
    """The same over tiles: layer [2 * G, pages, 16, bytes]."""

    shape: CacheFormat

    def write(self, kv: Tensor) -> None:
        self.shape.put(self.layer.flatten(1, 2), self.written, self.shape.quantize(rotate(kv)).transpose(0, 1))

    def look(self, q: Tensor, view: _View) -> Tensor:
        tiles = view.read(self.layer, 1)
        return reference.quantized_attention(q, self.heads, self.shape, tiles, view.end, view.reach, view.mask)


def _places(row: Row, device: torch.device) -> Tensor:
    """Where each token of the row is, int64 [n]."""
    positions = torch.arange(row.start, row.start + len(row.tokens))
    return (torch.tensor(row.pages)[positions // PAGE] * PAGE + positions % PAGE).to(device)


def _view(row: Row, window: int | None, device: torch.device) -> _View:
    """What the tokens of a row look at within `window`."""
    count, total = len(row.tokens), row.start + len(row.tokens)
    reach = total if window is None else min(total, window + count - 1)
    first = (total - reach) // PAGE
    numbers = row.pages[first : -(-total // PAGE)]
    together = numbers == tuple(range(numbers[0], numbers[0] + len(numbers)))
    pages = slice(numbers[0], numbers[-1] + 1) if together else torch.tensor(numbers, device=device)
    return _View(count, pages, total - first * PAGE, reach, reference.visible(count, reach, window, device))
