"""Carries out the steps of the scheduler: page copies, then one pass over the weights for all prompts, one for all
replies. Matrices multiply the tokens of every sequence at once; attention looks at one sequence after another, but on a
GPU at those of all replies at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exl2chat.engine.cache import KVCache
from exl2chat.engine.device_draws import Drawing
from exl2chat.engine.embeddings import FIRST_ID, InputEmbeddings
from exl2chat.engine.paged_cache import PagedCache
from exl2chat.engine.paged_steps import ALONE, MOST, PagedSteps, group
from exl2chat.engine.pages import PageCopy
from exl2chat.engine.scheduler import Row, StepPlan
from exl2chat.engine.transformer import Transformer
from exl2chat.ops import Ops
from exl2chat.ops.attention import Attend, Heads, Store
from exl2chat.ops.packed import Norm, Weight
from exl2chat.ops.sample import MOST_TOKENS


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step gave, until the next one, for each row of `plan.decode`: after each of its tokens or, of the end of a
    prompt, maybe after the last alone. drawn: by job, the tokens that a device drew for it, -1 where logits are not
    numbers. rows: the logits [T, V], wherever they are."""

    drawn: Mapping[int, Sequence[int]]
    rows: Sequence[Tensor]

    def logits(self, row: int) -> NDArray[np.float32]:
        """Those of a row of `plan.decode`, float32 [T, V]."""
        logits: NDArray[np.float32] = self.rows[row].numpy(force=True)
        return logits


class Executor:
    """Runs `model` over the pages of `cache`.

    A row's logits are those that it would have alone, up to the rounding of matrix products: these may add up in
    another order when they multiply more tokens, so that a tie of two tokens to the last bits may fall the other way.
    On a GPU with our kernels they do not as long as there are 1 to 8 tokens, or 9 to 16, or 17 to 64, drafts and what
    fills rows up among them (`paged_steps.group`): one sequence with up to 7 drafts, two with up to 3 and four with one
    have the bits that each has alone (`paged_steps.alike_drafts`). With more, rows may be rounded in another way than
    without drafts.
    """

    def __init__(self, model: Transformer, cache: KVCache, vocabulary: int) -> None:
        """Where a device draws tokens, it is from the first `vocabulary`."""
        self._model, self._paged = model, PagedCache(cache)
        self._steps: PagedSteps | None = None
        if model.device.type == "cuda" and model.ops.recorded_rows and vocabulary <= MOST_TOKENS:
            step = partial(_step, model, self._paged)
            self._steps = PagedSteps(step, vocabulary, self._paged.pages, cache.capacity, model.device)
        self._capacity = cache.capacity

    @property
    def pages(self) -> int:
        return self._paged.pages

    @property
    def last(self) -> int:
        """How many tokens of a sequence it is best given in one row of `plan.decode`, at most."""
        return 1 if self._steps is None else ALONE[-1]

    @property
    def recordings(self) -> int:
        """How many steps have been recorded. One that is takes some 20 ms longer."""
        return 0 if self._steps is None else self._steps.recordings

    @property
    def gathers(self) -> bool:
        """Whether pages that lie apart cost time. Our kernels follow page tables."""
        return not self._model.ops.recorded_rows

    def warm_up(self) -> None:
        """On a GPU: compile the kernels of decoding steps. ModelError where one does not compile."""
        if self._steps is not None:
            self._steps.warm_up()

    @torch.inference_mode()
    def run(
        self, plan: StepPlan, draws: Mapping[int, Drawing], meanwhile: Callable[[], None] = lambda: None
    ) -> Computed:
        """Carry out a step. Tokens of jobs in `draws` are drawn by the device, where it can. `meanwhile`, which may be
        called several times, is what the host can do in the time."""
        meanwhile = torch.inference_mode(mode=False)(meanwhile)  # filters may keep tensors that they make
        self.copy(plan.copies)
        if plan.prefill:
            self._run(plan.prefill, last_only=True)
        if not plan.decode:
            return Computed({}, ())
        if self._steps is None:
            logits = self._run(plan.decode, last_only=False)
            meanwhile()
            return Computed({}, logits.split_with_sizes([len(row.tokens) for row in plan.decode]))
        return self._decode(self._steps, plan.decode, draws, meanwhile)

    def embed(self, embedded: tuple[InputEmbeddings, ...]) -> None:
        """The embeddings of all jobs in the next step."""
        if embedded != self._model.embedded:
            self._model = replace(self._model, embedded=embedded)

    @torch.inference_mode()
    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Page copies outside of a step."""
        self._paged.copy(copies)

    def _decode(
        self, steps: PagedSteps, rows: Sequence[Row], draws: Mapping[int, Drawing], meanwhile: Callable[[], None]
    ) -> Computed:
        """Groups of rows; as they come, and no graphs, those that have embeddings or too many tokens, drafts among
        them."""
        logits = {
            place: self._run([row], last_only=False)
            for place, row in enumerate(rows)
            if len(row.tokens) > MOST or max(row.tokens) >= FIRST_ID
        }
        others = [place for place in range(len(rows)) if place not in logits]
        groups = group([rows[place] for place in others], self._capacity)
        drawn: dict[int, Sequence[int]] = {}
        for some in groups:
            places = [others[place] for place in some]
            stepped = steps.run([rows[place] for place in places], draws, meanwhile)
            for place, one in zip(places, stepped, strict=True):
                logits[place] = one.logits if len(groups) == 1 else one.logits.clone()  # the next step overwrites it
                if rows[place].job in draws:
                    drawn[rows[place].job] = one.drawn
        return Computed(drawn, [logits[place] for place in range(len(rows))])

    def _run(self, rows: Sequence[Row], last_only: bool) -> Tensor:
        inputs = self._model.inputs([token for row in rows for token in row.tokens])
        ops = _PagedOps(self._model.ops, partial(self._paged.attends, self._model.ops, rows))
        return replace(self._model, ops=ops).step(inputs, self._paged.cache, last_only)


def _step(
    model: Transformer, paged: PagedCache, tokens: Tensor, firsts: Tensor, tables: Tensor, last: Tensor | None
) -> Tensor:
    each = len(tokens) // len(firsts)
    store = paged.store(firsts, tables, last)
    ops = _PagedOps(model.ops, partial(model.ops.attends, store, each))
    places = None if last is None else (last - firsts).clamp(0, each - 1)  # in a rehearsal they may be any
    return replace(model, ops=ops).step(tokens, paged.cache, last_only=False, places=places)


@dataclass(frozen=True, slots=True)
class _PagedOps:
    """The ops of a model, but for one step over a paged cache, whose attention is `find`'s."""

    ops: Ops
    find: Callable[[Heads, Sequence[int | None]], Sequence[Attend]]

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
        return self.find(heads, windows)

    def gate(self, x: Tensor, activation: str, into: Weight) -> Tensor:
        return self.ops.gate(x, activation, into)

    def logits(self, out: Tensor, cap: float | None) -> Tensor:
        return self.ops.logits(out, cap)
