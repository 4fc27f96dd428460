"""Carries out the steps of the scheduler: page copies, then one pass over the weights for all prompts, one for all
replies. Matrices multiply the tokens of every sequence at once; attention looks at one sequence after another."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exl2chat.engine.cache import KVCache
from exl2chat.engine.embeddings import InputEmbeddings
from exl2chat.engine.paged_cache import PagedCache
from exl2chat.engine.pages import PageCopy
from exl2chat.engine.scheduler import Row, StepPlan
from exl2chat.engine.transformer import Transformer
from exl2chat.ops import Ops
from exl2chat.ops.attention import Attend, Heads, Store
from exl2chat.ops.packed import Norm, Weight


class Executor:
    """Runs `model` over the pages of `cache`.

    A row's logits are those that it would have alone, up to the rounding of matrix products: these may add up in
    another order when they multiply more rows, so that a tie of two tokens to the last bits may fall the other way.
    """

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self._model, self._paged = model, PagedCache(cache)

    @property
    def pages(self) -> int:
        return self._paged.pages

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> NDArray[np.float32]:
        """The logits of `plan.decode`, [rows, V]."""
        self.copy(plan.copies)
        if plan.prefill:
            self._step(plan.prefill, last_only=True)
        if not plan.decode:
            return np.empty((0, self._model.config.vocab_size), np.float32)
        logits: NDArray[np.float32] = self._step(plan.decode, last_only=False).cpu().numpy()
        return logits

    def embed(self, embedded: tuple[InputEmbeddings, ...]) -> None:
        """The embeddings of all jobs in the next step."""
        if embedded != self._model.embedded:
            self._model = replace(self._model, embedded=embedded)

    @torch.inference_mode()
    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Page copies outside of a step."""
        self._paged.copy(copies)

    def _step(self, rows: Sequence[Row], last_only: bool) -> Tensor:
        inputs = self._model.inputs([token for row in rows for token in row.tokens])
        model = replace(self._model, ops=_PagedOps(self._model.ops, self._paged, rows))
        return model.step(inputs, self._paged.cache, last_only)


@dataclass(frozen=True, slots=True)
class _PagedOps:
    """The ops of a model, but for one step over `rows` of a paged cache."""

    ops: Ops
    paged: PagedCache
    rows: Sequence[Row]

    @property
    def recorded_rows(self) -> int:
        return 0

    def embed(self, tokens: Tensor, table: Tensor, factor: float) -> Tensor:
        return self.ops.embed(tokens, table, factor)

    def norm(self, x: Tensor, norm: Norm, into: Weight) -> Tensor:
        return self.ops.norm(x, norm, into)

    def add_norm(self, x: Tensor, out: Tensor, post: Norm | None, norm: Norm, into: Weight) -> Tensor:
        return self.ops.add_norm(x, out, post, norm, into)

    def attends(
        self,
        store: Store,  # noqa: ARG002
        count: int,  # noqa: ARG002
        heads: Heads,
        windows: Sequence[int | None],
    ) -> Sequence[Attend]:
        return self.paged.attends(self.rows, heads, windows)

    def gate(self, x: Tensor, activation: str, into: Weight) -> Tensor:
        return self.ops.gate(x, activation, into)

    def logits(self, out: Tensor, cap: float | None) -> Tensor:
        return self.ops.logits(out, cap)
