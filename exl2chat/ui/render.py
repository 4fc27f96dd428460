"""A block of Markdown as rows of the screen. Pure: the same block, width, look and carry give the same rows.

Inline Markdown is parsed by markdown-it, code by Pygments; here is only layout. Nothing becomes a terminal hyperlink:
an address is shown as text, because what is shown may come from a model.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest

from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.cache import LRUCache
from textual.strip import Strip

from exl2chat.ui.blocks import MOST_CODE_LINES, Block
from exl2chat.ui.look import Look

MARGIN = 2  # empty cells left of everything
NARROWEST = 8
LEGIBLE = 6  # cells that a column of a table has, unless its words are shorter
_TASKS = {"[ ] ": "☐ ", "[x] ": "☑ ", "[X] ": "☑ "}
_INLINE = {"strong": Style(bold=True), "em": Style(italic=True), "s": Style(strike=True)}


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the screen. In a copy the first `margin` cells are left out and `glue` joins it to the row before."""

    strip: Strip
    margin: int = 0
    glue: str = "\n"


Carry = Text | tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Rendered:
    """The rows of a block, and what a block `joined` to it must know: its unfinished last line, or column widths."""

    rows: tuple[Row, ...]
    carry: Carry = None


class Renderer:
    """Draws blocks with one look."""

    def __init__(self, look: Look) -> None:
        self.look = look
        self._console = Console(color_system="truecolor", force_terminal=True, legacy_windows=False, width=80)
        self._lines: LRUCache[tuple[Block, int], tuple[Row, ...]] = LRUCache(2 * MOST_CODE_LINES)
        self._markdown = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])

    def render_open(self, block: Block, width: int, carry: Carry = None) -> Rendered:
        """A block that is still being written. Code is highlighted line by line, and every line only once.

        What spans lines gets its colours when the block is complete: to lex up to 64 lines again for every frame would
        cost 10 ms.
        """
        if block.kind != "code":
            return self.render(block, width, carry)
        parts = [replace(block, text=line, joined=True) for line in block.text.split("\n")]
        if not block.joined and block.info:
            parts.insert(0, replace(block, text=""))
        rows: list[Row] = []
        for part in parts:
            if (part, width) not in self._lines:
                self._lines[part, width] = self.render(part, width).rows[: None if part.joined else 1]
            rows += self._lines[part, width]
        return Rendered(tuple(rows))

    def render(self, block: Block, width: int, carry: Carry = None, goes_on: bool = False) -> Rendered:
        """`block` in `width` cells. `carry` is of the block before if this one is joined to it.

        If another block is joined to this one (`goes_on`) the last line of prose is handed on, not drawn.
        """
        first, rest = self._prefixes(block)
        inner = max(NARROWEST, width - rest.cell_len)
        handed_on: Carry = None
        if block.kind == "code":
            lines, style = self._code(block, inner), self.look.code_block
        elif block.kind == "table":
            lines, handed_on = self._table(block, inner, carry if isinstance(carry, tuple) else ())
        elif block.kind == "rule":
            lines = [_ink("─" * inner, self.look.quote)]
        else:
            lines = self._prose(block, inner, carry if isinstance(carry, Text) else None)
            if goes_on and len(lines) > 1:
                handed_on = lines.pop()
        style = self.look.code_block if block.kind == "code" else self.look.text
        glue = " " if block.kind in ("paragraph", "item", "heading") else "\n"
        rows = []
        for number, line in enumerate(lines):
            prefix = first if number == 0 and not block.joined else rest
            rows.append(
                Row(self._strip(prefix, line, width, style), MARGIN + prefix.cell_len, glue if number else "\n")
            )
        return Rendered(tuple(rows), handed_on)

    def label(self, name: str, style: Style, note: str, width: int) -> Row:
        """The line above a message: who speaks, and at the right what there is to say about it."""
        gap = max(1, width - cell_len(name) - cell_len(note))
        line = Text.assemble((name, style), " " * gap, (note, self.look.muted))
        line.truncate(width, overflow="ellipsis")
        return Row(self._strip(Text(), line, width, self.look.text), MARGIN)

    def note(self, text: str, style: Style, width: int) -> list[Row]:
        """A remark of the program's own under a message."""
        lines = _ink(text, style).wrap(self._console, max(NARROWEST, width))
        return [Row(self._strip(Text(), line, width, self.look.text), MARGIN) for line in lines]

    def blank(self, width: int) -> Row:
        """An empty row."""
        return Row(self._strip(Text(), Text(), width, self.look.text))

    def _prefixes(self, block: Block) -> tuple[Text, Text]:
        """What stands left of the first row and of the others: quotation bars, indentation, the item's marker."""
        bars = _ink("▌ " * block.quote, self.look.quote)
        bars.append(" " * min(block.indent, 24))
        if block.kind != "item":
            return bars, bars
        bullet = "•" if block.info in "-*+" else block.info
        return bars + _ink(f" {bullet} ", self.look.marker), bars + Text(" " * (len(bullet) + 2))

    def _strip(self, prefix: Text, line: Text, width: int, style: Style) -> Strip:
        """One row: margin, prefix, line; filled up to `width` in the style of the line."""
        base = self.look.text
        segments = [Segment(" " * MARGIN, base)]
        for text, under in ((prefix, base), (line, style)):
            segments += [Segment(s.text, under + s.style if s.style else under) for s in text.render(self._console)]
        taken = prefix.cell_len + line.cell_len
        if taken < width:
            segments.append(Segment(" " * (width - taken), style))
        return Strip(segments, MARGIN + max(taken, width)).adjust_cell_length(MARGIN + width)

    # Prose

    def _prose(self, block: Block, width: int, carry: Text | None) -> list[Text]:
        if block.kind == "plain":
            text = Text(block.text)
        else:
            text = self._inline(block.text)
        if block.kind == "heading":
            text.stylize(self.look.heading + Style(underline=block.info == "1"))
        if carry is not None:
            text = carry + text
        if block.kind == "item" and text.plain[:4] in _TASKS:
            text = _ink(_TASKS[text.plain[:4]], self.look.marker) + text[4:]
        text.expand_tabs(4)
        return list(text.wrap(self._console, width)) or [Text()]

    def _inline(self, source: str) -> Text:
        return self._spans(self._markdown.parseInline(source)[0].children or ())

    def _spans(self, tokens: Iterable[Token]) -> Text:
        """Inline tokens as one styled text."""
        text = Text()
        stack: list[Style] = [Style()]
        links: list[tuple[str, int]] = []
        for token in tokens:
            if token.type == "link_open":
                links.append((str(token.attrs.get("href", "")), len(text)))
                stack.append(stack[-1] + self.look.link)
            elif token.type == "link_close":
                stack.pop()
                address, start = links.pop()
                if text.plain[start:] != address:
                    text.append(f" ({address})", self.look.muted)
            elif token.nesting == 1:
                stack.append(stack[-1] + _INLINE.get(token.tag, Style()))
            elif token.nesting == -1:
                stack.pop()
            elif token.type == "code_inline":
                text.append(token.content, stack[-1] + self.look.code)
            elif token.type == "image":
                text.append(f"[image: {token.content}] ({token.attrs.get('src', '')})", self.look.link)
            else:
                text.append({"softbreak": " ", "hardbreak": "\n"}.get(token.type, token.content), stack[-1])
        return text

    # Code

    def _code(self, block: Block, width: int) -> list[Text]:
        """Highlighted lines, folded at `width`; the fence's language on a line above."""
        lines: list[Text] = [] if block.joined or not block.info else [_ink(block.info, self.look.muted)]
        for line in self._highlight(block).split("\n", allow_blank=True):
            line.expand_tabs(4)
            lines += [line] if line.cell_len <= width else line.wrap(self._console, width, overflow="fold")
        return lines

    def _highlight(self, block: Block) -> Text:
        text = Text()
        for kind, value in _lexer(block.info).get_tokens(block.text):
            text.append(value, self.look.token(kind))
        text.right_crop(1)  # the newline that Pygments adds
        return text

    # Tables

    def _table(self, block: Block, width: int, widths: tuple[int, ...]) -> tuple[list[Text], tuple[int, ...]]:
        """Rows with aligned columns, and the widths for the rows to come, of 0 where there is no room for columns. A
        joined table shows no header again."""
        rows = self._cells(block.text)
        if not rows:
            return [Text(line) for line in block.text.split("\n")], widths
        header, *body = rows
        for cell in header:
            cell.stylize(self.look.heading)
        if not widths:
            columns = list(zip(*rows, strict=True))
            words = [max(longest_word(cell.plain) for cell in column) for column in columns]
            widths = fit([max(cell.cell_len for cell in column) for column in columns], words, width)
            if body and any(cells < min(word, LEGIBLE) for cells, word in zip(widths, words, strict=True)):
                widths = (0,) * len(header)
        if not any(widths):
            records = list(self._records(header, body, width))
            return records if block.joined else records[1:], widths
        lines: list[Text] = []
        if not block.joined:
            lines += self._table_row(header, widths)
            lines.append(_ink("  ".join("─" * w for w in widths), self.look.quote))
        for row in body:
            lines += self._table_row(row, widths)
        return lines, widths

    def _records(self, header: Sequence[Text], body: Sequence[Sequence[Text]], width: int) -> Iterator[Text]:
        """An empty line before each row, then its cells one below the other, each with the name of its column."""
        for row in body:
            yield Text()
            for name, cell in zip(header, row, strict=True):
                line = Text.assemble(name, ": " if name else "", cell)
                yield from line.wrap(self._console, width, overflow="fold")

    def _cells(self, source: str) -> list[list[Text]]:
        rows: list[list[Text]] = []
        justify = ""
        for token in self._markdown.parse(source):
            if token.type == "tr_open":
                rows.append([])
            elif token.type in ("th_open", "td_open"):
                justify = str(token.attrs.get("style", ""))
            elif token.type == "inline" and rows:
                cell = self._spans(token.children or ())
                cell.justify = "right" if "right" in justify else "center" if "center" in justify else "left"
                rows[-1].append(cell)
        return rows

    def _cell_lines(self, cell: Text, width: int) -> list[Text]:
        if cell.cell_len > width or "\n" in cell.plain:
            return list(cell.wrap(self._console, width, justify=cell.justify, overflow="fold"))
        spare = width - cell.cell_len
        cell.pad_left({"right": spare, "center": spare // 2}.get(cell.justify or "left", 0))
        return [cell]

    def _table_row(self, cells: Sequence[Text], widths: Sequence[int]) -> Iterator[Text]:
        columns = [self._cell_lines(cell, width) for cell, width in zip(cells, widths, strict=False)]
        for parts in zip_longest(*columns):
            line = Text()
            for part, width in zip(parts, widths, strict=False):
                cell = part or Text()
                cell.pad_right(width - cell.cell_len)
                line.append_text(cell).append("  ")
            yield line


def fit(wanted: Sequence[int], words: Sequence[int], width: int) -> tuple[int, ...]:
    """Column widths: as wanted if they fit with two spaces between, else the widest give way first.

    They give way down to their longest words, and further only if those do not fit.
    """
    room = max(len(wanted), width - 2 * (len(wanted) - 1))
    least = [max(1, word) for word in words]
    if sum(least) > room:
        least = [1] * len(words)
    widths, most = tuple(max(1, want) for want in wanted), room
    while sum(widths) > room:
        widths = tuple(max(low, min(want, most)) for want, low in zip(wanted, least, strict=True))
        most -= 1
    return widths


def longest_word(text: str) -> int:
    """Cells of the longest word."""
    return max(map(cell_len, text.split()), default=0)


def _ink(text: str, style: Style) -> Text:
    """Text in one style. As a span, because `Text.render` leaves the text's own style out."""
    return Text.assemble((text, style))


@lru_cache(maxsize=64)
def _lexer(language: str) -> Lexer:
    try:
        return get_lexer_by_name(language.split()[0] if language.strip() else "text", stripnl=False)
    except ClassNotFound:
        return get_lexer_by_name("text", stripnl=False)
