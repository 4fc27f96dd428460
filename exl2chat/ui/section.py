"""One message of the transcript: split into blocks when it is first looked at, drawn block by block when in view."""

from dataclasses import dataclass
from typing import Literal

from exl2chat.link.protocol import Role
from exl2chat.safetext import Scrubber, scrub
from exl2chat.ui.blocks import Block, Splitter, split, split_plain
from exl2chat.ui.render import Carry, Rendered, Renderer, Row

Level = Literal["muted", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Entry:
    """What is shown of a message besides its text. `note` stands right of the name, `remark` below the text."""

    id: str
    role: Role
    name: str
    note: str = ""
    remark: str = ""
    level: Level = "muted"


@dataclass(frozen=True, slots=True)
class _Drawn:
    rendered: Rendered
    goes_on: bool


class Section:
    """A message as numbered parts: 0 its label, then its blocks, then its remark and the empty row below.

    Heights are estimates until a part is drawn. Forgetting what was drawn keeps the heights.
    """

    def __init__(self, entry: Entry, text: str, width: int, live: bool = False) -> None:
        self.entry = entry
        self._text = text
        self._width = width
        self._blocks: list[Block] | None = None
        self._final = 0  # how many of the blocks will not change
        self._heights: list[int] = []
        self._drawn: dict[int, _Drawn] = {}
        self._splitter = Splitter() if live else None
        self._scrubber = Scrubber()
        self.height = 4 + text.count("\n") + len(text) // width
        if live:
            self._blocks, self._heights = [], [1, 1]
            self.append(text)

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return len(self._open()) + 2

    def append(self, text: str) -> None:
        """More text of a message that is still being written. Blocks that are final are not touched again."""
        if self._splitter is None or self._blocks is None:
            return
        done = self._splitter.feed(self._scrubber.feed(text))
        del self._blocks[self._final :]
        for number in range(self._final + 1, len(self._heights)):
            self._drawn.pop(number, None)
        self._blocks += done
        self._final = len(self._blocks)
        self._blocks += self._splitter.tail
        self._grow()

    def finish(self, entry: Entry) -> None:
        """The message is complete and `entry` says how it ended."""
        if self._splitter is not None and self._blocks is not None:
            self._blocks[self._final :] = self._splitter.feed(self._scrubber.flush()) + self._splitter.finish()
            self._final = len(self._blocks)
            self._splitter = None
            self._grow()
        self.entry = entry
        self._drawn.clear()

    def resize(self, width: int) -> None:
        """Every height is an estimate again."""
        self._width = width
        self._drawn.clear()
        if self._blocks is None:
            self.height = 4 + self._text.count("\n") + len(self._text) // width
        else:
            self._heights = []
            self._grow()

    def forget(self) -> None:
        """Drop what was drawn."""
        self._drawn.clear()

    def part_height(self, part: int) -> int:
        """Rows of a part, estimated until it is drawn."""
        self._open()
        return self._heights[part]

    def offset(self, part: int) -> int:
        """Rows above a part."""
        self._open()
        return sum(self._heights[:part])

    def draw(self, part: int, renderer: Renderer) -> tuple[Row, ...]:
        """The rows of a part; its height is exact from now on."""
        rows = self._part(part, renderer)
        self.height += len(rows) - self._heights[part]
        self._heights[part] = len(rows)
        return rows

    def _part(self, part: int, renderer: Renderer) -> tuple[Row, ...]:
        blocks = self._open()
        if part == 0:
            style = renderer.look.user if self.entry.role == "user" else renderer.look.assistant
            return (renderer.label(self.entry.name, style, self.entry.note, self._width),)
        if part > len(blocks):
            remark = self.entry.remark
            style = getattr(renderer.look, self.entry.level)
            rows = renderer.note(remark, style, self._width) if remark else []
            return (*rows, renderer.blank(self._width))
        rendered = self._block(part, renderer)
        gap = blocks[part - 1].gap and part > 1
        return (renderer.blank(self._width), *rendered.rows) if gap else rendered.rows

    def _block(self, part: int, renderer: Renderer) -> Rendered:
        """A block as drawn; those it is joined to are drawn first, because it goes on where they end."""
        blocks = self._open()
        first = part
        while blocks[first - 1].joined and not self._is_drawn(first - 1) and first > 1:
            first -= 1
        carry: Carry = self._drawn[first - 1].rendered.carry if first > 1 and blocks[first - 1].joined else None
        for number in range(first, part + 1):
            if not self._is_drawn(number):
                goes_on = self._goes_on(number)
                self._drawn[number] = _Drawn(renderer.render(blocks[number - 1], self._width, carry, goes_on), goes_on)
            carry = self._drawn[number].rendered.carry
        return self._drawn[part].rendered

    def _is_drawn(self, part: int) -> bool:
        return part in self._drawn and self._drawn[part].goes_on == self._goes_on(part)

    def _goes_on(self, part: int) -> bool:
        blocks = self._open()
        return part < len(blocks) and blocks[part].joined

    def _open(self) -> list[Block]:
        """The blocks, split on first use. Only text from the user is shown as it was typed."""
        if self._blocks is None:
            text = scrub(self._text)
            self._blocks = split_plain(text) if self.entry.role == "user" else split(text)
            self._final = len(self._blocks)
            self._grow()
        return self._blocks

    def _grow(self) -> None:
        """Estimate the heights of blocks that have none, the last one's anew."""
        blocks = self._blocks or []
        known = self._heights[: self._final + 1] if len(self._heights) > 2 else [1]
        known = known[: len(blocks) + 1]
        self._heights = known + [self._estimate(block) for block in blocks[len(known) - 1 :]] + [2]
        self.height = sum(self._heights)

    def _estimate(self, block: Block) -> int:
        lines = block.text.count("\n") + 1 if block.kind in ("code", "table", "plain") else 1
        return block.gap + max(lines, len(block.text) // self._width)
