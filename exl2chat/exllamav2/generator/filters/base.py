"""`ExLlamaV2Filter`: what a filter of the user extends."""

import copy
from collections.abc import Collection, Sequence
from typing import Any, Self

import torch

from exl2chat.engine.constraints import AllOf, Constraint
from exl2chat.engine.filters import FilterConstraint
from exl2chat.errors import UsageError
from exl2chat.exllamav2.tokenizer import ExLlamaV2Tokenizer

CONTAINERS = (list, dict, set, bytearray)


class ExLlamaV2Filter:
    """A rule for the tokens of one text. `next` is asked before every token and `feed` told the token.

    Extend it and write `begin`, `feed` and `next`. Beyond the reference, `clone` need not be written for a filter whose
    state is in plain attributes and containers.
    """

    allow_return_type_list = True

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.sequence_str = ""

    def clone(self, c: Self | None = None) -> Self:
        """A filter in the same state; in `c`, made by a subclass's own `clone`, if given."""
        clone = type(self).__new__(type(self)) if c is None else c
        for name, value in vars(self).items():
            setattr(clone, name, copy.copy(value) if isinstance(value, CONTAINERS) else value)
        return clone

    def begin(self, prefix_str: str) -> None:
        """A text begins. `prefix_str` is the healed token's text, with which the first token begins; "" without one."""

    def feed(self, token: torch.Tensor) -> None:
        """A token was chosen, int64 [1, 1]."""

    def next(self) -> tuple[Collection[int] | None, Collection[int]]:
        """The ids that may come next, None for all, and those of them that complete the text."""
        raise NotImplementedError(f"{type(self).__name__} has no next()")

    def use_background_worker(self) -> bool:
        """Whether the filter may be asked in another thread. Here it is not."""
        return False

    def can_mask_logits(self) -> bool:
        """Whether logits are to be masked instead of asking for ids."""
        return False

    def prepare_logit_mask(self) -> bool:
        """Called before `mask_logits`; to be written where `can_mask_logits`."""
        raise NotImplementedError(f"{type(self).__name__} has no prepare_logit_mask()")

    def mask_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` [V] with forbidden tokens at minus infinity; to be written where `can_mask_logits`."""
        raise NotImplementedError(f"{type(self).__name__} has no mask_logits()")


def constraint_of(tokenizer: ExLlamaV2Tokenizer, filters: Sequence[ExLlamaV2Filter]) -> Constraint | None:
    """All `filters` at once; None without any. UsageError for what is no filter."""
    for rule in filters:
        missing = [name for name in ("begin", "feed", "next") if not hasattr(rule, name)]
        if missing:
            raise UsageError(
                f"a {type(rule).__name__} is among the filters, without {', '.join(missing)}", "extend ExLlamaV2Filter"
            )
    constraints = [FilterConstraint(tokenizer.token_table, rule) for rule in filters]
    return AllOf(constraints) if constraints else None
