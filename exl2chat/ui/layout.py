"""Where every row of the transcript is, without drawing more than what is in view.

The top of the view is an anchor (section, part, row of the part), not a number of rows from the start: when an estimate
above it turns out wrong, what is on the screen stays where it is.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from exl2chat.ui.render import Renderer, Row
from exl2chat.ui.section import Entry, Section

DRAWN_SECTIONS = 64


class Anchor(NamedTuple):
    """A row of the transcript."""

    section: int
    part: int
    row: int


START = Anchor(0, 0, 0)


class Layout:
    """The sections and the anchor of the view."""

    def __init__(self, renderer: Renderer, width: int) -> None:
        self.renderer = renderer
        self.width = width
        self.top = START
        self.drift = 0  # rows by which corrected estimates moved what is on the screen
        self._sections: list[Section] = []
        self._heights: list[int] = []
        self._recent: dict[int, None] = {}  # sections that hold drawn rows, the last used last

    @property
    def total(self) -> int:
        """Rows of the whole transcript, as far as known."""
        return sum(self._heights)

    @property
    def y(self) -> int:
        """Rows above the view, as far as known."""
        if not self._sections:
            return 0
        return (
            sum(self._heights[: self.top.section])
            + self._sections[self.top.section].offset(self.top.part)
            + self.top.row
        )

    # Content

    def show(self, messages: Sequence[tuple[Entry, str]]) -> None:
        """Replace everything."""
        self._sections = [Section(entry, text, self.width) for entry, text in messages]
        self._heights = [section.height for section in self._sections]
        self._recent.clear()
        self.top, self.drift = START, 0

    def add(self, entry: Entry, text: str, live: bool = False) -> None:
        """Add a message at the end; a live one grows with `append`."""
        self._sections.append(Section(entry, text, self.width, live))
        self._heights.append(self._sections[-1].height)

    def append(self, text: str) -> None:
        """More text of the live message, the last one."""
        self._sections[-1].append(text)
        self._heights[-1] = self._sections[-1].height

    def update(self, entry: Entry, finished: bool = False) -> None:
        """Change what is said of the last message, if it is the one `entry` names."""
        if self._sections and self._sections[-1].entry.id == entry.id:
            last = self._sections[-1]
            last.describe(entry)
            if finished:
                last.finish()
            self._heights[-1] = last.height
            self._settle()

    def resize(self, width: int) -> None:
        """Another width: every height is an estimate again, the anchor stays at its block."""
        self.width = width
        self._redraw()

    def restyle(self, renderer: Renderer) -> None:
        """Another look."""
        self.renderer = renderer
        self._redraw()

    def _redraw(self) -> None:
        for section in self._sections:
            section.resize(self.width)
        self._heights = [section.height for section in self._sections]
        self._settle()

    # The view

    def rows(self, count: int) -> list[Row]:
        """Up to `count` rows from the anchor down."""
        return self._collect(self.top, count)

    def move(self, rows: int) -> None:
        """Move the anchor by so many rows, or to the end that it meets."""
        section, part, row = self.top
        row += rows
        while row < 0 and (section, part) != (0, 0):
            section, part = (section, part - 1) if part else (section - 1, self._sections[section - 1].parts - 1)
            row += len(self._draw(section, part))
        if not self._sections:
            return
        while row >= (height := len(self._draw(section, part))):
            following = self._after(section, part)
            if following is None:
                row = height - 1
                break
            row -= height
            section, part = following
        self.top = Anchor(section, part, max(0, row))

    def to_end(self, count: int) -> None:
        """Put the last row at the bottom of a view of `count` rows."""
        if self._sections:
            last = self._sections[-1]
            part = last.parts - 1
            height = len(self._draw(len(self._sections) - 1, part))
            self.top = Anchor(len(self._sections) - 1, part, height - 1)
            self.move(1 - count)

    def to_start(self) -> None:
        """Put the first row at the top."""
        self.top = START

    def seek(self, y: int) -> None:
        """Put the anchor near row `y` of the whole, as far as heights are known."""
        if self._sections:
            self.top = self._locate(y)

    def between(self, first: int, last: int) -> list[Row]:
        """Rows `first` to `last` (inclusive) of the whole, as far as heights are known."""
        return self._collect(self._locate(first), last - first + 1) if self._sections else []

    # Inside

    def _locate(self, y: int) -> Anchor:
        ends = list(accumulate(self._heights))
        section = min(bisect_right(ends, max(0, y)), len(ends) - 1)
        row = max(0, y) - (ends[section - 1] if section else 0)
        for part in range(self._sections[section].parts):
            height = self._sections[section].part_height(part)
            if row < height:
                return Anchor(section, part, min(row, len(self._draw(section, part)) - 1))
            row -= height
        return Anchor(section, self._sections[section].parts - 1, 0)

    def _collect(self, start: Anchor, count: int) -> list[Row]:
        rows: list[Row] = []
        if not self._sections:
            return rows
        section, part, skip = start
        at: tuple[int, int] | None = (section, part)
        while at is not None and len(rows) < count:
            rows += self._draw(*at)[skip:]
            skip = 0
            at = self._after(*at)
        return rows[:count]

    def _after(self, section: int, part: int) -> tuple[int, int] | None:
        if part + 1 < self._sections[section].parts:
            return section, part + 1
        return (section + 1, 0) if section + 1 < len(self._sections) else None

    def _draw(self, number: int, part: int) -> tuple[Row, ...]:
        section = self._sections[number]
        before = self._heights[number]
        rows = section.draw(part, self.renderer)
        self._heights[number] = section.height
        if (number, part) < self.top[:2]:
            self.drift += section.height - before
        self._recent.pop(number, None)
        self._recent[number] = None
        if len(self._recent) > DRAWN_SECTIONS:
            oldest = next(iter(self._recent))
            del self._recent[oldest]
            self._sections[oldest].forget()
        return rows

    def _settle(self) -> None:
        """Keep the anchor on a row that exists."""
        if not self._sections:
            self.top = START
            return
        section = min(self.top.section, len(self._sections) - 1)
        part = min(self.top.part, self._sections[section].parts - 1)
        self.top = Anchor(section, part, min(self.top.row, len(self._draw(section, part)) - 1))
