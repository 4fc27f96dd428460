"""The conversation on the screen: one virtual widget, however long it is.

A frame costs what is in view. Text of a reply that is being written collects in a list and is drawn 30 times a second;
rows that did not change are not painted again. The view follows the end until the user scrolls up.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.reactive import var
from textual.scroll_view import ScrollView
from textual.selection import Selection
from textual.strip import Strip
from textual.timer import Timer
from textual.widget import Widget

from exl2chat.ui.layout import Layout
from exl2chat.ui.look import Look
from exl2chat.ui.render import MARGIN, Renderer, Row
from exl2chat.ui.section import Entry

FRAMES_PER_SECOND = 30
WIDEST = 100
BAR_STEPS = 8  # a scroll bar is drawn in eighths of a row
FAR = 200  # rows; a jump beyond this goes by estimated heights


class Transcript(ScrollView, can_focus=False):
    """Shows entries. Knows nothing of the controller."""

    ALLOW_SELECT = True
    following: var[bool] = var(True)

    def __init__(self, look: Look, id: str | None = None) -> None:
        super().__init__(id=id)
        self.document = Layout(Renderer(look), WIDEST)
        self._view: list[Row] = []
        self._pending: list[str] = []
        self._timer: Timer | None = None
        self._first = 0  # number of the first row in view, the same for as long as it is in view
        self._thumb: tuple[int, ...] = ()  # ends of the scroll bar's thumb, as finely as it is drawn
        self._grown = 0  # rows that came since the view stopped following
        self._below = 0  # of these, rows below the view

    # What it shows

    def show(self, messages: Sequence[tuple[Entry, str]]) -> None:
        """Replace everything and go to the end."""
        self._pause()
        self.document.show(messages)
        self.screen.clear_selection()
        self.follow()

    def add(self, entry: Entry, text: str) -> None:
        """Add a message at the end."""
        with self._growth():
            self.document.add(entry, text)
        self._sync()

    def begin(self, entry: Entry, text: str) -> None:
        """Add a message whose text is still to come."""
        self.document.add(entry, text, live=True)
        self._pending.clear()
        if self._timer is None:
            self._timer = self.set_interval(1 / FRAMES_PER_SECOND, self.flush)
        self._timer.resume()
        self._sync()

    def append(self, text: str) -> None:
        """More text of that message; it is drawn with the next frame."""
        self._pending.append(text)

    def flush(self) -> None:
        """Draw what has arrived."""
        if self._pending:
            with self._growth():
                self.document.append("".join(self._pending))
            self._pending.clear()
            self._sync()

    def update_last(self, entry: Entry) -> None:
        """Change what is said of the message that is being written."""
        self.document.update(entry)
        self._sync()

    def finish(self, entry: Entry) -> None:
        """That message is complete."""
        self.flush()
        self._pause()
        self.document.update(entry, finished=True)
        self._sync()

    def restyle(self, look: Look) -> None:
        """Draw with another look."""
        self.document.restyle(Renderer(look))
        self._sync()

    # Where the view is

    def follow(self) -> None:
        """Go to the end and stay there."""
        self.following = True
        self._sync()

    def page(self, pages: int) -> None:
        """Move by whole views, less one row of overlap."""
        self.move(pages * max(1, self.scrollable_content_region.height - 1))

    def home(self) -> None:
        """Go to the first row."""
        self._leave_end()
        self.document.to_start()
        self._sync()

    def scroll_to(self, x: float | None = None, y: float | None = None, **options: Any) -> None:
        """As `ScrollView.scroll_to`, never animated: rows are measured as they come into view."""
        super().scroll_to(x, y, **{**options, "animate": False})

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        rows = round(new_value) - round(old_value)
        if not rows:
            return
        if abs(rows) < FAR:
            self.move(rows)
        else:
            self._leave_end()
            self.document.seek(round(new_value))
            self._sync()

    def on_resize(self) -> None:
        self._sync()

    def move(self, rows: int) -> None:
        """Move the view by so many rows."""
        if rows < 0:
            self._leave_end()
        self.document.move(rows)
        self._sync()

    def _leave_end(self) -> None:
        if self.following:
            self.following = False
            self._grown = 0

    @contextmanager
    def _growth(self) -> Iterator[None]:
        """Count the rows that come meanwhile."""
        before = self.document.total
        yield
        self._grown += self.document.total - before

    def _pause(self) -> None:
        if self._timer is not None:
            self._timer.pause()

    def _sync(self) -> None:
        """Bring view, scroll bar and indicator in line with the document; repaint the rows that changed."""
        width, height = self.scrollable_content_region.size
        if not width or not height:
            return
        if (room := min(WIDEST, width - 2 * MARGIN)) != self.document.width:
            self.document.resize(max(1, room))
        view = [] if self.following else self.document.rows(height + 1)
        if len(view) <= height:
            self.document.to_end(height)
            view = self.document.rows(height)
            self.following = True
        del view[height:]
        below = 0 if self.following else min(self._grown, self.document.total - self.document.y - height)
        changed = [y for y in range(height) if not _same(view, self._view, y)]
        if below != self._below:
            changed.append(height - 1)
        self._view, self._below = view, below
        self._place()
        if changed:
            self.refresh(Region(0, changed[0], width, changed[-1] - changed[0] + 1))

    def _place(self) -> None:
        """Tell the scroll bar where the view is. Past the watchers: they would lay the whole screen out again."""
        height, total, y = self.scrollable_content_region.height, self.document.total, self.document.y
        self._first = y - self.document.drift
        self.set_reactive(Widget.virtual_size, Size(self.size.width, total))
        self.set_scroll(None, y)
        self.set_reactive(Widget.scroll_target_y, y)
        thumb = tuple(at * height * BAR_STEPS // max(total, height) for at in (y, y + height))
        if thumb != self._thumb:
            self._thumb = thumb
            bar = self.vertical_scrollbar
            bar.window_virtual_size, bar.window_size, bar.position = total, height, y

    # Drawing and copying

    def render_line(self, y: int) -> Strip:
        width, height = self.scrollable_content_region.size
        base = self.document.renderer.look.text
        if y >= len(self._view):
            return Strip.blank(width, base)
        strip = self._view[y].strip
        line = self._first + y
        span = self.text_selection.get_span(line) if self.text_selection else None
        if span is not None:
            start, end = span
            strip = _highlighted(strip, start, end, self.screen.get_component_rich_style("screen--selection"))
        strip = strip.adjust_cell_length(width, base)
        if self._below > 0 and y == height - 1:
            strip = self._with_indicator(strip)
        return strip.apply_offsets(0, line)

    def _with_indicator(self, strip: Strip) -> Strip:
        look = self.document.renderer.look
        text = f" ↓ {self._below} new {'line' if self._below == 1 else 'lines'} · End "
        room = max(0, strip.cell_length - cell_len(text))
        return Strip([*strip.crop(0, room), Segment(text, look.text + look.heading + Style(reverse=True))])

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The selected text without decoration; lines that were folded are joined again."""
        drift = self.document.drift
        start = selection.start.y + drift if selection.start else 0
        end = selection.end.y + drift if selection.end else self.document.total
        text = ""
        for number, row in enumerate(self.document.between(start, end)):
            span = selection.get_span(start - drift + number)
            first, last = span or (0, -1)
            plain = row.strip.text
            piece = plain[max(first, row.margin) : len(plain) if last < 0 else last].rstrip()
            text += (row.glue if number else "") + piece
        return text, "\n"

    def selection_updated(self, selection: Selection | None) -> None:  # noqa: ARG002 (the framework's signature)
        self.refresh()


def _same(new: Sequence[Row], old: Sequence[Row], y: int) -> bool:
    if y >= len(new) or y >= len(old):
        return y >= len(new) and y >= len(old)
    return new[y] is old[y] or new[y].strip == old[y].strip


def _highlighted(strip: Strip, start: int, end: int, style: Style) -> Strip:
    """`strip` with the characters from `start` to `end` (-1: all that follow) in another style."""
    done, segments = 0, []
    stop = len(strip.text.rstrip()) if end < 0 else end
    for text, own, _ in strip:
        cuts = sorted({0, len(text), *(min(max(at - done, 0), len(text)) for at in (start, stop))})
        for left, right in pairwise(cuts):
            inside = start <= done + left < stop
            segments.append(Segment(text[left:right], (own or Style()) + style if inside else own))
        done += len(text)
    return Strip(segments, strip.cell_length)
