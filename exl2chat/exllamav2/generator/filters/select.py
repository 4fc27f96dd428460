"""`ExLlamaV2SelectFilter`: a text that is one of several."""

from collections.abc import Collection, Sequence
from typing import Any, Self

import numpy as np
import torch

from exl2chat.engine.compile_grammar import compile_choice
from exl2chat.engine.grammar import GrammarConstraint
from exl2chat.exllamav2.generator.filters.base import ExLlamaV2Filter


class ExLlamaV2SelectFilter(ExLlamaV2Filter):
    """The text is one of `options`; the token that completes one ends it.

    Of two options, one of which begins with the other, only the shorter counts.
    """

    def __init__(self, model: Any, tokenizer: Any, options: list[str], case_insensitive: bool = False) -> None:
        super().__init__(model, tokenizer)
        self.options, self.case_insensitive = list(options), case_insensitive
        self.begin("")

    def clone(self, c: Self | None = None) -> Self:
        clone = super().clone(c)
        clone._constraint = self._constraint.clone()
        return clone

    def begin(self, prefix_str: str) -> None:
        options = without_longer([prefix_str + option for option in self.options], self.case_insensitive)
        table = self.tokenizer.token_table
        self._constraint: GrammarConstraint = compile_choice(table, options, self.case_insensitive)
        self._constraint.begin(continuing=True)

    def feed(self, token: torch.Tensor) -> None:
        self._constraint.advance(int(token))

    def next(self) -> tuple[Collection[int], Collection[int]]:
        if self._constraint.finished:
            return [], set()
        allowed = np.flatnonzero(self._constraint.mask()).tolist()
        return allowed, {token for token in allowed if self._completes(token)}

    def _completes(self, token: int) -> bool:
        self._constraint.advance(token)
        completes = self._constraint.finished
        self._constraint.rollback(1)
        return completes


def without_longer(texts: Sequence[str], ignore_case: bool = False) -> list[str]:
    """`texts` without those that begin with another one."""
    keys = [text.casefold() if ignore_case else text for text in texts]
    return [
        text
        for text, key in zip(texts, keys, strict=True)
        if not any(key.startswith(other) and key != other for other in keys)
    ]
