"""`exl2chat sessions` over files that somebody else may have written."""

import argparse
from pathlib import Path

import pytest

from exl2chat import sessions
from exl2chat.chat.events import Message
from exl2chat.chat.records import Header, dump
from exl2chat.chat.session import Session
from exl2chat.errors import ChatError, SessionError
from exl2chat.paths import Paths
from exl2chat.settings import Settings


def test_the_list_obeys_no_session_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = Paths.default(tmp_path)
    paths.sessions.mkdir(parents=True)
    header = Header(1, "id\x1b[31m", "", "title\x1b]52;c;x\x07")
    (paths.sessions / "x.jsonl").write_bytes(dump(header) + dump(Message("a", None, "user", "x")))
    assert sessions.main(argparse.Namespace(query="TITLE"), Settings(), paths) == 0
    shown = capsys.readouterr().out
    header, line = shown.splitlines()
    assert header.split() == ["id", "changed", "messages", "title"]
    assert line.startswith("id\u241b[31m  ")
    assert line.isprintable()


def test_files_that_cannot_be_read_are_told_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = Paths.default(tmp_path)
    paths.sessions.mkdir(parents=True)
    newer = dump(Header(99, "c3", "", "t")) + dump(Message("a", None, "user", "x"))
    for name, data in {"x-a1": b"\x80garbage", "x-b2": b"", "x-c3": newer}.items():
        (paths.sessions / f"{name}.jsonl").write_bytes(data)
    assert sessions.main(argparse.Namespace(query=""), Settings(), paths) == 0
    told = capsys.readouterr()
    assert told.out == ""
    reasons = (
        "x-a1.jsonl cannot be read: no message",
        "x-b2.jsonl cannot be read: it is empty",
        "x-c3.jsonl cannot be",
    )
    assert all(any(reason in line for line in told.err.splitlines()) for reason in reasons)
    assert "of format 99 (a newer exl2chat wrote it: update)" in told.err
    assert len(told.err.splitlines()) == 3
    for name in ("c3", "a1"):
        with pytest.raises(SessionError, match=f"x-{name}.jsonl: "):
            Session.open(name, paths)
    session = Session.create(paths)
    session.add(Message("a", None, "user", "Quantum cats"))
    sessions.main(argparse.Namespace(query=""), Settings(), paths)
    assert "Quantum cats" in capsys.readouterr().out


def test_words_that_no_title_has_are_told(tmp_path: Path) -> None:
    paths = Paths.default(tmp_path)
    session = Session.create(paths)
    session.add(Message("a", None, "user", "Quantum cats"))
    with pytest.raises(ChatError, match="no saved chat has 'dogs' in its title"):
        sessions.main(argparse.Namespace(query="dogs"), Settings(), paths)
