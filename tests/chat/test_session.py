"""Sessions: when they are saved, how they are found, forked and thrown away."""

import errno
import os
from pathlib import Path

import pytest

from exl2chat.chat.events import Message
from exl2chat.chat.records import Draft, dump, load
from exl2chat.chat.session import Session, first_line, list_sessions, slug, unreadable_sessions
from exl2chat.chat.store import LARGEST
from exl2chat.errors import ChatError, SessionError
from exl2chat.paths import Paths


def user(id: str, text: str, parent: str | None = None) -> Message:
    return Message(id, parent, "user", text)


def make(paths: Paths, text: str, changed: int) -> Session:
    """A closed session with one message, last changed at `changed`."""
    session = Session.create(paths)
    session.add(user("u1", text))
    session.close()
    assert session.file is not None
    os.utime(session.file, (changed, changed))
    return session


def test_there_is_no_file_before_the_first_message(paths: Paths) -> None:
    session = Session.create(paths)
    session.record_settings({"model": "smollm2"})
    session.rename("cats")
    session.close()
    assert not paths.sessions.exists()


def test_a_session_comes_back_as_it_was(paths: Paths) -> None:
    session = Session.create(paths)
    session.record_settings({"model": "smollm2", "temperature": 0.5})
    session.add(user("u1", "  \nWhat do cats\nthink?"))
    session.add(Message("a1", "u1", "assistant", "Little.", stop="eos"))
    session.add(Message("b1", "u1", "assistant", "Much.", stop="stopped"))
    session.move("a1")
    session.close()
    again = Session.open(session.id, paths)
    assert (again.id, again.title, again.tree) == (session.id, "What do cats", session.tree)
    assert again.settings == {"model": "smollm2", "temperature": 0.5}
    assert again.notices == ()
    assert [message.text for message in again.path] == ["  \nWhat do cats\nthink?", "Little."]


def test_a_session_in_memory_leaves_no_trace(paths: Paths) -> None:
    session = Session.in_memory()
    session.add(user("u1", "secret"))
    assert (session.file, session.discard(), session.title) == (None, None, "secret")
    assert not paths.data.exists()


def test_the_list_is_newest_first_and_says_what_is_inside(paths: Paths) -> None:
    make(paths, "older", 1000)
    newer = make(paths, "newer", 2000)
    assert newer.file is not None
    renamed = Session.open(newer.file, paths)
    renamed.rename("with \\n another title")
    renamed.add(user("u2", 'a reply with {"k":"title","title":"x"} in it', "u1"))
    renamed.close()
    (paths.sessions / "broken.jsonl").write_bytes(b"\0" * 100)
    (paths.sessions / "empty.jsonl").touch()
    assert [(saved.title, saved.messages) for saved in list_sessions(paths)] == [
        ("with \\n another title", 2),
        ("older", 1),
    ]
    assert list_sessions(paths)[0].id == newer.id


def test_a_session_is_found_by_id_title_path_and_as_the_last(paths: Paths) -> None:
    older, newer = make(paths, "Older one", 1000), make(paths, "newer", 2000)
    assert older.file is not None
    for which in (older.id, "older ONE", older.file, str(older.file)):
        found = Session.open(which, paths)
        assert found.id == older.id
        found.close()
    assert Session.open("last", paths).id == newer.id


@pytest.mark.parametrize("which", ["last", "nobody", "nobody.jsonl", Path("nowhere/nobody.jsonl")])
def test_what_is_not_there_is_said_in_one_line(which: str | Path, paths: Paths) -> None:
    with pytest.raises(SessionError) as caught:
        Session.open(which, paths)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


def test_an_interrupted_reply_becomes_a_message(paths: Paths) -> None:
    session = make(paths, "hello", 1000)
    assert session.file is not None
    with session.file.open("ab") as file:
        file.write(dump(Draft("a1", "u1", "Once upon", "SmolLM2")) + dump(Draft("a1", "u1", " a time")))
    again = Session.open(session.file, paths)
    assert again.notices == ("recovered 16 characters of a reply that a crash interrupted",)
    reply = again.path[-1]
    assert (reply.text, reply.stop, reply.model) == ("Once upon a time", "crash", "SmolLM2")
    again.close()
    assert Session.open(session.file, paths).notices == ()


def test_damage_is_told_once_per_opening_and_stays_in_the_file(paths: Paths) -> None:
    session = make(paths, "hello", 1000)
    assert session.file is not None
    with session.file.open("ab") as file:
        file.write(b"\0" * 512 + b"\n{broken\n" + dump(user("u2", "still here", "u1")))
    before = session.file.read_bytes()
    again = Session.open(session.file, paths)
    assert again.notices == ("2 damaged lines of the session file skipped; nothing of the file was removed",)
    again.rename("x")
    assert session.file.read_bytes().startswith(before)
    assert [message.text for message in again.path] == ["hello", "still here"]


