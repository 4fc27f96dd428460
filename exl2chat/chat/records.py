"""The lines of a session file, and how a file that may be damaged is read.

    {"exl2chat":1,"id":"7f3a…","created":"2026-11-21T14:02:11Z","title":"quantum cats"}
    {"k":"set","values":{"model":"smollm2","temperature":0.8}}
    {"k":"msg","id":"u1","parent":null,"role":"user","text":"Explain …","created":"…"}
    {"k":"draft","id":"a1","parent":"u1","text":"A system "}
    {"k":"msg","id":"a1","parent":"u1","role":"assistant","text":"A system …","stop":"eos","stats":{…}}
    {"k":"head","id":"u1"}   {"k":"title","title":"…"}

Lines end in the byte LF and in nothing else. A later line adds to what earlier ones say; none is ever changed. The
drafts of a reply concatenate to the part of it that was written down while it streamed; its `msg` supersedes them.
A kind this version does not know is left alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from exl2chat.chat.events import Message
from exl2chat.chat.tree import Head, Tree
from exl2chat.errors import SessionError
from exl2chat.link.protocol import Form
from exl2chat.settings import Value

VERSION = 1


class Header(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first line of a session file. `version` is the format's, `created` ISO 8601 UTC."""

    version: int = msgspec.field(name="exl2chat")
    id: str
    created: str
    title: str
    forked_from: str | None = None


class Set(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="k", tag="set"):
    """What the user chose of the settings, and what replies must be, all of it, from here on."""

    values: dict[str, Value]
    form: Form | None = None


class Title(msgspec.Struct, frozen=True, tag_field="k", tag="title"):
    """The session has another title."""

    title: str


class Draft(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="k", tag="draft"):
    """More text of the reply `id` to `parent`, which is still being generated."""

    id: str
    parent: str | None
    text: str
    model: str = ""


Record = Set | Title | Draft | Message | Head
KINDS = frozenset(("set", "title", "draft", "msg", "head"))


class _Kind(msgspec.Struct):
    k: str


_decode_record = msgspec.json.Decoder(Record).decode
_decode_header = msgspec.json.Decoder(Header).decode
_decode_kind = msgspec.json.Decoder(_Kind).decode
_encode = msgspec.json.Encoder().encode


def dump(record: Record | Header) -> bytes:
    """The record as one line, its LF included."""
    return _encode(record) + b"\n"


@dataclass(frozen=True, slots=True)
class Log:
    """What a session file says. `damaged` lines could not be used; `torn` is a last line cut short by a crash.

    `size` is the length in bytes of everything before the torn tail; `complete` says whether that ends in an LF.
    `drafts` are the replies that never finished.
    """

    header: Header | None = None
    title: str = ""
    tree: Tree = field(default_factory=Tree)
    settings: Mapping[str, Value] = field(default_factory=dict)
    form: Form | None = None
    drafts: tuple[Draft, ...] = ()
    damaged: int = 0
    torn: bytes = b""
    size: int = 0
    complete: bool = True


def decode(line: bytes) -> Record | Header | None:
    """The record in `line`; None for a kind this version does not know. ValueError when the line is damaged."""
    try:
        return _decode(line.decode())  # here, because msgspec does not look into the fields it skips
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _decode(text: str) -> Record | Header | None:
    try:
        record: Record = _decode_record(text)
        return record
    except ValueError:
        pass
    try:
        if _decode_kind(text).k not in KINDS:
            return None
    except ValueError:
        header: Header = _decode_header(text)
        return header
    raise ValueError("a known kind with wrong fields")


def load(data: bytes) -> Log:
    """Everything intact in `data`. SessionError only for a file that a newer version wrote."""
    *lines, tail = data.split(b"\n")
    reader = _Reader()
    for line in lines:
        reader.take(line)
    torn = b"" if _is_whole(tail) else tail
    if tail and not torn:
        reader.take(tail)
    return reader.log(torn, len(data) - len(torn), complete=not tail or bool(torn))


def _is_whole(tail: bytes) -> bool:
    """Whether `tail`, which has no LF, is a line of its own all the same: no part of a record is JSON by itself."""
    try:
        msgspec.json.decode(tail)
    except (ValueError, RecursionError):
        return False
    return True


class _Reader:
    """Takes lines in order and keeps what they add up to."""

    def __init__(self) -> None:
        self._header: Header | None = None
        self._title: str | None = None
        self._set = Set({})
        self._steps: list[Message | Head] = []
        self._drafts: dict[str, Draft] = {}
        self._known: set[str | None] = {None}
        self._last: str | None = None
        self._stand_ins: dict[str | None, str | None] = {}
        self._damaged = 0

    def take(self, line: bytes) -> None:
        """Take what the line says. A power loss can leave NULs in place of lines, with whole records beside them."""
        sound = [self._take_piece(piece.strip()) for piece in line.split(b"\0")]
        self._damaged += len(sound) > 1 or not sound[0]

    def _take_piece(self, piece: bytes) -> bool:
        """Whether the piece makes sense."""
        if not piece:
            return True
        try:
            record = decode(piece)
        except ValueError:
            return False
        match record:
            case Message():
                return self._take_message(record)
            case Head(id):
                self._steps += [record] if id in self._known else []
                return id in self._known
            case Draft(id, _, text):
                before = self._drafts.get(id)
                self._drafts[id] = msgspec.structs.replace(before, text=before.text + text) if before else record
            case Set():
                self._set = record
            case Title(title):
                self._title = title
            case Header():
                self._take_header(record)
        return True

    def _take_header(self, header: Header) -> None:
        if header.version > VERSION:
            raise SessionError(f"the session is of format {header.version}", "a newer exl2chat wrote it: update")
        if self._header is None:
            self._header = header

    def _take_message(self, message: Message) -> bool:
        if message.id in self._known:
            return False
        self._steps.append(msgspec.structs.replace(message, parent=self._parent(message.parent)))
        self._known.add(message.id)
        self._last = message.id
        return True

    def _parent(self, id: str | None) -> str | None:
        """`id`, or where its line is damaged the message before it: what followed stays on the path."""
        return id if id in self._known else self._stand_ins.setdefault(id, self._last)

    def log(self, torn: bytes, size: int, complete: bool) -> Log:
        drafts = tuple(
            msgspec.structs.replace(draft, parent=self._parent(draft.parent))
            for draft in self._drafts.values()
            if draft.id not in self._known
        )
        title = (self._header.title if self._header else "") if self._title is None else self._title
        tree = Tree().replay(self._steps)
        values, form = self._set.values, self._set.form
        return Log(self._header, title, tree, values, form, drafts, self._damaged, torn, size, complete)
