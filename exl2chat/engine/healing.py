"""Token healing: the last token of a prompt is taken back, and the reply begins with one that says as much or more."""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from exl2chat.model.tokenizer import Tokenizer, token_texts


class Healer:
    """Knows which tokens begin with the text of another. Its table is made when it is first used."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        """size: ids below it are tokens."""
        self._tokenizer, self._size = tokenizer, size

    def text(self, token: int) -> str:
        """The text of a token inside a text; "" for what cannot be healed: hidden, no whole characters, no token."""
        if token >= self._size:
            return ""
        try:
            return self._texts[token].decode()
        except UnicodeDecodeError:
            return ""

    def continuations(self, token: int) -> NDArray[np.bool_]:
        """The tokens that begin with the text of `token`, itself one of them, bool [size]."""
        start = self._texts[token]
        return np.array([text.startswith(start) and text != b"" for text in self._texts])

    @cached_property
    def _texts(self) -> list[bytes]:
        return token_texts(self._tokenizer, self._size)
