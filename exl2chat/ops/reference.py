"""Every op in plain torch: the backend of the CPU, and the truth that kernels are compared with.

Shapes: T tokens of this step, S tokens the queries may look at, H query heads, G key/value heads, D head size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from exl2chat.ops.attention import PLAIN_BITS, Heads, Store
from exl2chat.ops.cache_decode import AT_ONCE, basis, change, decode
from exl2chat.ops.cache_format import TOKENS, CacheFormat, rotate
from exl2chat.ops.packed import Norm, Weight

recorded_rows = 0


def embed(tokens: Tensor, table: Tensor, factor: float) -> Tensor:
    """Rows of table [V, hidden], of any float dtype, times `factor`: tokens int64 [T] to float32 [T, hidden]."""
    x = F.embedding(tokens, table).float()
    return x if factor == 1 else x.mul_(factor)


def norm(x: Tensor, norm: Norm, into: Weight) -> Tensor:  # noqa: ARG001
    """rms_norm of the residual stream, float32 [T, hidden]; in the dtype that matrices are given."""
    return rms_norm(x, norm)


def add_norm(x: Tensor, out: Tensor, post: Norm | None, norm: Norm, into: Weight) -> Tensor:  # noqa: ARG001
    """Add `out` [T, hidden], of any float dtype, to the residual stream x in place, itself normalised by `post` where
    there are sandwich norms; norm(x)."""
    x += out if post is None else rms_norm(out.float(), post)
    return rms_norm(x, norm)


@dataclass(frozen=True, slots=True)
class View:
    """The cache as one layer sees it in one step (an Attend): `new` [T, 2 * G, D], keys before values, to be written,
    keys and values [1, G, S, D], which end in the same memory, within the layer's window, `mask` as `visible` made it.
    """

    heads: Heads
    cos: Tensor
    sin: Tensor
    new: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None

    def __call__(self, qkv: Tensor, head_norm: Norm | None, into: Weight) -> Tensor:  # noqa: ARG002
        q, kv = turn(qkv, self.heads, head_norm, self.cos, self.sin)
        self.new.copy_(kv)
        return attention(q, self.keys, self.values, self.heads.scale, self.mask, self.heads.cap)


@dataclass(frozen=True, slots=True)
class QuantizedView:
    """A quantised cache as one layer sees it in one step (an Attend): `memory` [2 * G, tiles, bytes], keys before
    values, of which the tokens [start, start + T) are written and the last `reach` read; `mask` as `visible` made it.
    """

    heads: Heads
    cos: Tensor
    sin: Tensor
    shape: CacheFormat
    memory: Tensor
    start: int
    reach: int
    mask: Tensor | None

    def __call__(self, qkv: Tensor, head_norm: Norm | None, into: Weight) -> Tensor:  # noqa: ARG002
        q, kv = turn(qkv, self.heads, head_norm, self.cos, self.sin)
        self.shape.write(self.memory, self.start, self.shape.quantize(rotate(kv)).transpose(0, 1))
        end = self.start + len(q)
        return quantized_attention(q, self.heads, self.shape, self.memory, end, self.reach, self.mask)


def turn(qkv: Tensor, heads: Heads, head_norm: Norm | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [T, H, D], and keys and values [T, 2 * G, D] of qkv, float32, after head norm and RoPE."""
    qkv = qkv.float().view(qkv.shape[0], -1, heads.size)
    turning = qkv[:, : -heads.groups]
    if head_norm is not None:
        turning.copy_(rms_norm(turning, head_norm))
    rope_(turning, cos, sin)
    q, kv = qkv.split_with_sizes((heads.queries, 2 * heads.groups), 1)
    return q, kv


def attends(store: Store, count: int, heads: Heads, windows: Sequence[int | None]) -> Sequence[View | QuantizedView]:
    """Each layer's view of the cache in a step of `count` tokens after `store.length`, of one sequence, whose pages
    follow one another. A mask is made once a window."""
    start, total = store.length, store.length + count
    cos, sin = store.cos[start:total], store.sin[start:total]
    reaches = [total if window is None else min(total, window + count - 1) for window in windows]
    masks: dict[int | None, Tensor | None] = {}
    for window, reach in zip(windows, reaches, strict=True):
        if window not in masks:
            masks[window] = visible(count, reach, window, store.storage.device)
    if store.bits != PLAIN_BITS:
        shape = CacheFormat(store.bits, heads.size)
        layers = store.storage.flatten(1, 2).flatten(2, 4).unflatten(2, (-1, TOKENS * shape.row_bytes)).unbind(0)  # type: ignore[no-untyped-call]
        return [
            QuantizedView(heads, cos, sin, shape, layer, start, reach, masks[window])
            for layer, reach, window in zip(layers, reaches, windows, strict=True)
        ]
    rows = store.storage.flatten(3, 4)
    seen = rows[:, :, :, :total].unsqueeze(2)
    written = rows[:, :, :, start:total].flatten(1, 2).transpose(1, 2)
    views = []
    for window, reach, new, keys, values in zip(
        windows, reaches, written.unbind(0), seen[:, 0].unbind(0), seen[:, 1].unbind(0), strict=True
    ):
        if reach < total:
            keys, values = keys[:, :, -reach:], values[:, :, -reach:]
        views.append(View(heads, cos, sin, new, keys, values, masks[window]))
    return views


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, as x / hypot(|x|, floor) * scale: the same numbers
    in four operations (4.6 us a row of 576) where F.rms_norm takes six (9.3 us)."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return (x / torch.hypot(length, norm.floor)).mul_(norm.scale)


