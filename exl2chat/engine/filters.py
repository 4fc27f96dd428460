"""Filters that users write, in the manner of exllamav2: `begin`, `feed`, `next`."""

from collections.abc import Collection, Sequence
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from exl2chat.engine.token_table import TokenTable
from exl2chat.errors import ChatError

MASKED = -65504.0  # the lowest float16, or anything below it, rules a token out
Allowed = tuple[Collection[int] | None, Collection[int]]


class Filter(Protocol):
    """What a filter has to have; it must say the same whenever it is fed the same.

    `next` returns the ids that may come next, None for all, and the ids that complete the reply. A filter may have
    `can_mask_logits`, `prepare_logit_mask` and `mask_logits` (of logits [V]) too: then `next` is not called.
    """

    def clone(self) -> Self: ...
    def begin(self, prefix_str: str) -> object: ...
    def feed(self, token: torch.Tensor) -> object: ...
    def next(self) -> Allowed: ...


class FilterConstraint:
    """A `Constraint` over one filter. Filters cannot go back, so a rollback feeds the reply again."""

    def __init__(self, table: TokenTable, rule: Filter) -> None:
        self._table, self._rule = table, rule
        self._prefix = ""
        self._tokens: list[int] = []
        self._mask: NDArray[np.bool_] | None = None
        self._ends: Collection[int] = ()
        self._finished = False

    @property
    def accepting(self) -> bool:
        return self._finished or bool(self._current()[self._table.end_ids].any())

    @property
    def finished(self) -> bool:
        return self._finished

    def begin(self, continuing: bool = False, healed: int | None = None) -> None:  # noqa: ARG002
        self._prefix = "" if healed is None else self._table.texts[healed].decode("utf-8", "replace")
        self._replay([])

    def mask(self) -> NDArray[np.bool_]:
        allowed = self._current()
        if not allowed.any():
            raise ChatError("the filter excludes every token", "correct the filter")
        return allowed.copy()

    def _current(self) -> NDArray[np.bool_]:
        """The mask of this state, asked for once: a filter may change by being asked."""
        if self._mask is None:
            masked = self._masked_logits() if self._masks_logits() else None
            self._mask = self._allowed() if masked is None else masked
        return self._mask

    def _masks_logits(self) -> bool:
        can = getattr(self._rule, "can_mask_logits", None)  # the filters of other packages are older than it
        return can is not None and bool(can())

    def _masked_logits(self) -> NDArray[np.bool_] | None:
        """None where the filter cannot do it here: Formatron's pins memory, for which there must be a GPU, and its
        copies lack what they would need."""
        logits = torch.zeros(self._table.size)
        self._rule.prepare_logit_mask()  # type: ignore[attr-defined]
        try:
            masked: torch.Tensor = self._rule.mask_logits(logits)  # type: ignore[attr-defined]
        except (RuntimeError, AttributeError):
            return None
        allowed: NDArray[np.bool_] = (masked > MASKED).numpy()
        return allowed

    def _allowed(self) -> NDArray[np.bool_]:
        passed, self._ends = self._rule.next()
        allowed = np.full(self._table.size, passed is None)
        if passed is not None:
            ids = np.fromiter(passed, np.int64)
            allowed[ids[(ids >= 0) & (ids < self._table.size)]] = True
        return allowed

    def advance(self, token: int) -> None:
        if self._finished or not self._current()[token]:
            raise ChatError(f"token {token} is not what the filter asks for")
        self._tokens.append(token)
        self._finished = token in self._ends
        self._feed(token)

    def _feed(self, token: int) -> None:
        self._rule.feed(torch.tensor([[token]]))
        self._mask, self._ends = None, ()

    def rollback(self, count: int) -> None:
        if not 0 <= count <= len(self._tokens):
            raise ValueError(f"{count} of {len(self._tokens)} tokens")
        if count:
            self._replay(self._tokens[:-count])

    def _replay(self, tokens: Sequence[int]) -> None:
        self._rule.begin(self._prefix)
        self._tokens, self._finished = [], False
        self._mask, self._ends = None, ()
        for token in tokens:
            self._tokens.append(token)
            self._feed(token)

    def forced(self) -> list[int]:
        return []

    def clone(self) -> Self:
        copy = type(self)(self._table, self._rule.clone())
        copy._prefix = self._prefix
        copy._replay(self._tokens)
        copy._finished = self._finished
        return copy
