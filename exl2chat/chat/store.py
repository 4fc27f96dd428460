"""The file of one session: appended to, never rewritten, locked against a second writer.

One write() per group of records on an O_APPEND descriptor: process death leaves all of the group or none. A power
loss or a full disk can tear the last line; it is copied beside the file and cut before the next append. What cannot be
written waits in memory and goes out with the next record that can: a full disk costs durability, never the chat.
"""

import fcntl
import os
from contextlib import suppress
from errno import ENOLCK, ENOSPC, ENOTSUP
from pathlib import Path

from exl2chat.chat.records import Header, Log, Record, dump, load
from exl2chat.errors import ChatError, SessionError
from exl2chat.paths import check_file, fsync, keep_private, open_private, private_folder

LARGEST = 256 << 20  # bytes; a chat of a million words has 6 MB


class SessionFile:
    """Appends records to `path`, unless there is an `obstacle`: why the file may only be read.

    `fault` says why the last attempt failed; None when all is on disk.
    """

    def __init__(self, path: Path, log: Log | None = None, handle: int = -1, obstacle: str = "") -> None:
        self.path = path
        self.obstacle = obstacle
        self.fault: str | None = None
        self._handle = handle
        self._size = log.size if log else 0
        self._torn = log.torn if log else b""
        self._waiting = bytearray() if log is None or log.complete else bytearray(b"\n")

    @classmethod
    def open(cls, path: Path) -> tuple["SessionFile", Log]:
        """The file and what it says. Read-only when another process has it open or its permissions say so.

        SessionError (status 6) when it cannot be read or holds nothing of a session.
        """
        handle, obstacle = _open_locked(path)
        try:
            log = _read(handle)
        except OSError as fault:
            os.close(handle)
            remedy = "check the file and its permissions, or choose another with --resume"
            raise SessionError(f"{path}: {fault.strerror}", remedy) from None
        except SessionError as fault:
            os.close(handle)
            raise SessionError(f"{path}: {fault.message}", fault.remedy) from None
        return cls(path, log, handle, obstacle or _refusal(handle)), log

    def append(self, *records: Record | Header, durable: bool = True) -> None:
        """Write `records` in one write(); when `durable`, return only once they are on the disk.

        A failure is kept in `fault`, the records in memory for the next attempt. Nothing is written when read-only.
        """
        if self.obstacle:
            return
        for record in records:
            self._waiting += dump(record)
        try:
            self._flush(durable or self.fault is not None)
            self.fault = None
        except (OSError, ChatError) as fault:
            self.fault = fault.strerror or str(fault) if isinstance(fault, OSError) else fault.message

    def close(self) -> None:
        """Write what is waiting, if that is possible now, and release the lock. Any further call does nothing."""
        if self._waiting and self.fault:
            self.append()
        if self._handle >= 0:
            os.close(self._handle)
        self._handle, self.obstacle = -1, "closed"

    def _flush(self, durable: bool) -> None:
        new = self._handle < 0
        try:
            if new:
                self._create()
            self._cut_tail()
            written = os.write(self._handle, self._waiting)
            if written < len(self._waiting):
                raise OSError(ENOSPC, os.strerror(ENOSPC))
        except OSError:
            if new:
                self._remove()
            raise
        if durable:
            # After a failed sync nobody knows what the disk holds: the records stay in `_waiting`, the next flush
            # cuts them off and writes them again.
            os.fdatasync(self._handle)
        self._size += written
        self._waiting.clear()

    def _create(self) -> None:
        if not self.path.parent.is_dir():  # one that is there may be anybody's: /fork saves beside what was opened
            private_folder(self.path.parent)
        handle = open_private(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            _lock(handle)
        except OSError:
            os.close(handle)
            raise
        self._handle = handle
        fsync(self.path.parent)

    def _remove(self) -> None:
        """Leave no file where nothing could be written to it: there was none before."""
        if self._handle < 0:
            return
        with suppress(OSError):
            self.path.unlink()
        os.close(self._handle)
        self._handle = -1

    def _cut_tail(self) -> None:
        """Remove what follows the last whole record: a torn line (copied first) or our own failed write."""
        end = os.fstat(self._handle).st_size
        if end <= self._size:
            return
        if self._torn:
            copy = open_private(self.path.with_suffix(".torn"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                os.write(copy, self._torn + b"\n")
                os.fdatasync(copy)
            finally:
                os.close(copy)
            self._torn = b""
        os.ftruncate(self._handle, self._size)


def _open_locked(path: Path) -> tuple[int, str]:
    """A descriptor of `path`, and why it may only be read, if so. Opening a pipe does not wait for a writer."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as refusal:
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), refusal.strerror or str(refusal)
        except OSError as fault:
            raise SessionError(f"{path}: {fault.strerror}", "`exl2chat --resume` lists the saved ones") from None
    try:
        _lock(handle)
    except BlockingIOError:
        return handle, "another exl2chat has it open"
    return handle, ""


def _read(handle: int) -> Log:
    """What an open file says. SessionError or OSError where it is no session."""
    check_file(handle, LARGEST)
    with open(handle, "rb", closefd=False) as file:
        log = load(file.read())
    if log.size + len(log.torn) and not log.tree.messages and log.header is None:
        raise SessionError("nothing in it is a record of a session", "choose another with --resume")
    return log


def _refusal(handle: int) -> str:
    """Why a session cannot be made its owner's alone, so that nothing may be added to it; empty if it is."""
    try:
        keep_private(handle)
    except OSError as fault:
        return fault.strerror or str(fault)
    return ""


def _lock(handle: int) -> None:
    """Become the one writer, until the descriptor closes or the process dies. BlockingIOError when another is."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as fault:
        if fault.errno not in (ENOLCK, ENOTSUP):  # some network file systems have no locks: better that than unsaved
            raise