def rope_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn the first R dimensions of x [T, H, D] in place, by cos and sin [T, 1, 2, R / 2] (see engine/rope.py)."""
    half = cos.shape[-1]
    turning = x if 2 * half == x.shape[-1] else x[..., : 2 * half]
    halves = turning.view(x.shape[0], -1, 2, half)
    swapped = halves.flip(2)
    halves.mul_(cos).addcmul_(swapped, sin)


def visible(count: int, total: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which of the last `total` tokens each of the last `count` may look at, as bool [count, total]: those before it
    and itself, within `window`. None where plain causal order says it all.

    Not as an addend: torch on a GPU takes one in float32 beside float16 queries, and answers with NaN (torch 2.11).
    """
    if (count == 1 or count == total) and (window is None or total <= window):
        return None
    behind = torch.arange(total - count, total, device=device).unsqueeze(1) - torch.arange(total, device=device)
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def attention(q: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None, cap: float | None) -> Tensor:
    """softmax(cap(q.k * scale)).v where `mask` of `visible` allows: q [T, H, D], keys, values [1, G, S, D]; [T, H * D].

    Queries of head h use key/value head h // (H / G). cap(s) is c * tanh(s / c), nothing where `cap` is None.
    """
    count, heads, size = q.shape
    query = q.view(1, heads, 1, size) if count == 1 else q.transpose(0, 1).unsqueeze(0)  # a view less per token
    if query.dtype != keys.dtype:
        query = query.to(keys.dtype)
    if cap is not None:
        out = _capped_attention(query, keys, values, scale, mask, cap)
    else:
        out = F.scaled_dot_product_attention(
            query, keys, values, mask, is_causal=mask is None and count > 1, scale=scale, enable_gqa=True
        )
    return out.view(1, -1) if count == 1 else out.squeeze(0).transpose(0, 1).reshape(count, -1)


def quantized_attention(
    q: Tensor, heads: Heads, shape: CacheFormat, memory: Tensor, end: int, reach: int, mask: Tensor | None
) -> Tensor:
    """`attention` of q [T, H, D] over the `reach` tokens before `end` in memory [2 * G, tiles, bytes], keys before
    values.

    Queries are rotated as the format wants it, and what comes out is rotated back. What is read is decoded for each
    step anew, some groups at a time: in benchmarks/NOTES.md, what that takes.
    """
    matrix = basis(shape, q.device)
    q = change(q, matrix)
    share, step = heads.queries // heads.groups, max(1, AT_ONCE // (reach * heads.size))
    outs = []
    for first in range(0, heads.groups, step):
        keys, values = (
            decode(shape, part[first : first + step], end - reach, end).unsqueeze(0) for part in memory.chunk(2)
        )
        some = q[:, first * share : (first + step) * share]
        outs.append(attention(some, keys, values, heads.scale, mask, heads.cap))
    return change(outs[0] if len(outs) == 1 else torch.cat(outs, 1), matrix.T)


def _capped_attention(q: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None, cap: float) -> Tensor:
    """Attention over [1, H, T, D] spelled out: torch's fused one has no soft cap."""
    share, count = q.shape[1] // keys.shape[1], q.shape[2]
    keys, values = keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)
    scores = softcap((q @ keys.transpose(-1, -2)).float() * scale, cap)
    if mask is None and count > 1:
        mask = torch.ones((count, count), dtype=torch.bool, device=q.device).tril_()
    if mask is not None:
        scores.masked_fill_(~mask, -math.inf)
    return torch.softmax(scores, -1).to(values.dtype) @ values


def gate(x: Tensor, activation: str, into: Weight) -> Tensor:  # noqa: ARG001
    """activation(gate) * up: x [T, 2 * I] holds gate, then up; [T, I]. "silu", or "gelu_tanh" (the tanh formula)."""
    opened, up = x.chunk(2, -1)
    return (F.silu(opened) if activation == "silu" else F.gelu(opened, approximate="tanh")).mul_(up)


def logits(out: Tensor, cap: float | None) -> Tensor:
    """What the head gave, of any float dtype, in float32, soft-capped where there is a cap."""
    return out.float() if cap is None else softcap(out.float(), cap)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap): within (-cap, cap)."""
    return torch.tanh(x / cap).mul_(cap)