def test_a_setting_with_a_value_that_cannot_be_is_named(paths: Paths) -> None:
    session = make(paths, "hello", 1000)
    assert session.file is not None
    with session.file.open("ab") as file:
        file.write(b'{"k":"set","values":{"temperature":"hot","top_k":4,"of a later version":[1]}}\n')
        file.write(b'{"k":"set","values":{"temperature":"hot","top_k":4,"of a later version":1}}')
    again = Session.open(session.file, paths)
    damage, setting = again.notices
    assert damage.startswith("1 damaged line ")
    assert setting.startswith("the session file: temperature is a number from ")
    assert setting.endswith(", not 'hot': not used")


def test_a_session_without_its_first_line_is_still_one(paths: Paths) -> None:
    session = make(paths, "hello", 1000)
    assert session.file is not None
    data = session.file.read_bytes()
    session.file.write_bytes(b"\0" * data.index(b"\n") + data[data.index(b"\n") :])
    again = Session.open(session.file, paths)
    assert (again.id, again.title, again.path) == (session.id, "hello", session.path)
    again.add(user("u2", "more", "u1"))
    assert [(saved.id, saved.title) for saved in list_sessions(paths)] == [(session.id, "hello")]


def test_a_session_of_a_newer_version_is_refused_and_not_listed(paths: Paths) -> None:
    session = make(paths, "hello", 1000)
    assert session.file is not None
    session.file.write_bytes(session.file.read_bytes().replace(b'"exl2chat":1', b'"exl2chat":2'))
    with pytest.raises(SessionError, match="format 2"):
        Session.open(session.file, paths)
    assert list_sessions(paths) == []


def test_what_cannot_be_a_session_is_not_read_for_the_list(paths: Paths) -> None:
    make(paths, "hello", 1000)
    os.mkfifo(paths.sessions / "pipe.jsonl")
    huge = paths.sessions / "huge.jsonl"
    huge.touch()
    os.truncate(huge, LARGEST + 1)
    assert [saved.title for saved in list_sessions(paths)] == ["hello"]
    assert sorted((path.name, why) for path, why in unreadable_sessions(paths).items()) == [
        ("huge.jsonl", "is larger than 256 MiB"),
        ("pipe.jsonl", "is not a regular file"),
    ]


def test_a_session_without_write_permission_is_read_only(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make(paths, "hello", 1000)
    assert session.file is not None

    real = os.open

    def refuse(path: Path, flags: int) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags)

    monkeypatch.setattr(os, "open", refuse)
    again = Session.open(session.file, paths)
    assert again.notices == ("this session is read-only (Permission denied): `/fork` goes on in a copy",)
    assert [message.text for message in again.path] == ["hello"]


def test_a_session_that_cannot_be_moved_stays_usable(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session.create(paths)
    session.add(user("u1", "hello"))

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(ChatError, match="Read-only file system"):
        session.discard()
    session.add(user("u2", "more", "u1"))
    assert session.fault is None
    assert list_sessions(paths)[0].messages == 2


def test_a_fork_is_a_copy_of_the_path_on_show(paths: Paths) -> None:
    session = Session.create(paths)
    session.record_settings({"model": "m"})
    for message in (user("u1", "1"), Message("a1", "u1", "assistant", "2"), Message("b1", "u1", "assistant", "3")):
        session.add(message)
    copy = session.fork()
    assert copy.file is None
    copy.add(user("u2", "4", "b1"))
    assert (copy.file, session.file) != (None, copy.file)
    copy.close()
    again = Session.open(copy.id, paths)
    assert [message.text for message in again.path] == ["1", "3", "4"]
    assert (again.header.forked_from, again.settings) == (session.id, {"model": "m"})


def test_a_discarded_session_lies_in_the_trash(paths: Paths) -> None:
    session = make(paths, "bin me", 1000)
    where = session.discard()
    assert where is not None
    assert where.parent == paths.sessions / ".trash"
    assert load(where.read_bytes()).title == "bin me"
    assert list_sessions(paths) == []


def test_renaming_does_not_rename_the_file(paths: Paths) -> None:
    session = Session.create(paths)
    session.add(user("u1", "Quantum cats: über alles / ..\\"))
    assert session.file is not None
    assert session.file.name == f"{session.header.created[:10]}-quantum-cats-uber-alles-{session.id}.jsonl"
    before = session.file
    session.rename("dogs")
    assert session.file == before
    assert list_sessions(paths)[0].title == "dogs"


@pytest.mark.parametrize(
    ("title", "expected"), [("", ""), ("../../etc", "etc"), ("猫", ""), ("A  b!c", "a-b-c"), ("x" * 99, "x" * 40)]
)
def test_slug(title: str, expected: str) -> None:
    assert slug(title) == expected


def test_the_title_is_the_user_s_first_line_cut_short() -> None:
    title = first_line([Message("a1", None, "assistant", "no"), user("u1", "\n\n" + "word " * 50)])
    assert title.startswith("word word")
    assert title.endswith("word…")
    assert len(title) <= 60
    assert first_line([]) == ""
