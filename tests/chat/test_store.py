"""The session file on a disk that fails, fills up or belongs to somebody else."""

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from exl2chat.chat.events import Message
from exl2chat.chat.records import Header, dump, load
from exl2chat.chat.session import Session
from exl2chat.chat.store import LARGEST, SessionFile
from exl2chat.errors import SessionError
from exl2chat.paths import Paths

from .faults import FailingDisk

TALK = [
    Message(f"m{n}", f"m{n - 1}" if n else None, "user" if n % 2 == 0 else "assistant", f"text {n}") for n in range(5)
]


def talk(session: Session) -> None:
    """Say TALK, with a rename and a draft in between."""
    for message in TALK:
        session.draft(message.id, message.parent, message.text[:3])
        session.add(message)
    session.rename("another title")


def saved(session: Session) -> bytes:
    assert session.file is not None
    return session.file.read_bytes()


@pytest.mark.parametrize("errno_", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.EMFILE])
@pytest.mark.parametrize("length", [1, 4, 10_000], ids=["once", "four times", "for ever"])
def test_a_call_that_fails_costs_nothing_once_the_disk_works_again(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, errno_: int, length: int
) -> None:
    """The first call fails, then the second, and so on until a whole conversation meets no failing call."""
    first, reached = 1, True
    while reached:
        session = Session.create(paths)
        with monkeypatch.context() as patch:
            disk = FailingDisk(patch, range(first, first + length), errno_)
            talk(session)
            reached = disk.calls >= first
            faulty = session.fault
        if length == 10_000 and reached:
            assert faulty == os.strerror(errno_)
        session.close()
        log = load(saved(session))
        assert list(log.tree.messages.values()) == TALK, f"call {first}"
        assert (log.damaged, log.torn, log.title) == (0, b"", "another title")
        first += 1
    assert first > 20


