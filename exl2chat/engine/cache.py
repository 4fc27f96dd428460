"""The KV cache: keys and values of the tokens a model has seen, in pages of 256 tokens.

Storage is one tensor [layers, 2, pages, 256, G, D] (0: keys after RoPE, 1: values). A sequence's pages follow each
other, so that tokens [0, n) of a layer are a view: nothing is gathered.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from exl2chat.engine.rope import RopeTable
from exl2chat.errors import ContextError

PAGE = 256


@dataclass(frozen=True, slots=True)
class Span:
    """Room for new tokens in every layer, and what they may look at. T new tokens, S with those before them.

    cos, sin: [T, 1, R]. new[layer]: [2, T, G, D], to be written. seen[2 * layer] keys and seen[2 * layer + 1] values,
    [1, G, S, D]: the same memory.
    """

    cos: Tensor
    sin: Tensor
    new: tuple[Tensor, ...]
    seen: tuple[Tensor, ...]


class KVCache:
    """Keys and values of one sequence. `length` tokens are in it, `capacity` fit."""

    def __init__(self, layers: int, heads: int, head_dim: int, rope: RopeTable, dtype: torch.dtype) -> None:
        """Room for as many tokens as `rope` has rows, whole pages. The system gives memory as pages are written."""
        self.rope = rope
        self.capacity = rope.cos.shape[0]
        self.length = 0
        shape = (layers, 2, pages(self.capacity), PAGE, heads, head_dim)
        self.storage = torch.empty(shape, dtype=dtype, device=rope.cos.device)

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes

    def span(self, count: int) -> Span:
        """Room for the next `count` tokens; they count once `length` is raised. ContextError where they do not fit."""
        start, end = self.length, self.length + count
        if end > self.capacity:
            raise ContextError(
                f"{end} tokens do not fit the context of {self.capacity}", "shorten the conversation or raise --ctx"
            )
        layers, _, _, _, heads, size = self.storage.shape
        rows = self.storage.view(layers, 2, -1, heads, size)
        new = rows[:, :, start:end].unbind(0)
        seen = rows.flatten(0, 1)[:, :end].transpose(1, 2).unsqueeze(1).unbind(0)
        return Span(*self.rope.rows(start, end), new, seen)

    def truncate(self, length: int) -> None:
        """Forget every token from `length` on."""
        self.length = min(self.length, max(length, 0))


def pages(tokens: int) -> int:
    """How many pages hold so many tokens."""
    return -(-tokens // PAGE)
