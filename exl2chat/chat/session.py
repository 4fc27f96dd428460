"""One conversation: its tree of messages, its title, what was set in it, and the file all that is kept in."""

import os
import re
import secrets
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from exl2chat.chat.events import Message
from exl2chat.chat.records import Draft, Header, Log, Record, Set, Title, load
from exl2chat.chat.store import LARGEST, SessionFile
from exl2chat.chat.tree import Head, Tree
from exl2chat.errors import ChatError, SessionError, UsageError
from exl2chat.link.protocol import Form
from exl2chat.paths import TRASH, Paths, fsync, private_folder, read_file
from exl2chat.settings import BY_NAME, Value

TITLE_LENGTH = 60
SUFFIX = ".jsonl"


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """A line of the session list. `updated` is in seconds since 1970; `messages` counts every branch."""

    id: str
    title: str
    updated: float
    messages: int
    path: Path


def now() -> str:
    """This moment as ISO 8601 UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def new_id() -> str:
    """A message or session id: 48 random bits, so that ids of copies never meet by accident."""
    return secrets.token_hex(6)


def storable(text: str) -> str:
    """`text` with what files or their names cannot hold replaced: half surrogate pairs and NUL."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


class Session:
    """Everything said and set in one chat. Changes go to the file at once; the file appears with the first message.

    `folder` is None for a conversation that is never written down. `notices` tell what opening the file had to mend.
    """

    def __init__(self, folder: Path | None, title: str = "", forked_from: str | None = None) -> None:
        self.folder = folder
        self.notices: tuple[str, ...] = ()
        self.header = Header(1, new_id(), now(), title, forked_from)
        self.title = title
        self.tree = Tree()
        self.settings: Mapping[str, Value] = {}
        self.form: Form | None = None
        self._file: SessionFile | None = None
        self._headless = True  # the file, if there is one, has no header yet
        self._unwritten: list[Record] = []

    @classmethod
    def create(cls, paths: Paths) -> "Session":
        """A new session, saved below `paths` from its first message on."""
        return cls(paths.sessions)

    @classmethod
    def in_memory(cls) -> "Session":
        """A session that leaves no trace."""
        return cls(None)

    @classmethod
    def open(cls, which: str | Path, paths: Paths) -> "Session":
        """The saved session with the id, path or title `which`; "last" is the one changed most recently.

        A reply that a crash interrupted becomes a message. SessionError when there is none or it is beyond recovery.
        """
        path = which if isinstance(which, Path) else find_session(which, paths)
        file, log = SessionFile.open(path)
        session = cls(path.parent, log.title)
        session.tree, session.settings, session.form, session._file = log.tree, log.settings, log.form, file
        session._headless = log.header is None
        if log.header:
            session.header = log.header
        else:
            session.header = Header(1, _id_in_name(path), now(), "")
            session.title = log.title or first_line(log.tree.path)
        session.notices = tuple(session._mend(log))
        return session

    @property
    def id(self) -> str:
        return self.header.id

    @property
    def path(self) -> tuple[Message, ...]:
        """The messages from the first to the head."""
        return self.tree.path

    @property
    def obstacle(self) -> str:
        """Why nothing can be added: another exl2chat holds the file, or its permissions forbid it. Empty if one can."""
        return self._file.obstacle if self._file else ""

    @property
    def read_only(self) -> bool:
        """Whether nothing can be added."""
        return bool(self.obstacle)

    @property
    def fault(self) -> str | None:
        """Why the last messages are not on disk; None when they are."""
        return self._file.fault if self._file else None

    @property
    def file(self) -> Path | None:
        """Where the session is saved; None before its first message and for one in memory."""
        return self._file.path if self._file else None

    def add(self, message: Message) -> None:
        """Append `message`, make it the head, and return once it is on disk (or `fault` says why not)."""
        if not self.title and not self.tree.messages:
            self.title = first_line((message,))
        self.tree = self.tree.add(message)
        if self._file is None and self.folder is not None:
            self._name_file(self.folder)
        self._write(message)

    def move(self, head: str | None) -> None:
        """Make `head` the end of the path."""
        if head != self.tree.head:
            self.tree = self.tree.move(head)
            self._write(Head(head))

    def rename(self, title: str) -> None:
        """Give the session another title; the file keeps its name."""
        self.title = title
        self._write(Title(title))

    def record_settings(self, values: Mapping[str, Value], form: Form | None = None) -> None:
        """Remember what the user chose, and what replies must be; it holds again when the session is opened."""
        if (values, form) != (self.settings, self.form):
            self.settings, self.form = dict(values), form
            self._write(Set(dict(values), form), durable=False)

    def draft(self, id: str, parent: str | None, text: str, model: str = "") -> None:
        """Write down `text`, the next part of a reply that `model` is still generating."""
        self._write(Draft(id, parent, text, model), durable=False)

    def fork(self) -> "Session":
        """A new session that begins with this one's path; it is saved from its next message on."""
        copy = Session(self.folder, self.title, forked_from=self.id)
        copy.tree = Tree().replay(self.path)
        copy.settings, copy.form = self.settings, self.form
        copy._unwritten = [Set(dict(self.settings), self.form), *self.path] if self.settings else list(self.path)
        return copy

    def discard(self) -> Path | None:
        """Move the file to the folder TRASH beside it and close; where it went. ChatError when it cannot be."""
        if self._file is None or not self._file.path.exists():
            self._file = None
            return None
        source, trash = self._file.path, private_folder(self._file.path.parent / TRASH)
        try:
            source.rename(trash / source.name)
            fsync(source.parent)
        except OSError as fault:
            raise ChatError(f"{source}: {fault.strerror}", "the session stays where it is") from None
        self.close()
        self._file = None
        return trash / source.name

    def save(self) -> None:
        """Try again to write what could not be written."""
        self._write()

    def close(self) -> None:
        """Release the file. The session can still be read."""
        if self._file:
            self._file.close()

    def _write(self, *records: Record, durable: bool = True) -> None:
        if self.folder is None:
            return
        self._unwritten += records
        if self._file:
            header = [msgspec.structs.replace(self.header, title=self.title)] if self._headless else []
            self._file.append(*header, *self._unwritten, durable=durable)
            self._headless = False
            self._unwritten.clear()

    def _name_file(self, folder: Path) -> None:
        """Name the file by date, title and id; renaming the session never renames it."""
        parts = (self.header.created[:10], slug(self.title), self.id)
        self._file = SessionFile(folder / ("-".join(filter(None, parts)) + SUFFIX))

    def _mend(self, log: Log) -> Iterator[str]:
        """Turn what a crash left into messages; one line for each thing done."""
        if log.damaged:
            lines = "1 damaged line" if log.damaged == 1 else f"{log.damaged} damaged lines"
            yield f"{lines} of the session file skipped; nothing of the file was removed"
        yield from _unusable(log.settings)
        if self.read_only:
            yield f"this session is read-only ({self.obstacle}): `/fork` goes on in a copy"
            return
        if log.torn:
            yield f"the last line of the session file was cut short by a crash ({len(log.torn)} bytes)"
        for draft in log.drafts:
            self.add(Message(draft.id, draft.parent, "assistant", draft.text, now(), "crash", model=draft.model))
            yield f"recovered {len(draft.text)} characters of a reply that a crash interrupted"


