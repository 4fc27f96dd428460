"""Token ids back to text, one at a time.

Every token stands for some bytes. A decoder (`decoder` in tokenizer.json, or sentencepiece's own rule) says which, and
how the very first token differs: most drop its leading space, which encoding put there. So text is the concatenation
of the tokens' bytes, decoded as UTF-8; a character split over tokens is held back until it is whole, at most three
bytes, and bytes that form no character become U+FFFD, as in the decode of the whole.
"""

import codecs
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from exl2chat.errors import ModelError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes of one token: as the first of a text, and anywhere else."""

    opening: bytes
    rest: bytes


class Detokenizer:
    """Text of a stream of ids. What `push` and a last `flush` return concatenates to the decode of all ids.

    `piece_of` gives a token's bytes, None for a token that is not shown. With `continuing`, the stream goes on from
    earlier text and the first token keeps its leading space.
    """

    def __init__(self, piece_of: Callable[[int], Piece | None], continuing: bool = False) -> None:
        self._piece_of = piece_of
        self._opening = not continuing
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters this token completes; "" while one is still incomplete."""
        piece = self._piece_of(token_id)
        if piece is None:
            return ""
        if not self._opening:
            return self._utf8.decode(piece.rest)
        self._opening = not piece.opening and piece.opening == piece.rest
        return self._utf8.decode(piece.opening)

    def flush(self) -> str:
        """What is held back, when no more tokens come: U+FFFD for an incomplete character."""
        return self._utf8.decode(b"", final=True)


def byte_level_alphabet() -> Mapping[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable in Latin-1, else from U+0100 upward."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def piece_rule(decoder: Mapping[str, Any] | None, where: str) -> Callable[[str], Piece]:
    """What a token's text means under tokenizer.json's `decoder`. ModelError for one that is not known."""
    if decoder is None:
        return lambda token: Piece(token.encode(), b" " + token.encode())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_rule()
    if kinds == ["Metaspace"]:
        return _metaspace_rule(steps[0])
    if set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return _sentencepiece_rule(steps, where)
    raise ModelError(f"{where}: decoder {' + '.join(kinds)} is not supported", "use another version of the model")


def _byte_level_rule() -> Callable[[str], Piece]:
    alphabet = byte_level_alphabet()

    def rule(token: str) -> Piece:
        try:
            data = bytes(alphabet[char] for char in token)
        except KeyError:  # not made of stand-ins: the token is literal
            data = token.encode()
        return Piece(data, data)

    return rule


def _metaspace_rule(step: Mapping[str, Any]) -> Callable[[str], Piece]:
    mark = step.get("replacement", "▁")
    keeps = step.get("prepend_scheme", "always") == "never" or step.get("add_prefix_space") is False

    def rule(token: str) -> Piece:
        rest = token.replace(mark, " ").encode()
        return Piece(rest if keeps else token.replace(mark, "").encode(), rest)

    return rule


def _sentencepiece_rule(steps: list[Mapping[str, Any]], where: str) -> Callable[[str], Piece]:
    """Replace, ByteFallback, Fuse and Strip: the decoder that models trained with sentencepiece carry."""
    swaps: list[tuple[str, str]] = []
    strip = ""
    for step in steps:
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String", "")
            if len(pattern) != 1:
                raise ModelError(f"{where}: a decoder replaces {pattern!r:.40}", "only single characters are supported")
            swaps.append((pattern, step["content"]))
        elif step["type"] == "Strip":
            if (step["start"], step["stop"]) not in ((1, 0), (0, 0)):
                raise ModelError(f"{where}: a decoder strips {step['start']} and {step['stop']}", "not supported")
            strip = step["content"] * step["start"]
    byte_fallback = any(step["type"] == "ByteFallback" for step in steps)

    def rule(token: str) -> Piece:
        for old, new in swaps:
            token = token.replace(old, new)
        if byte_fallback and (match := BYTE_TOKEN.fullmatch(token)):
            data = bytes([int(match[1], 16)])
        else:
            data = token.encode()
        return Piece(data.removeprefix(strip.encode()), data)

    return rule
