"""What replies must be: said in the chat, sent with every request, shown and taken back."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from exl2chat.chat.completion import complete
from exl2chat.chat.events import Notice, ShowPage
from exl2chat.chat.forms import Kind, form_of
from exl2chat.chat.pages import form_page
from exl2chat.chat.session import Session
from exl2chat.errors import UsageError
from exl2chat.link.protocol import Form
from exl2chat.link.scripted import Fail, Say, Script
from exl2chat.paths import Paths

from .conftest import Start, replies
from .test_commands import MODELS


async def test_a_form_holds_for_the_next_replies_until_it_is_taken_back(start: Start) -> None:
    chat = await (await start(replies("1", "2", "3", "4", "5"))).ready()
    await chat.say("a", '/json {"type": "object"}', "b", "/retry", "/regex [0-9]+", "c", "/json off", "d")
    schema = Form("json", '{"type": "object"}')
    assert [request.form for request in chat.generated] == [None, schema, schema, Form("regex", "[0-9]+"), None]
    assert chat.controller.form is None


async def test_a_form_is_kept_with_its_session(start: Start, paths: Paths) -> None:
    chat = await (await start(replies("1", "2", "3"), Session.create(paths))).ready()
    await chat.say("/regex [0-9]+", "a", "/new", "b", "/regex off", "/open a", "/fork", "c")
    digits = Form("regex", "[0-9]+")
    assert [request.form for request in chat.generated] == [digits] * 3
    await chat.controller.close()
    for title, form in (("a", digits), ("b", None)):
        session = Session.open(title, paths)
        chat = await (await start(replies("1"), session)).ready()
        await chat.say("more")
        assert chat.generated[-1].form == form
        await chat.controller.close()


async def test_a_form_is_shown_without_an_argument(start: Start, tmp_path: Path) -> None:
    chat = await (await start()).ready()
    await chat.say("/json")
    assert chat.last(ShowPage).markdown.startswith("Anything.")
    file = tmp_path / "rules.gbnf"
    file.write_text('root ::= "a" | "b"\n')
    await chat.say(f"/grammar {file}")
    assert chat.last(Notice).text == "from the next reply on: sentences of this grammar; `/grammar off` ends it"
    await chat.say("/grammar")
    page = chat.last(ShowPage).markdown
    assert str(file.name) in page
    assert '\n    root ::= "a" | "b"' in page


def test_a_form_is_shown_letter_for_letter_and_of_a_long_one_the_beginning() -> None:
    assert form_page(Form("regex", r"a\.b_*c*")).endswith("\n\n    a\\.b_*c*")
    assert len(form_page(Form("json", "[1]" * 10**6))) < 5000


async def test_a_form_that_cannot_be_read_leaves_the_one_there_is(start: Start) -> None:
    chat = await (await start()).ready()
    await chat.say("/regex a", "/json {", "/json nowhere.json", "/regex (a", "/regex a(?=b)")
    errors = [notice for notice in chat.of(Notice) if notice.level == "error"]
    assert [(error.text.rpartition(" (")[0], error.status) for error in errors] == [
        ("JSON schema: line 1, column 2: Expecting property name enclosed in double quotes", 2),
        ("nowhere.json: No such file or directory", 2),
        ("regular expression, character 1: unclosed group", 2),
        ("regular expression, character 2: look-around, including look-ahead and look-behind, is not supported", 2),
    ]
    assert chat.controller.form == Form("regex", "a")


async def test_a_reply_cannot_be_continued_in_a_form(start: Start) -> None:
    chat = await (await start(replies("one", "two"))).ready()
    await chat.say("hi", "/regex a", "/continue")
    assert chat.last(Notice).text.startswith("/continue: the next replies are of a given form")
    assert "/regex off" in chat.last(Notice).text
    await chat.say("/regex off", "/continue")
    assert len(chat.generated) == 2


async def test_what_the_engine_says_of_a_form_is_shown(start: Start) -> None:
    script = Script(replies=((Fail("JSON schema, at /items: no", "take it out", 2),), (Say("free"),)))
    chat = await (await start(script)).ready()
    await chat.say("/json {}", "hi")
    assert (chat.last(Notice).level, chat.last(Notice).status) == ("error", 2)
    assert "at /items" in chat.last(Notice).text


def test_a_file_and_a_text_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:b").write_text('start: "x"')
    assert form_of("grammar", "a:b") == Form("grammar", 'start: "x"', "a:b")
    assert form_of("grammar", 'start: "y"') == Form("grammar", 'start: "y"')
    assert form_of("json", "true") == Form("json", "true")
    assert form_of("regex", "a:b") == Form("regex", "a:b")


@pytest.mark.parametrize(
    ("kind", "content", "complaint"),
    [
        ("json", b"[{}]", "this JSON is no schema"),
        ("json", b'{\n "type": "object",\n}', "line 3, column 1: Expecting property name"),
        ("json", b"[" * 100_000, "nested too deeply"),
        ("grammar", b"start: \n\xff", "line 2 is not UTF-8"),
        ("grammar", b"#" * (5 << 20), "larger than 4 MiB"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_place(
    tmp_path: Path, kind: str, content: bytes, complaint: str
) -> None:
    file = tmp_path / "form"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=f"form: .*{complaint}"):
        form_of(kind, str(file))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nonsense{", "JSON schema: line 1, column 1: Expecting value"),
        ('"type": {}', "JSON schema: line 1, column 7: Extra data"),
        ("[{}]", "JSON schema: this JSON is no schema"),
        ("nonsense", r"nonsense: No such file or directory \(.*itself, which begins with {\)"),
    ],
)
def test_wrong_json_is_told_from_a_file_that_is_not_there(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        form_of("json", text)


def test_the_name_of_a_file_may_hold_a_brace(tmp_path: Path) -> None:
    (tmp_path / "a{").write_text("true")
    assert form_of("json", str(tmp_path / "a{")).text == "true"


@pytest.mark.parametrize(("kind", "text"), [("json", '{"const": "\udcff"}'), ("regex", "\ud800"), ("grammar", "a: \0")])
def test_what_is_no_text_is_refused(kind: Kind, text: str) -> None:
    with pytest.raises(UsageError, match="holds a NUL or is not UTF-8"):
        form_of(kind, text)


def test_the_name_of_a_file_need_not_be_text(tmp_path: Path) -> None:
    file = tmp_path / "schema\udcff"
    file.write_text("{}")
    assert form_of("json", str(file)) == Form("json", "{}", f"{tmp_path}/schema?")


@pytest.mark.parametrize("make", [os.mkfifo, lambda file: file.symlink_to("/dev/zero")])
def test_what_may_never_end_is_not_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "form")
    with pytest.raises(UsageError, match="form: is not a regular file"):
        form_of("json", str(tmp_path / "form"))


@pytest.mark.parametrize("name", ["", "\0", "/", "~nobody of that name/schema"])
def test_what_names_no_file_is_an_error(name: str) -> None:
    with pytest.raises(UsageError):
        form_of("json", name)


def test_files_and_off_are_offered(tmp_path: Path, paths: Paths) -> None:
    (tmp_path / "schema.json").touch()
    assert [each.text for each in complete(f"/json {tmp_path}/s", MODELS, paths)] == [f"/json {tmp_path}/schema.json"]
    assert "/grammar off" in [each.text for each in complete("/grammar ", MODELS, paths)]
