"""Markdown cut into blocks while it arrives: everything but the last block is final and need never be looked at again.

Only the cutting is done here; what is inside a block is parsed by markdown-it when it is rendered. Decisions depend on
the text alone and never on how it was chunked, so feeding pieces and feeding the whole give the same blocks. A block
stays small whatever the model writes: a paragraph longer than `PIECE` characters, a fence of more than
`CODE_LINES` lines and a table of more than `TABLE_ROWS` rows go on in further blocks that are `joined` to the one
before. This bounds the work of a frame: the open block is all that is rendered again.

Of CommonMark this leaves out setext headings (a line of dashes is a rule), link reference definitions and raw HTML
(both are shown as they are written).
"""

import re
from copy import copy
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["paragraph", "heading", "item", "code", "table", "rule", "plain"]

PIECE = 512
LONGEST_PIECE = 4096
CODE_LINES, MOST_CODE_LINES = 24, 64
TABLE_ROWS = 16

_QUOTE = re.compile(r" {0,3}((?:> ?)+)")
_FENCE = re.compile(r"( *)(`{3,}|~{3,}) *([^`]*)$")
_HEADING = re.compile(r" {0,3}(#{1,6})(?: +|$)(.*)")
_ITEM = re.compile(r"( *)([-*+]|\d{1,9}[.)]) +(\S.*)$")
_RULE = re.compile(r" {0,3}([-*_])(?: *\1){2,} *$")
_DELIMITER = re.compile(r" *\|? *:?-+:? *(?:\| *:?-+:? *)+\|? *$|^ *\| *:?-+:? *\| *$")
_CODE_SPAN = re.compile(r"\\.|(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_PAIR = re.compile(r"(\*\*|\*|__|_|~~)(?=\S)[^*_~]+?(?<=\S)\1|!?\[[^\[\]]*\](?:\([^()]*\)|(?!\())", re.DOTALL)
_OPENER = re.compile(r"[`\[]|(?:\*+|~~|(?<!\w)_+)(?=[^\s*_~])|\]\([^)]*$")
_BREAK = re.compile(r"\s|[\u3000-\u9fff\uac00-\ud7a3\uff00-\uff60]")


@dataclass(frozen=True, slots=True)
class Block:
    """One block of Markdown source.

    `text` is the inline source (paragraph, heading, item), the code, or the table's lines from its header on. `info` is
    the heading's level, the item's marker or the fence's language. `indent` is in columns, `quote` in levels. `gap`
    asks for an empty line above; `joined` says that the block before is the beginning of the same thing.
    """

    kind: Kind
    text: str
    info: str = ""
    indent: int = 0
    quote: int = 0
    gap: bool = False
    joined: bool = False


def split(text: str) -> list[Block]:
    """All blocks of a complete text."""
    splitter = Splitter()
    return splitter.feed(text) + splitter.finish()


def split_plain(text: str) -> list[Block]:
    """A text shown as it was typed, in blocks of bounded size."""
    lines = [
        line[start : start + LONGEST_PIECE]
        for line in text.split("\n")
        for start in range(0, max(1, len(line)), LONGEST_PIECE)
    ]
    blocks, first, size = [], 0, 0
    for number, line in enumerate(lines):
        if number - first == MOST_CODE_LINES or size > LONGEST_PIECE:
            blocks.append(Block("plain", "\n".join(lines[first:number])))
            first, size = number, 0
        size += len(line)
    return [*blocks, Block("plain", "\n".join(lines[first:]))]


def is_closed(text: str) -> bool:
    """Whether no inline marker in `text` waits for its partner, so that what follows cannot change how it looks."""
    rest, count = _CODE_SPAN.sub("", text), 1
    while count:
        rest, count = _PAIR.subn("", rest)
    return not _OPENER.search(rest)


class Splitter:
    """The text so far as final blocks (returned by `feed`) and what is still open (`tail`)."""

    def __init__(self) -> None:
        self._partial = ""  # of the line that has not ended
        self._midline = False  # the beginning of that line is already in the open block
        self._open: Block | None = None
        self._fresh = False  # the open block has no line yet
        self._fence = ""  # the marker that closes the fence we are in
        self._header = ""  # the first two lines of the table we are in
        self._in_list = False  # an indented line belongs to the last list item
        self._blank = False  # an empty line came before
        self._started = False  # any block came before
        self._done: list[Block] = []

    def feed(self, text: str) -> list[Block]:
        """Take more text; returns the blocks that became final."""
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            self._line(self._cut_long(line))
            self._midline = False
        self._partial = self._cut_long(self._partial)
        return self._take()

    def finish(self) -> list[Block]:
        """The text is complete; returns the last blocks."""
        if self._partial:
            self._line(self._partial)
        self._partial, self._midline = "", False
        self._close()
        return self._take()

    @property
    def tail(self) -> list[Block]:
        """What `finish` would return now, without finishing; but a table's row shows when it is complete."""
        if self._open and self._open.kind == "table" and "|" in self._partial:
            return [self._open]
        probe = copy(self)
        probe._done = []
        return probe.finish()

    def _take(self) -> list[Block]:
        done, self._done = self._done, []
        return done

    def _cut_long(self, line: str) -> str:
        """Take a line over `PIECE` characters bit by bit, broken where words end; returns the rest."""
        while len(line) > PIECE:
            match = _BREAK.search(line, PIECE, LONGEST_PIECE)
            if match is None and len(line) <= LONGEST_PIECE:
                break
            at = match.end() if match else LONGEST_PIECE
            self._line(line[:at])
            self._midline = True
            line = line[at:]
        return line

    def _line(self, line: str) -> None:
        """Take a line, or the next bit of a long one. Long prose goes on in a new block where it is closed."""
        self._place(line)
        block = self._open
        prose = block is not None and block.kind in ("paragraph", "item") and len(block.text) >= PIECE
        if block and prose and (len(block.text) >= LONGEST_PIECE or is_closed(block.text)):
            self._cut()

    def _place(self, line: str) -> None:
        """Put a line where it belongs."""
        kind = self._open.kind if self._open else None
        if self._midline and self._open:
            self._extend(line, "")
        elif self._fence:
            self._code_line(line)
        elif not line.strip():
            self._close()
            self._blank = True
        elif kind == "table" and "|" in line:
            self._table_row(line)
        else:
            quote = 0
            if match := _QUOTE.match(line):
                quote, line = match[1].count(">"), line[match.end() :]
            if not self._special_line(line, quote):
                self._prose_line(line, quote)

    def _special_line(self, line: str, quote: int) -> bool:
        """Take a line that begins something other than a paragraph."""
        if match := _FENCE.match(line):
            self._start(Block("code", "", match[3].strip(), len(match[1]), quote))
            self._fence = match[2]
        elif _DELIMITER.match(line) and self._open and "|" in self._open.text.rpartition("\n")[2]:
            self._start_table(self._open, line)
        elif _RULE.match(line):
            self._start(Block("rule", "", quote=quote))
            self._close()
        elif match := _HEADING.match(line):
            self._start(Block("heading", match[2].rstrip("# "), str(len(match[1])), quote=quote))
            self._close()
        elif (match := _ITEM.match(line)) and (len(match[1]) < 4 or self._in_list):
            self._start(Block("item", match[3], match[2], len(match[1]), quote))
        elif not line.strip():  # an empty line of a quotation
            self._close()
            self._blank = True
        else:
            return False
        return True

    def _prose_line(self, line: str, quote: int) -> None:
        text = line.lstrip()
        indent = len(line) - len(text)
        if self._open and self._open.kind in ("paragraph", "item") and self._open.quote == quote:
            self._extend(text, "\n")
        elif indent >= 4 and not self._in_list:
            self._start(Block("code", line[4:], quote=quote))
            self._close()
        else:
            self._start(Block("paragraph", text, indent=indent if self._in_list and indent > 1 else 0, quote=quote))

    def _code_line(self, line: str) -> None:
        block = self._open
        if block is None:
            return
        end = line.strip()
        if end.startswith(self._fence) and not end.strip(self._fence[0]):
            self._fence = ""
            self._close()
            return
        count = block.text.count("\n") + 1
        outside = block.text.endswith("\n") and line[:1].strip()
        if count >= MOST_CODE_LINES or len(block.text) > LONGEST_PIECE or (count >= CODE_LINES and outside):
            self._cut()
        margin = len(line) - len(line.lstrip(" "))
        self._extend(line[min(margin, block.indent) :], "" if self._fresh else "\n")

    def _start_table(self, before: Block, delimiter: str) -> None:
        """The open paragraph's last line turns out to be a table's header."""
        rest, _, header = before.text.rpartition("\n")
        self._open = replace(before, text=rest) if rest else None
        gap = before.gap or bool(rest)
        both = f"{header}\n{delimiter.strip()}"
        self._start(Block("table", both, indent=before.indent, quote=before.quote))
        self._header, self._open = both, replace(self._open, gap=gap) if self._open else None

    def _table_row(self, line: str) -> None:
        if self._open and self._open.text.count("\n") > TABLE_ROWS:
            self._cut(self._header)
        self._extend(line.strip(), "\n")

    def _start(self, block: Block) -> None:
        self._close()
        nested = block.kind == "item" or (self._in_list and block.indent > 0)
        self._open = replace(block, gap=self._started and (self._blank or not nested))
        self._in_list = nested
        self._started, self._blank, self._fresh = True, False, not block.text

    def _extend(self, text: str, glue: str) -> None:
        """Append to the open block."""
        if self._open:
            self._open = replace(self._open, text=self._open.text + glue + text)
            self._fresh = False

    def _cut(self, text: str = "") -> None:
        """The open block is final; what follows is joined to it and begins with `text`."""
        if self._open:
            self._done.append(self._open)
            self._open = replace(self._open, text=text, gap=False, joined=True)
            self._fresh = True

    def _close(self) -> None:
        block, self._open = self._open, None
        if block and not (block.joined and block.text in ("", self._header)):
            self._done.append(block)
        self._header = ""
