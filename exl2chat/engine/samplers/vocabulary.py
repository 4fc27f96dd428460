"""What the sampler asks about tokens: which of them break a passage, and which XTC leaves alone."""

from functools import cached_property

from exl2chat.model.tokenizer import Tokenizer, token_texts
from exl2chat.settings import Sampling

BREAKING = frozenset(b'.,!?<>[](){}\n\t"')


class Vocabulary:
    """Kinds of tokens of one tokenizer, found when they are first asked for (0.2 s for 49,152 tokens), then kept."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def breakers(self) -> frozenset[int]:
        """Tokens whose text has punctuation, a bracket, a quotation mark, a line feed or a tab; and special tokens."""
        return self._tokenizer.special_ids | {i for i, text in enumerate(self._texts) if BREAKING & set(text)}

    @cached_property
    def structure(self) -> frozenset[int]:
        """Tokens whose text has a line feed; and special tokens, such as those that end a reply."""
        return self._tokenizer.special_ids | {i for i, text in enumerate(self._texts) if b"\n" in text}

    @cached_property
    def _texts(self) -> list[bytes]:
        return token_texts(self._tokenizer, self._tokenizer.vocab_size)


def breakers(settings: Sampling, vocabulary: Vocabulary | None) -> frozenset[int]:
    """The tokens that break a passage: what the settings say, else what the vocabulary does."""
    if settings.dry_breakers is not None:
        return frozenset(settings.dry_breakers)
    return vocabulary.breakers if vocabulary and settings.dry_multiplier else frozenset()


def protected(settings: Sampling, vocabulary: Vocabulary | None) -> frozenset[int]:
    """The tokens that XTC leaves alone: what the settings say, else the vocabulary's structure."""
    if settings.xtc_ignore_tokens is not None:
        return frozenset(settings.xtc_ignore_tokens)
    return vocabulary.structure if vocabulary and settings.xtc_probability else frozenset()
