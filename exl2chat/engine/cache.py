"""The KV cache: keys and values of the tokens a model has seen, in pages of 256 tokens.

Storage is one tensor [layers, 2, G, pages, 256, D] (0: keys after RoPE, 1: values). A sequence's pages follow each
other, so that tokens [0, n) of a layer are a view: nothing is gathered. Heads lie outside of tokens because attention
of one token over 2048 then takes 0.27 ms a layer, not 0.39 (3 heads of 64, one core).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from exl2chat.engine.rope import make_table
from exl2chat.errors import ContextError
from exl2chat.model.config import ModelConfig

PAGE = 256


@dataclass(frozen=True, slots=True)
class Span:
    """Room for new tokens in every layer, and what they may look at. T new tokens, S with those before them.

    cos, sin: [T, 1, 2, R / 2]. By layer: new [T, 2 * G, D], keys before values, to be written; keys and values
    [1, G, S, D], which end in the same memory.
    """

    cos: Tensor
    sin: Tensor
    new: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


class KVCache:
    """Keys and values of one sequence. `length` tokens are in it, `capacity` fit."""

    def __init__(self, config: ModelConfig, context: int, device: torch.device, dtype: torch.dtype) -> None:
        """Room for `context` tokens of a model that multiplies in `dtype`."""
        self.capacity = context
        self.length = 0
        self.rope = make_table(config.rope, context, device)
        self.storage = torch.empty(storage_shape(config, context), dtype=storage_dtype(device, dtype), device=device)

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
        rows = self.storage.flatten(3, 4)
        new = rows[:, :, :, start:end].flatten(1, 2).transpose(1, 2).unbind(0)
        seen = rows[:, :, :, :end].unsqueeze(2)
        return Span(*self.rope.rows(start, end), new, seen[:, 0].unbind(0), seen[:, 1].unbind(0))

    def truncate(self, length: int) -> None:
        """Forget every token from `length` on."""
        self.length = min(self.length, max(length, 0))


def cache_bytes(config: ModelConfig, context: int, device: torch.device, dtype: torch.dtype) -> int:
    """Bytes of a cache for `context` tokens. The CPU's pages take real memory only once written."""
    return math.prod(storage_shape(config, context)) * storage_dtype(device, dtype).itemsize


def storage_shape(config: ModelConfig, context: int) -> tuple[int, ...]:
    """[layers, 2, G, pages, PAGE, D]."""
    return (config.num_layers, 2, config.num_kv_heads, -(-context // PAGE), PAGE, config.head_dim)


def storage_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """float32 on the CPU, whose attention takes 1.1 times as long in bfloat16 and 4.5 times in float16."""
    return torch.float32 if device.type == "cpu" else dtype
