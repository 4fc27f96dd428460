"""What attention is told: the heads of a model, the memory of their keys and values, and a layer's place in it."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from exl2chat.ops.packed import Norm, Weight

PLAIN_BITS = 16  # of a cache that is not quantised


@dataclass(frozen=True, slots=True)
class Heads:
    """H query heads, of which H / G share each of G key/value heads, of `size` dimensions. q.k is multiplied by `scale`
    and, with a soft cap, becomes cap * tanh(s / cap)."""

    queries: int
    groups: int
    size: int
    scale: float
    cap: float | None


class Store(Protocol):
    """A KV cache: storage [layers, 2, G, pages, page, D] of the tokens of B sequences, `position` int32 [B] of each, on
    the device; cos and sin [positions, 1, 2, R / 2] (engine/rope.py).

    Page i of sequence b is pages[b, i] of the storage, int32 [B, most] on the device; without `pages` B is 1 and the
    pages follow one another. Only what reaches the last token of a step counts. Prompts are of one sequence, whose
    position the host knows as `length`. Or, so that a graph can repeat their step, the device alone knows `position`
    and that of the last token, `last` int32 [1]: what comes behind it fills the step up, and nothing is kept of it.
    Then there are pages.

    With `bits` of 4, 6 or 8 storage is uint8 [layers, 2, G, pages, page, row_bytes], in tiles (ops/cache_format.py);
    else it is of a float dtype and `bits` is PLAIN_BITS.
    """

    storage: Tensor
    bits: int
    cos: Tensor
    sin: Tensor
    position: Tensor
    pages: Tensor | None
    last: Tensor | None
    length: int


class Attend(Protocol):
    """One layer's attention in one step of T tokens: qkv [T, (H + 2 G) * D], queries, keys and values, to [T, H * D].
    The tokens of several sequences, the same number of each, follow one another: [B * T, ...].

    Queries and keys are normalised by `head_norm` (scale [H + G, D]) where there is one, and turned by RoPE; keys and
    values go into the cache; then every query looks at the tokens up to its own, within the layer's window.
    """

    def __call__(self, qkv: Tensor, head_norm: Norm | None, into: Weight) -> Tensor: ...
