"""`ExLlamaV2PrefixFilter`: how a text begins."""

from collections.abc import Collection
from typing import Any, Self

import numpy as np
import torch

from exl2chat.engine.compile_grammar import compile_grammar, lark_string
from exl2chat.engine.grammar import GrammarConstraint
from exl2chat.exllamav2.generator.filters.base import ExLlamaV2Filter
from exl2chat.exllamav2.generator.filters.select import without_longer


class ExLlamaV2PrefixFilter(ExLlamaV2Filter):
    """The text begins with one of `prefix_strings`; after that anything may follow.

    Of two prefixes, one of which begins with the other, only the shorter counts.
    """

    def __init__(self, model: Any, tokenizer: Any, prefix_strings: str | list[str]) -> None:
        super().__init__(model, tokenizer)
        self.prefix_strings = [prefix_strings] if isinstance(prefix_strings, str) else list(prefix_strings)
        self.begin("")

    def clone(self, c: Self | None = None) -> Self:
        clone = super().clone(c)
        clone._constraint = self._constraint.clone()
        return clone

    def begin(self, prefix_str: str) -> None:
        strings = without_longer([prefix_str + prefix for prefix in self.prefix_strings])
        lark = f"start: PREFIX REST\nPREFIX: {' | '.join(map(lark_string, strings))}\nREST: /(?s:.*)/"
        self._constraint: GrammarConstraint = compile_grammar(self.tokenizer.token_table, lark)
        self._constraint.begin(continuing=True)
        self._begun = False

    def feed(self, token: torch.Tensor) -> None:
        if not self._begun:
            self._constraint.advance(int(token))
            self._begun = self._constraint.accepting

    def next(self) -> tuple[Collection[int] | None, Collection[int]]:
        return None if self._begun else np.flatnonzero(self._constraint.mask()).tolist(), set()
