"""The choke point: whatever a widget draws, no control character of its text reaches the terminal.

Text that the user edits is to keep its hidden characters, but an editor gives some of them no cell and ends a line at
others. So the editor holds in place of each a character of plane 16, which is for private use, with the same low bits.
"""

import re

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from exl2chat.safetext import HIDDEN, scrub_line

_PRIVATE, _TAGS = 0x100000, 0xE0000
_HELD = re.compile("[\U00100000-\U0010ffff]")


class SafeText(LineFilter):
    """Scrubs the text of every segment and drops terminal hyperlinks. Textual's own control segments pass."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:  # noqa: ARG002 (the base's signature)
        return [segment if segment.control else _safe(segment) for segment in segments]


def _safe(segment: Segment) -> Segment:
    text, style, _ = segment
    if style is not None and style.link:
        style = style.update_link(None)
    elif text.isascii() and text.isprintable():
        return segment
    return Segment(scrub_line(text), style)


def hold(text: str) -> str:
    """`text` with every hidden character as an editor may hold it."""
    return HIDDEN.sub(lambda match: chr(_PRIVATE | ord(match[0]) & 0xFFFF), text)


def release(text: str) -> str:
    """`text` of an editor as it was before `hold`."""
    return _HELD.sub(_hidden, text)


def drawn(text: str) -> str:
    """`text` of an editor as it is shown, character by character."""
    return HIDDEN.sub("\ufffd", release(text))


def _hidden(held: re.Match[str]) -> str:
    low = ord(held[0]) & 0xFFFF
    char = chr(low if low > 0x1FF else _TAGS | low)
    return char if HIDDEN.match(char) else held[0]
