"""Untrusted text made safe for a terminal.

A terminal obeys what it is shown: an escape sequence in a model's reply can write the clipboard, retitle the window or
answer for the user (CWE-150). The filter works per character and keeps no state but one pending carriage return, so a
sequence split over any number of chunks cannot slip through. It is idempotent.

Replaced by a visible glyph: C0 except tab and newline, DEL, C1, bidirectional controls, invisible formatting, tag
characters, the supplementary variation selectors, unpaired surrogates. CR and CRLF become a newline. Zero-width joiners
stay (emoji and many scripts need them); combining marks are limited to `MAX_MARKS` in a row.
"""

import re
import unicodedata

MAX_MARKS = 8
_JOINERS = "\u200c\u200d"

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
HIDDEN = re.compile(
    "[\u061c\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f\U000e0100-\U000e01ef]"
)


def _glyph(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)  # the control pictures: ESC shows as one visible character
    return "\u2421" if code == 0x7F else "\ufffd"


class Scrubber:
    """The filter over a stream: over any chunking, the outputs concatenate to `scrub` of the whole."""

    def __init__(self) -> None:
        self._carriage_return = False
        self._marks = 0

    def feed(self, text: str) -> str:
        """The safe text of this chunk; a carriage return at its end waits for what follows."""
        if self._carriage_return:
            text = "\r" + text
        self._carriage_return = text.endswith("\r")
        if self._carriage_return:
            text = text[:-1]
        text = HIDDEN.sub("\ufffd", scrub_controls(text))
        return text if not self._marks and text.isascii() else self._limit_marks(text)

    def flush(self) -> str:
        """What is still owed at the end of the stream."""
        owed, self._carriage_return = "\n" * self._carriage_return, False
        return owed

    def _limit_marks(self, text: str) -> str:
        kept = []
        for char in text:
            if unicodedata.category(char) in ("Mn", "Me"):
                self._marks += 1
                if self._marks > MAX_MARKS:
                    continue
            elif char not in _JOINERS:
                self._marks = 0
            kept.append(char)
        return "".join(kept)


def scrub(text: str) -> str:
    """`text` with nothing left in it that a terminal obeys. Keeps tab and newline."""
    scrubber = Scrubber()
    return scrubber.feed(text) + scrubber.flush()


def scrub_controls(text: str) -> str:
    """`text` without control characters and unpaired surrogates, line ends as newlines; what is hidden stays."""
    return _CONTROL.sub(_glyph, text.replace("\r\n", "\n").replace("\r", "\n"))


def scrub_line(text: str) -> str:
    """`scrub` for one-line places (titles, names, errors): newlines and tabs become spaces."""
    return scrub(text).replace("\n", " ").replace("\t", " ")
