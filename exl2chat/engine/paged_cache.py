"""A KV cache as a pool of pages, and how tokens of several sequences look each at its own text in one step.

The pool is the memory of a `KVCache`, [layers, 2, G, pages, 256, D]: a sequence's pages may lie anywhere in it. Our
kernels follow page tables; elsewhere pages that are apart are gathered.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from exl2chat.engine.cache import PAGE, KVCache
from exl2chat.engine.pages import PageCopy
from exl2chat.engine.scheduler import Row
from exl2chat.errors import UsageError
from exl2chat.ops import Ops, reference
from exl2chat.ops.attention import Attend, Heads
from exl2chat.ops.packed import Norm, Weight


class PagedCache:
    """The pages of `cache`, which nobody else may use meanwhile. UsageError for a quantised one."""

    def __init__(self, cache: KVCache) -> None:
        if not cache.storage.is_floating_point():
            raise UsageError("a paged cache cannot be quantised yet", "use one of full precision")
        self.cache = cache
        self.pages = cache.storage.shape[3]

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """Carry out page copies, in their order."""
        storage = self.cache.storage
        for copy in copies:
            storage[:, :, :, copy.target, : copy.tokens] = storage[:, :, :, copy.source, : copy.tokens]

    def store(self, position: Tensor, pages: Tensor, last: Tensor | None = None, length: int = 0) -> "PagedStore":
        """The pages of sequences, as ops know a cache: see there."""
        cache = self.cache
        return PagedStore(cache.storage, cache.bits, cache.cos, cache.sin, position, pages, last, length)

    def attends(self, ops: Ops, rows: Sequence[Row], heads: Heads, windows: Sequence[int | None]) -> Sequence[Attend]:
        """Each layer's attention in a step that runs the tokens of all `rows`, one row after another."""
        if ops.recorded_rows:
            return self._by_kernels(ops, rows, heads, windows)
        device = self.cache.storage.device
        texts = [_places(row, device) for row in rows]
        news = [places[row.start :] for row, places in zip(rows, texts, strict=True)]
        positions = [torch.arange(row.start, row.start + len(row.tokens)) for row in rows]
        where = torch.cat(positions).to(device)
        cos, sin = self.cache.cos[where], self.cache.sin[where]
        written = torch.cat(news)
        views = {window: _views(rows, texts, window) for window in set(windows)}
        layers = self.cache.storage.flatten(3, 4).unbind(0)
        return [
            _PagedAttend(heads, cos, sin, layer, written, views[window])
            for layer, window in zip(layers, windows, strict=True)
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
    """What `count` tokens of a step, one sequence's, look at: places in a layer, and a mask as `visible` made it."""

    count: int
    places: slice | Tensor
    mask: Tensor | None

    def read(self, layer: Tensor) -> Tensor:
        """Keys and values [2, 1, G, S, D] from layer [2, G, places, D]; a view where the pages follow each other."""
        found = layer[:, :, self.places] if isinstance(self.places, slice) else layer.index_select(2, self.places)
        return found.unsqueeze(1)


@dataclass(frozen=True, slots=True)
class _PagedAttend:
    """An Attend over `layer` [2, G, places, D]. The tokens, turned by cos and sin [T, 1, 2, R / 2], go to the places
    `written` [T]; then each sequence looks at its own."""

    heads: Heads
    cos: Tensor
    sin: Tensor
    layer: Tensor
    written: Tensor
    views: tuple[_View, ...]

    def __call__(self, qkv: Tensor, head_norm: Norm | None, into: Weight) -> Tensor:  # noqa: ARG002
        heads = self.heads
        qkv = qkv.sum(0) if qkv.dim() == 3 else qkv  # partial sums of the GPU's matrices
        q, kv = reference.turn(qkv, heads, head_norm, self.cos, self.sin)
        new = kv.reshape(-1, 2, heads.groups, heads.size).permute(1, 2, 0, 3)
        self.layer.index_copy_(2, self.written, new.to(self.layer.dtype))
        parts = []
        for queries, view in zip(q.split_with_sizes([view.count for view in self.views]), self.views, strict=True):
            keys, values = view.read(self.layer)
            parts.append(reference.attention(queries, keys, values, heads.scale, view.mask, heads.cap))
        return torch.cat(parts)


def _places(row: Row, device: torch.device) -> Tensor:
    """Where each token of the row's text is, those of this step included, int64 [n]."""
    firsts = torch.tensor(row.pages, device=device).unsqueeze(1) * PAGE
    return (firsts + torch.arange(PAGE, device=device)).flatten()[: row.start + len(row.tokens)]


def _views(rows: Sequence[Row], texts: Sequence[Tensor], window: int | None) -> tuple[_View, ...]:
    """What the tokens of each row look at within `window`."""
    views = []
    for row, places in zip(rows, texts, strict=True):
        count, total = len(row.tokens), len(places)
        reach = total if window is None else min(total, window + count - 1)
        mask = reference.visible(count, reach, window, places.device)
        first = row.pages[0] * PAGE
        together = row.pages == tuple(range(row.pages[0], row.pages[0] + len(row.pages)))
        seen = slice(first + total - reach, first + total) if together else places[total - reach :]
        views.append(_View(count, seen, mask))
    return tuple(views)
