"""The choke point: whatever a widget draws, no control character of its text reaches the terminal."""

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from exl2chat.safetext import scrub_line


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