def test_a_write_that_ends_halfway_is_done_again(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session.create(paths)
    session.add(TALK[0])
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda handle, data: write(handle, data[: len(data) // 2]))
        session.add(TALK[1])
    assert session.fault == "No space left on device"
    session.add(TALK[2])
    assert session.fault is None
    log = load(saved(session))
    assert (log.tree.path, log.damaged) == (tuple(TALK[:3]), 0)


@pytest.mark.parametrize("share", [0, 0.5], ids=["nothing", "half"])
def test_no_file_is_left_where_nothing_could_be_written(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    def full(handle: int, data: bytes) -> int:
        if not share:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data[: int(len(data) * share)])

    session, write = Session.create(paths), os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        session.add(TALK[0])
        assert session.fault == "No space left on device"
        assert list(paths.sessions.iterdir()) == []
    session.add(TALK[1])
    assert (session.fault, load(saved(session)).tree.path) == (None, tuple(TALK[:2]))


def test_a_fault_is_told_and_taken_back(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session.create(paths)
    session.add(TALK[0])
    with monkeypatch.context() as patch:
        FailingDisk(patch, range(1, 100), errno.ENOSPC)
        session.add(TALK[1])
    assert session.fault == "No space left on device"
    assert session.path == tuple(TALK[:2])
    session.add(TALK[2])
    assert session.fault is None
    assert load(saved(session)).tree.path == tuple(TALK[:3])


def test_messages_reach_the_disk_in_one_write_and_are_synced_and_drafts_are_not(
    paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def noted(name: str, real: Callable[..., object]) -> Callable[..., object]:
        return lambda *args: (calls.append(name), real(*args))[1]

    for name in ("write", "fdatasync"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    session = Session.create(paths)
    session.record_settings({"model": "m"})
    session.add(TALK[0])
    session.draft("m1", "m0", "so")
    session.add(TALK[1])
    assert calls == ["write", "fdatasync", "write", "write", "fdatasync"]


def test_a_torn_line_is_kept_aside_and_cut(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    whole = dump(Header(1, "s", "", "t")) + dump(TALK[0])
    path.write_bytes(whole + b'{"k":"msg","id":"m1","par')
    file, log = SessionFile.open(path)
    assert log.torn == b'{"k":"msg","id":"m1","par'
    assert path.read_bytes().endswith(b'"par')  # looking changes nothing
    file.append(TALK[1])
    assert path.read_bytes() == whole + dump(TALK[1])
    assert path.with_suffix(".torn").read_bytes() == log.torn + b"\n"


def test_a_line_that_lost_only_its_line_feed_gets_it(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    whole = dump(Header(1, "s", "", "t")) + dump(TALK[0])
    path.write_bytes(whole[:-1])
    file, _ = SessionFile.open(path)
    file.append(TALK[1])
    assert path.read_bytes() == whole + dump(TALK[1])


def test_the_second_writer_reads_only_until_the_first_is_gone(paths: Paths) -> None:
    first = Session.create(paths)
    first.add(TALK[0])
    assert first.file is not None
    second = Session.open(first.file, paths)
    assert (first.read_only, second.read_only) == (False, True)
    assert any("/fork" in line for line in second.notices)
    before = first.file.read_bytes()
    second.rename("mine")
    assert first.file.read_bytes() == before
    first.close()
    assert not Session.open(first.file, paths).read_only


def test_the_lock_holds_between_processes_and_ends_with_one(paths: Paths) -> None:
    session = Session.create(paths)
    session.add(TALK[0])
    session.close()
    assert session.file is not None
    code = (
        "import sys; from pathlib import Path; from exl2chat.chat.store import SessionFile\n"
        "file, _ = SessionFile.open(Path(sys.argv[1])); print(bool(file.obstacle), flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(session.file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "False\n"
        assert Session.open(session.file, paths).read_only
    finally:
        holder.kill()
        holder.communicate()
    assert not Session.open(session.file, paths).read_only


def test_files_are_private_whatever_the_umask(paths: Paths) -> None:
    before = os.umask(0)
    try:
        session = Session.create(paths)
        talk(session)
        assert session.file is not None
        session.file.with_suffix(".torn").unlink(missing_ok=True)
        session.close()
        session.file.open("ab").write(b'{"k":"ms')
        again = Session.open(session.file, paths)
        again.rename("x")
        trash = again.discard()
    finally:
        os.umask(before)
    assert trash is not None
    made = list(paths.data.rglob("*"))
    assert {path.suffix for path in made if path.is_file()} == {".jsonl", ".torn"}
    for path in made:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("data", [b"PK\x03\x04" * 50, b"\0" * 512, b"not a session\n", b'{"messages": []}\n'])
def test_a_file_of_something_else_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(data)
    with pytest.raises(SessionError, match=r"x\.jsonl"):
        SessionFile.open(path)
    assert path.read_bytes() == data


def test_a_file_gets_private_only_once_it_is_known_to_be_a_session(tmp_path: Path) -> None:
    notes, session = tmp_path / "notes.txt", tmp_path / "s.jsonl"
    notes.write_text("not a session\n")
    session.write_bytes(dump(Header(1, "s", "", "t")) + dump(TALK[0]))
    for path in (notes, session):
        path.chmod(0o644)
    with pytest.raises(SessionError):
        SessionFile.open(notes)
    SessionFile.open(session)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (notes, session)] == [0o644, 0o600]


def test_the_copy_of_a_session_leaves_the_folder_as_it_is(tmp_path: Path, paths: Paths) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(dump(Header(1, "s", "", "t")) + dump(TALK[0]))
    tmp_path.chmod(0o755)
    copy = Session.open(path, paths).fork()
    copy.add(TALK[1])
    assert (copy.fault, stat.S_IMODE(tmp_path.stat().st_mode)) == (None, 0o755)


def test_a_session_that_cannot_be_made_private_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(dump(Header(1, "s", "", "t")) + dump(TALK[0]))
    path.chmod(0o664)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchmod", refuse)
    file, log = SessionFile.open(path)
    assert (file.obstacle, log.tree.path) == ("Operation not permitted", (TALK[0],))


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_only_a_regular_file_is_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "x.jsonl"
    make(path)
    with pytest.raises(SessionError, match=r"x\.jsonl: is not a regular file"):
        SessionFile.open(path)


def test_a_file_far_too_large_for_a_session_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(dump(Header(1, "s", "", "t")) + dump(TALK[0]))
    os.truncate(path, LARGEST + 1)
    with pytest.raises(SessionError, match=r"x\.jsonl: is larger than 256 MiB"):
        SessionFile.open(path)


def test_an_empty_file_is_an_empty_session(tmp_path: Path, paths: Paths) -> None:
    path = tmp_path / "2026-11-21-cats-7f3a.jsonl"
    path.touch()
    session = Session.open(path, paths)
    session.add(TALK[0])
    log = load(path.read_bytes())
    assert log.header is not None
    assert (log.header.id, log.title, log.tree.path) == ("7f3a", "text 0", (TALK[0],))
