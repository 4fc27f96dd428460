"""The tokens of a model as llguidance sees them: bytes.

A token's bytes are those that the detokenizer shows, so that a constraint on the bytes is one on the text. Tokens that
are not shown match no text: they begin with 0xFF, which is in no UTF-8, and a grammar can name them (`<|tool|>`). The
ids that end a reply are kept from llguidance altogether: they are allowed where the grammar is complete.
"""

from collections.abc import Collection

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from exl2chat.model.detokenizer import Piece
from exl2chat.model.tokenizer import Tokenizer

HIDDEN = b"\xff"
NOTHING = Piece(b"", b"")


class TokenTable:
    """Rows of bytes: `size` tokens, then what some tokens are as the first of a text, then every byte, then an end.

    texts: the bytes of each token inside a text, b"" for those not shown. openings: the row of each token at the start
    of a text, int64 [size]. silent: tokens that are nothing but the space that is dropped at the start of a text.
    byte_row: the row of byte 0.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, end_ids: Collection[int]) -> None:
        """size: ids below it are tokens. Takes about 10 us a token, once for a model."""
        self.tokenizer = tokenizer
        self.size = size
        self.end_ids = np.array(sorted(end_ids), np.int64)
        self.texts: list[bytes] = []
        self.openings = np.arange(size)
        rows: list[bytes] = []
        variants: list[bytes] = []
        for token in range(size):
            piece = NOTHING if token in end_ids else tokenizer.piece(token)
            self.texts.append(b"" if piece is None else piece.rest)
            rows.append(HIDDEN + tokenizer.token_of(token).encode() if piece is None else _text(piece.rest))
            if piece is not None and piece.opening != piece.rest:
                self.openings[token] = size + len(variants)
                variants.append(_text(piece.opening))
        self.byte_row = size + len(variants)
        self.rows = [*rows, *variants, *(_text(bytes([byte])) for byte in range(256)), HIDDEN + b"end of text"]
        silent = [token for token, row in enumerate(self.openings) if row >= size and not self.rows[row]]
        self.silent = np.array(silent, np.int64)
        self.library = LLTokenizer(TokenizerWrapper(_Rows(self.rows)), eos_token=len(self.rows) - 1)

    def shown(self, token: int) -> bool:
        """Whether the token is part of the text."""
        return not self.rows[token].startswith(HIDDEN)


def _text(data: bytes) -> bytes:
    """A row that matches `data`: none for what is no UTF-8 and would be taken for a hidden token."""
    return b"" if data.startswith(HIDDEN) else data


class _Rows:
    """A tokenizer as llguidance asks for one. It never has to tokenise for us; byte by byte is correct."""

    def __init__(self, rows: list[bytes]) -> None:
        self.tokens = rows
        self.eos_token_id = len(rows) - 1
        self.bos_token_id = None
        self.special_token_ids: list[int] = []

    def __call__(self, text: bytes) -> list[int]:
        start = len(self.tokens) - 257
        return [start + byte for byte in text]
