"""One message of the transcript: split into blocks when it is first looked at, drawn block by block when in view."""

from dataclasses import dataclass
from typing import Literal

from exl2chat.link.protocol import Role
from exl2chat.safetext import Scrubber, scrub
from exl2chat.ui.blocks import Block, Splitter, split, split_plain
from exl2chat.ui.render import Carry, Renderer, Row

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
    """A part as drawn: its rows, and for a block whether another is joined to it and what it hands on to that one."""

    rows: tuple[Row, ...]
    goes_on: bool = False
    carry: Carry = None


class Section:
    """A message as numbered parts: 0 its label, then its blocks, then its remark and the empty row below.

    Heights are estimates until a part is drawn. Forgetting what was drawn keeps the heights.
    """

    def __init__(self, entry: Entry, text: str, width: int, live: bool = False) -> None:
        self.entry = entry
        self.height = 0
        self._text = text
        self._width = width
        self._blocks: list[Block] | None = None  # None until the message is looked at
        self._final = 0  # how many of the blocks will not change
        self._heights = [1, 1]
        self._drawn: dict[int, _Drawn] = {}
        self._splitter = Splitter() if live else None
        self._scrubber = Scrubber()
        if live:
            self._blocks = []
            self.append(text)
        else:
            self.resize(width)

    @property
    def parts(self) -> int:
        """How many parts there are."""
        return len(self._open()) + 2

    def append(self, text: str) -> None:
        """More text of a message that is still being written. Blocks that are final are not touched again."""
        if self._splitter is not None:
            self._replace_tail(self._splitter.feed(self._scrubber.feed(text)), self._splitter.tail)

    def finish(self) -> None:
        """The message is complete."""
        if self._splitter is not None:
            self._replace_tail(self._splitter.feed(self._scrubber.flush()) + self._splitter.finish(), [])
            self._splitter = None

    def describe(self, entry: Entry) -> None:
        """Say something else of the message."""
        self.entry = entry
        self._drawn.pop(0, None)
        self._drawn.pop(len(self._heights) - 1, None)

    def resize(self, width: int) -> None:
        """Every height is an estimate again."""
        self._width = width
        self._drawn.clear()
        if self._blocks is None:
            self.height = 4 + self._text.count("\n") + len(self._text) // width
        else:
            self._estimate(1)

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
        blocks = self._open()
        if 1 <= part <= len(blocks):
            self._draw_block(part, blocks, renderer)
        elif part not in self._drawn:
            self._drawn[part] = _Drawn(self._label(renderer) if part == 0 else self._remark(renderer))
        rows = self._drawn[part].rows
        self.height += len(rows) - self._heights[part]
        self._heights[part] = len(rows)
        return rows

    def _label(self, renderer: Renderer) -> tuple[Row, ...]:
        style = renderer.look.user if self.entry.role == "user" else renderer.look.assistant
        return (renderer.label(self.entry.name, style, self.entry.note, self._width),)

    def _remark(self, renderer: Renderer) -> tuple[Row, ...]:
        style = getattr(renderer.look, self.entry.level)
        rows = renderer.note(self.entry.remark, style, self._width) if self.entry.remark else []
        return (*rows, renderer.blank(self._width))

    def _draw_block(self, part: int, blocks: list[Block], renderer: Renderer) -> None:
        """Draw a block; those it is joined to are drawn first, because it goes on where they end."""
        first = part
        while blocks[first - 1].joined and first > 1 and not self._is_drawn(first - 1, blocks):
            first -= 1
        for number in range(first, part + 1):
            if not self._is_drawn(number, blocks):
                block, goes_on = blocks[number - 1], _goes_on(number, blocks)
                carry = self._drawn[number - 1].carry if block.joined and number > 1 else None
                if number > self._final:
                    rendered = renderer.render_open(block, self._width, carry)
                else:
                    rendered = renderer.render(block, self._width, carry, goes_on)
                gap = (renderer.blank(self._width),) if block.gap else ()
                self._drawn[number] = _Drawn(gap + rendered.rows, goes_on, rendered.carry)

    def _is_drawn(self, part: int, blocks: list[Block]) -> bool:
        return part in self._drawn and self._drawn[part].goes_on == _goes_on(part, blocks)

    def _open(self) -> list[Block]:
        """The blocks, split on first use. Only text from the user is shown as it was typed."""
        if self._blocks is None:
            text = scrub(self._text)
            self._blocks = split_plain(text) if self.entry.role == "user" else split(text)
            self._final = len(self._blocks)
            self._estimate(1)
        return self._blocks

    def _replace_tail(self, final: list[Block], tail: list[Block]) -> None:
        """Put new blocks after the final ones, `final` and then `tail`, which may change again."""
        blocks, kept = self._open(), self._final
        for part in range(kept + 1, len(self._heights)):
            self._drawn.pop(part, None)
        blocks[kept:] = [*final, *tail]
        self._final = kept + len(final)
        self._estimate(kept + 1)

    def _estimate(self, part: int) -> None:
        """Guess the heights of this part and of those after it."""
        self._heights[part:] = [self._guess(block) for block in self._open()[part - 1 :]] + [1]
        self.height = sum(self._heights)

    def _guess(self, block: Block) -> int:
        lines = block.text.count("\n") + 1 if block.kind in ("code", "table", "plain") else 1
        return block.gap + max(lines, len(block.text) // self._width)


def _goes_on(part: int, blocks: list[Block]) -> bool:
    """Whether another block is joined to the one that is `part`."""
    return part < len(blocks) and blocks[part].joined
