"""A model whose next token depends on every token in its cache, and a tokenizer of bytes: no weights needed."""

import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import torch

from exl2chat.model.detokenizer import Detokenizer, Piece

BYTES = 256
END = 256
OTHER_END = 257
MARK = 258
VOCABULARY = 260


class Claimed:
    """Knows who used it last."""

    user: object = None

    def claim(self, user: object) -> bool:
        was, self.user = self.user is user, user
        return was

    def place(self, positions: Sequence[int]) -> None:
        assert not positions


class FakeCache(Claimed):
    """Remembers token ids where a real cache has keys and values."""

    def __init__(self, capacity: int = 1000) -> None:
        self.capacity = capacity
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def truncate(self, length: int) -> None:
        del self.tokens[length:]


class FakeModel:
    """Logits from a hash of the cache; or, with `reply`, from a function of it that says the next token."""

    adapters = ()
    embedded = ()
    recorded_rows = 0

    def __init__(self, reply: Callable[[list[int]], int] | None = None) -> None:
        self.device, self.dtype = torch.device("cpu"), torch.bfloat16
        self.config = SimpleNamespace(vocab_size=VOCABULARY, context=100, hidden_size=8)
        self.calls: list[int] = []
        self._reply = reply

    def inputs(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor(tokens)

    def forward(self, tokens: torch.Tensor, cache: FakeCache, last_only: bool = False) -> torch.Tensor:
        assert last_only
        assert tokens.dtype == torch.int64
        self.calls.append(len(tokens))
        cache.tokens.extend(tokens.tolist())
        return torch.from_numpy(self.logits(cache.tokens)).unsqueeze(0)

    def logits(self, tokens: list[int]) -> np.ndarray:
        if self._reply is not None:
            one = np.zeros(VOCABULARY, np.float32)
            one[self._reply(tokens)] = 100
            return one
        seed = zlib.crc32(np.array(tokens, np.int64).tobytes())
        logits = np.random.default_rng(seed).standard_normal(VOCABULARY).astype(np.float32) * 3
        logits[BYTES:] = -np.inf
        return logits


def saying(text: str | bytes, prompt_tokens: int, then: int = END) -> FakeModel:
    """A model that answers a prompt of so many tokens with the bytes of `text` and then `then`."""
    data = text.encode() if isinstance(text, str) else text
    return FakeModel(lambda tokens: [*data, then][min(len(tokens) - prompt_tokens, len(data))])


class FakeTokenizer:
    """Ids below 256 are bytes; `MARK` is shown only among special tokens. Ids from `size` on are no tokens."""

    eos_ids = frozenset({END})
    special_ids = frozenset({END, OTHER_END, MARK})

    def __init__(self, size: int = VOCABULARY, words: Sequence[str] = ()) -> None:
        """`words` are tokens too: the last of the bytes, which no test writes."""
        self.size = self.vocab_size = size
        self.words = dict(enumerate(map(str.encode, words), BYTES - len(words)))

    def token_of(self, token: int) -> str:
        return f"<{token}>" if token < self.size else ""

    def id_of(self, word: str) -> int:
        return next(token for token, text in self.words.items() if text == word.encode())

    def piece(self, token: int, special: bool = False) -> Piece | None:
        if token >= BYTES:
            return Piece(b"<mark>", b"<mark>") if special else None
        text = self.words.get(token, bytes([token]))
        return Piece(text.removeprefix(b" "), text)

    def detokenizer(self, special: bool = False, continuing: bool = False) -> Detokenizer:
        return Detokenizer(lambda token: self.piece(token, special), continuing)
