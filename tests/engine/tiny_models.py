"""Small random models that compute in float32, over a vocabulary of bytes and a few marks."""

import functools
from collections.abc import Mapping

import torch

from exl2chat.engine.shapes import Shape, random_model
from exl2chat.engine.transformer import Transformer
from exl2chat.model.detokenizer import Detokenizer, Piece
from exl2chat.progress import silent
from tests.engine.fake_model import BYTES, END, VOCABULARY

BYTES_SHAPE = Shape("a model of bytes", 64, 96, 2, 4, 2, 16, VOCABULARY)


@functools.cache
def byte_model() -> Transformer:
    """What it writes depends on all of its text; its logits are spread over several units."""
    torch.manual_seed(5)
    return random_model(BYTES_SHAPE, torch.device("cpu"), torch.float32, silent)


class Anything:
    """A filter of a user that lets everything pass."""

    def clone(self) -> "Anything":
        return Anything()

    def begin(self, prefix_str: str) -> None:
        """Nothing depends on it."""

    def feed(self, token: torch.Tensor) -> None:
        """Nothing depends on it."""

    def next(self) -> tuple[None, tuple[int, ...]]:
        return None, ()


class ByteTokenizer:
    """Ids below 256 are bytes, but for `words`; those above are marks, which are not shown. END ends a reply."""

    eos_ids = frozenset({END})
    special_ids = frozenset(range(BYTES, VOCABULARY))
    vocab_size = VOCABULARY

    def __init__(self, words: Mapping[int, str] = {}) -> None:
        self.words = words

    def token_of(self, token: int) -> str:
        return f"<{token}>" if token < VOCABULARY else ""

    def encode_following(self, text: str) -> list[int]:
        return list(text.encode())

    def piece(self, token: int) -> Piece | None:
        if token >= BYTES:
            return None
        text = self.words[token].encode() if token in self.words else bytes([token])
        return Piece(text.removeprefix(b" "), text)

    def detokenizer(self, special: bool = False, continuing: bool = False) -> Detokenizer:
        def piece(token: int) -> Piece | None:
            mark = self.token_of(token).encode()
            return Piece(mark, mark) if special and token >= BYTES else self.piece(token)

        return Detokenizer(piece, continuing)
