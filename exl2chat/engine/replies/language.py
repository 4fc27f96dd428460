"""What generators know of a model's tokens beside the tokenizer."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from exl2chat.engine.healing import Healer
from exl2chat.engine.samplers.vocabulary import Vocabulary
from exl2chat.model.tokenizer import Tokenizer


class Language:
    """`size`: ids below it are tokens. Embedding and head have `rows` rows, of which the last may mean nothing."""

    def __init__(self, tokenizer: Tokenizer, rows: int) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer)
        self.end_ids = tokenizer.eos_ids
        self.size = next((count for count in range(rows, 0, -1) if tokenizer.token_of(count - 1)), rows)
        self.healer = Healer(tokenizer, self.size)

    def is_one_of(self, tokens: Iterable[int]) -> NDArray[np.bool_]:
        """Which tokens are among `tokens`, [size]."""
        found = np.zeros(self.size, np.bool_)
        found[[token for token in tokens if 0 <= token < self.size]] = True
        return found
