"""The KV cache: keys and values of the tokens a model has seen, in pages of 256 tokens.

They are kept as attention computes, or in 8, 6 or 4 bits (ops/cache_format.py; what that costs: benchmarks/NOTES.md).

Storage is one tensor [layers, 2, G, pages, 256, D] (0: keys after RoPE, 1: values). A sequence's pages follow each
other, so that tokens [0, n) of a layer are a view: nothing is gathered. Heads lie outside of tokens because attention
of one token over 2048 then takes 0.27 ms a layer, not 0.39 (3 heads of 64, one core).
"""

import math
import weakref
from collections.abc import Sequence

import torch

from exl2chat.engine.decode_graphs import DecodeGraphs
from exl2chat.engine.rope import make_table, table_bytes
from exl2chat.errors import ContextError
from exl2chat.model.config import ModelConfig
from exl2chat.ops.attention import PLAIN_BITS
from exl2chat.ops.cache_format import CacheFormat

PAGE = 256
BITS = {"fp16": PLAIN_BITS, "q8": 8, "q6": 6, "q4": 4}  # what `--cache` says


class KVCache:
    """Keys and values of one sequence. `length` tokens are in it, `capacity` fit; `graphs` run over its memory."""

    def __init__(
        self, config: ModelConfig, context: int, device: torch.device, dtype: torch.dtype, bits: int = PLAIN_BITS
    ) -> None:
        """Room for `context` tokens of a model that multiplies in `dtype`, in `bits` a value (see BITS)."""
        self.capacity = context
        self.bits = bits
        self.length = 0
        self.position = torch.zeros(1, dtype=torch.int32, device=device)
        self.pages: torch.Tensor | None = None
        self.last: torch.Tensor | None = None
        self._rope = config.rope
        self._placed: tuple[int, ...] = ()
        self.cos, self.sin = make_table(config.rope, torch.arange(context), device)
        self.storage = torch.empty(
            storage_shape(config, context, bits), dtype=storage_dtype(device, dtype, bits), device=device
        )
        self.graphs = DecodeGraphs()
        self._user: weakref.ref[object] | None = None

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes + self.cos.nbytes + self.sin.nbytes

    def reserve(self, count: int) -> None:
        """Have room for `count` more tokens; they count once `length` is raised. ContextError where they do not fit."""
        end = self.length + count
        if end > self.capacity:
            raise ContextError(
                f"{end} tokens do not fit the context of {self.capacity}", "shorten the conversation or raise --ctx"
            )
        self.position.fill_(self.length)

    def truncate(self, length: int) -> None:
        """Forget every token from `length` on."""
        self.length = min(self.length, max(length, 0))

    def claim(self, user: object) -> bool:
        """`user` is about to write. Whether it was the last to say so: else what it left here may be overwritten, and
        every token stands at its place again."""
        was = self._user is not None and self._user() is user
        self._user = weakref.ref(user)
        if not was:
            self.place(())
        return was

    def place(self, positions: Sequence[int]) -> None:
        """From now on the first tokens have these RoPE positions, in place of their numbers, and those behind them the
        numbers after the last. Tokens that are here and would stand elsewhere are forgotten."""
        if tuple(positions) == self._placed:
            return
        before, after = (_all_places(some, self.capacity) for some in (self._placed, positions))
        self.truncate(int((before == after).cumprod(0).sum()))
        self._placed = tuple(positions)
        for table, made in zip((self.cos, self.sin), make_table(self._rope, after, self.cos.device), strict=True):
            table.copy_(made)  # recorded steps know the memory


def _all_places(positions: Sequence[int], capacity: int) -> torch.Tensor:
    """The positions of as many tokens as there is room for, int64 [capacity]."""
    first = torch.tensor(positions, dtype=torch.int64)[:capacity]
    following = int(first[-1]) + 1 if len(first) else 0
    return torch.cat((first, torch.arange(following, following + capacity - len(first))))


def cache_bytes(
    config: ModelConfig, context: int, device: torch.device, dtype: torch.dtype, bits: int = PLAIN_BITS
) -> int:
    """Bytes of a cache for `context` tokens, with its table of rotations. The CPU's pages take real memory only once
    written."""
    pages = math.prod(storage_shape(config, context, bits)) * storage_dtype(device, dtype, bits).itemsize
    return pages + table_bytes(config.rope, context)


def storage_shape(config: ModelConfig, context: int, bits: int) -> tuple[int, ...]:
    """[layers, 2, G, pages, PAGE, D], or of a quantised cache bytes in place of D."""
    row = config.head_dim if bits == PLAIN_BITS else CacheFormat(bits, config.head_dim).row_bytes
    return (config.num_layers, 2, config.num_kv_heads, -(-context // PAGE), PAGE, row)


def storage_dtype(device: torch.device, dtype: torch.dtype, bits: int) -> torch.dtype:
    """float32 on the CPU, whose attention takes 1.1 times as long in bfloat16 and 4.5 times in float16."""
    if bits != PLAIN_BITS:
        return torch.uint8
    return torch.float32 if device.type == "cpu" else dtype
