"""The table of actions: grammar, completion, help."""

import errno
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl2chat.chat.commands import BY_NAME, COMMANDS, Invocation, Text, Unknown, command_page, help_page, parse
from exl2chat.chat.completion import complete
from exl2chat.chat.events import Message
from exl2chat.chat.grammar import literal
from exl2chat.chat.session import Session
from exl2chat.errors import ChatError
from exl2chat.paths import Paths
from exl2chat.settings import OPTIONS

from .conftest import Start

MODELS = ("smollm2", "org/Other-Model")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hello", Text("hello")),
        ("/home/me/x is a file", Text("/home/me/x is a file")),
        ("/", Text("/")),
        ("/ help", Text("/ help")),
        ("/etc/passwd", Text("/etc/passwd")),
        ("//help", Text("/help")),
        (" /help me", Text("/help me")),
        ("//nosuch", Text("/nosuch")),
        ("// a comment", Text("// a comment")),
        ("  indented", Text("  indented")),
        ("say /help", Text("say /help")),
        ("/help", Invocation(BY_NAME["help"], "")),
        ("/system be\nbrief", Invocation(BY_NAME["system"], "be\nbrief")),
        ("/q", Invocation(BY_NAME["quit"], "")),
        ("/undo   3 ", Invocation(BY_NAME["undo"], "3")),
        ("/nosuch thing", Unknown("nosuch")),
        ("/hel", Unknown("hel")),
        ("/HELP", Invocation(BY_NAME["help"], "")),
        ("/re-try", Unknown("re-try")),
    ],
)
def test_grammar(line: str, expected: object) -> None:
    assert parse(line) == expected


lines = st.text() | st.builds(
    "{}{}{}".format,
    st.sampled_from(["/", "//", " /", "/ ", ""]),
    st.sampled_from([*BY_NAME, "foo", "Help", "x1"]) | st.text("abc"),
    st.sampled_from(["", " ", "\n", "\t", "/x"]) | st.text(max_size=5),
)


@given(lines)
def test_a_message_is_never_a_command(line: str) -> None:
    action = parse(line)
    if re.match(r"/[A-Za-z][A-Za-z0-9_-]*(\s|$)", line):
        assert isinstance(action, Invocation | Unknown)
    else:
        assert action == Text(line) or action == Text(line[1:])


@given(lines)
def test_any_text_can_be_sent(text: str) -> None:
    assert parse(literal(text)) == Text(text)


@pytest.mark.parametrize("line", ["/hlep", "/model-x", "/nosuch", "/mdoel x", "/hel\nme"])
async def test_what_looks_like_a_command_never_reaches_the_model(start: Start, line: str) -> None:
    chat = await (await start()).ready()
    await chat.controller.submit(line)
    await chat.controller.run(line)
    is_text = isinstance(parse(line), Text)
    assert len(chat.generated) == is_text
    assert all(isinstance(message, Message) for message in chat.controller.path)


@pytest.mark.parametrize("row", COMMANDS, ids=lambda row: row.name)
@pytest.mark.parametrize("argument", ["", "--help", "#1", "nonsense", "'open quote", "1", "default"])
async def test_no_command_fails_with_anything_but_a_clear_line(
    start: Start, row: object, argument: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    chat = await (await start()).ready()
    try:
        await chat.controller.run(f"{row.name} {argument}")  # type: ignore[attr-defined]
    except ChatError:
        pytest.fail("the controller reports errors as notices")
    assert chat.events


def offered(line: str, paths: Paths) -> list[str]:
    return [completion.text for completion in complete(line, MODELS, paths)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/re", ["/retry ", "/redo ", "/rename ", "/regex "]),
        ("/xpor", ["/export "]),
        ("/set top", ["/set top_k", "/set top_p", "/set top_n_sigma", "/set top_a"]),
        ("/set dtype b", ["/set dtype bfloat16"]),
        ("/set temperature ", ["/set temperature default"]),
        ("/set nosuch ", []),
        ("/model sm", ["/model smollm2"]),
        ("/model OTHER", ["/model org/Other-Model"]),
        ("/theme exl2", ["/theme exl2-dark", "/theme exl2-light"]),
        ("/export ", ["/export md", "/export json", "/export txt"]),
        ("/help und", ["/help undo"]),
        ("/branch p", ["/branch prev"]),
        ("/undo ", []),
        ("/help undo x", []),
        ("/export md /nowhere/at/all", []),
        ("/nosuch ", []),
        ("hello", []),
        ("/system a\n/re", []),
    ],
)
def test_completion(line: str, expected: list[str], paths: Paths) -> None:
    assert offered(line, paths) == expected


def test_all_commands_are_offered_with_their_summaries(paths: Paths) -> None:
    assert [(c.display, c.help) for c in complete("/", MODELS, paths)] == [
        (f"/{row.name} {row.syntax}".rstrip(), row.summary) for row in COMMANDS
    ]


def test_saved_sessions_are_offered_by_title(paths: Paths) -> None:
    session = Session.create(paths)
    session.add(Message("u1", None, "user", "Quantum cats"))
    [found] = complete("/open quantum c", MODELS, paths)
    assert (found.text, found.display, found.help) == (f"/open {session.id}", "Quantum cats", "1 message")


@given(st.text(max_size=30))
def test_completion_bears_anything(line: str) -> None:
    for completion in complete("/" + line, MODELS, Paths.default(Path("/nonexistent"))):
        assert isinstance(parse(completion.text), Invocation)


def test_export_paths_are_offered(tmp_path: Path, paths: Paths) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes.md").touch()
    (tmp_path / "other").touch()
    assert offered(f"/export md {tmp_path}/no", paths) == [
        f"/export md {tmp_path}/notes/",
        f"/export md {tmp_path}/notes.md",
    ]


def test_a_folder_that_may_be_listed_and_not_entered_is_completed(
    tmp_path: Path, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notes").mkdir()
    real = os.stat

    def refuse(path: str | os.PathLike[str], **options: bool) -> os.stat_result:
        if os.fspath(path) == str(tmp_path / "notes"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert offered(f"/export md {tmp_path}/no", paths) == [f"/export md {tmp_path}/notes"]


def test_help_names_every_command_once() -> None:
    page = help_page()
    for row in COMMANDS:
        assert page.count(f"| `/{row.name}") == 1
        assert row.summary in page
        assert row.summary.capitalize() in command_page(row)
    assert "`/exit`" in command_page(BY_NAME["quit"])
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in page.splitlines() if line.startswith("|"))


def test_words_are_unique_and_can_be_typed() -> None:
    words = [word for row in COMMANDS for word in (row.name, *row.aliases)]
    assert len(words) == len(set(words))
    assert all(re.fullmatch("[a-z]+", word) for word in words)


def test_every_setting_can_be_completed_and_described(paths: Paths) -> None:
    assert offered("/set ", paths) == [f"/set {row.name}" for row in OPTIONS]