def loss_words(fault: str) -> str:
    """What the user is asked before leaving a session that cannot be saved because of `fault`."""
    return f"not saved: {fault}; again leaves and loses it; /export md PATH keeps it elsewhere"


def first_line(messages: Iterable[Message]) -> str:
    """A title made of the first line that the user wrote."""
    lines = (line.strip() for message in messages if message.role == "user" for line in message.text.splitlines())
    line = next(filter(None, lines), "")
    return line if len(line) <= TITLE_LENGTH else line[: TITLE_LENGTH - 1].rstrip() + "…"


def slug(title: str) -> str:
    """The title as part of a file name: lower-case letters, digits and dashes; may be empty."""
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode().lower()
    return "-".join(re.findall("[a-z0-9]+", plain))[:40].strip("-")


def _unusable(settings: Mapping[str, Value]) -> Iterator[str]:
    """One line for each of the settings of a session that has a value of the wrong type or range."""
    for name in filter(BY_NAME.__contains__, settings):
        try:
            BY_NAME[name].check(settings[name], "the session file")
        except UsageError as fault:
            yield f"{fault.message}: not used"


def _id_in_name(path: Path) -> str:
    return path.stem.rpartition("-")[2]


def find_session(which: str, paths: Paths) -> Path:
    """The file of the session called `which`: "last", an id, a title in any case, or a path. SessionError if none."""
    if which != "last" and (which.endswith(SUFFIX) or "/" in which):
        return Path(os.path.expanduser(which))
    for summary in saved_sessions(paths):
        if which in ("last", summary.id) or which.casefold() == summary.title.casefold():
            return summary.path
    for path in unreadable_sessions(paths):  # opening it says what is wrong
        if which in (path.stem, _id_in_name(path)):
            return path
    what = "no session is saved yet" if which == "last" else f"there is no session '{which}'"
    raise SessionError(what, f"sessions are kept in {paths.sessions}")


def list_sessions(paths: Paths) -> list[SessionSummary]:
    """The saved sessions, the one changed last first. Files that hold no message are left out."""
    return list(saved_sessions(paths))


def unreadable_sessions(paths: Paths) -> dict[Path, str]:
    """The session files that `list_sessions` leaves out, and why."""
    return {path: found for path, found in session_files(paths) if isinstance(found, str)}


def saved_sessions(paths: Paths) -> Iterator[SessionSummary]:
    """`list_sessions` one by one: a file is read when its turn comes (0.1 ms for one of 60 kB)."""
    return (found for _, found in session_files(paths) if isinstance(found, SessionSummary))


def session_files(paths: Paths) -> Iterator[tuple[Path, SessionSummary | str]]:
    """Every session file and what is in it, or why that cannot be said; the one changed last first."""
    changed: list[tuple[float, Path]] = []
    for path in paths.sessions.glob("*" + SUFFIX):
        with suppress(OSError):
            changed.append((path.stat().st_mtime, path))
    for updated, path in sorted(changed, reverse=True):
        try:
            yield path, _summary(path, updated)
        except SessionError as fault:
            yield path, str(fault)


def _summary(path: Path, updated: float) -> SessionSummary:
    """The list line of one file, by byte search: no message is decoded, because there may be thousands of files.

    SessionError where there is none.
    """
    try:
        data = read_file(path, LARGEST)
    except OSError as fault:
        raise SessionError(fault.strerror or str(fault)) from None
    lines = (data[at : data.find(b"\n", at) + 1] for at in (data.find(b'{"exl2chat":'), data.rfind(b'{"k":"title"')))
    log = load(b"".join(lines))
    if not (messages := data.count(b'{"k":"msg"')):
        raise SessionError("it is empty" if not data else "no message is in it")
    id = log.header.id if log.header else _id_in_name(path)
    return SessionSummary(id, log.title or path.stem, updated, messages, path)
