"""What the commands show and change, each by one scripted run."""

import json
from pathlib import Path

import pytest

from exl2chat.chat.commands import COMMANDS
from exl2chat.chat.events import (
    ChooseSession,
    ChooseTheme,
    FillPrompt,
    Message,
    Notice,
    QuitRequested,
    SessionChanged,
    SettingChanged,
    ShowPage,
)
from exl2chat.chat.pages import stats_page
from exl2chat.chat.session import Session, list_sessions
from exl2chat.link.protocol import Stats
from exl2chat.link.scripted import Fail, Read, Say, Script
from exl2chat.paths import Paths
from exl2chat.settings import OPTIONS, Settings

from .conftest import Start

ANSWERS = Script(replies=((Read(total=1234, cached=200), Say("one two three")), (Say("b|ar"),)))


async def test_set_lists_every_value_with_its_origin(start: Start) -> None:
    settings = Settings().with_layer("config.toml", {"top_k": 40}).with_layer("flag", {"min_p": 0.1})
    chat = await (await start(settings=settings)).ready()
    await chat.say("/set temperature 0.5", "/set")
    page = chat.last(ShowPage).markdown
    assert all(f"| `{row.name}` |" in page for row in OPTIONS)
    for line in ("| `top_k` | 40 | config.toml |", "| `min_p` | 0.1 | flag |", "| `temperature` | 0.5 | /set |"):
        assert line in page
    assert "| `seed` | unset | default |" in page


async def test_set_shows_changes_and_takes_back(start: Start) -> None:
    chat = await (await start(settings=Settings().with_layer("config.toml", {"top_k": 40}))).ready()
    await chat.say("/set top-k 7")
    assert (chat.controller.settings["top_k"], chat.last(SettingChanged).name) == (7, "top_k")
    await chat.say("/set top_k")
    assert chat.last(Notice).text.startswith("top_k is 7 (/set)")
    await chat.say("/set top_k default")
    assert chat.controller.settings.lookup("top_k") == (40, "config.toml")
    await chat.say("/set temperature_last on", "/set temperature_last")
    assert chat.last(Notice).text.startswith("temperature_last is true (/set)")
    await chat.say("/set step_order")
    assert chat.last(Notice).text.startswith("step_order is unset (default)")
    await chat.say("/set top_k many")
    assert (chat.last(Notice).level, chat.last(Notice).status) == ("error", 2)
    await chat.say("/set tpo_k 3")
    assert "did you mean top_k?" in chat.last(Notice).text


async def test_an_unknown_command_names_its_neighbour(start: Start) -> None:
    chat = await (await start()).ready()
    await chat.say("/retyr")
    assert chat.last(Notice).text == "there is no command /retyr (did you mean /retry?)"
    await chat.say("/help zzzzzz")
    assert chat.last(Notice).text == "there is no command /zzzzzz (`/help` lists them)"


async def test_help(start: Start) -> None:
    chat = await (await start()).ready()
    await chat.say("/help")
    assert chat.last(ShowPage).title == "Commands"
    for line in ("/help undo", "/help /undo", "/undo --help"):
        await chat.say(line)
        assert (chat.last(ShowPage).title, chat.last(ShowPage).markdown.split("\n")[0]) == ("/undo", "`/undo [k]`")


async def test_stats_has_a_row_per_reply(start: Start) -> None:
    chat = await (await start(ANSWERS)).ready()
    await chat.say("/stats")
    assert chat.last(ShowPage).markdown == "No reply yet."
    await chat.say("x", "y", "/stats")
    rows = chat.last(ShowPage).markdown.split("\n")
    assert len(rows) == 6
    assert rows[0] == "Model: scripted"
    assert rows[4].startswith("| #2 | 1,234 | 200 | 3 | 0.25 s | 50.0 | eos |")


def test_stats_name_the_model_of_each_reply_where_they_differ() -> None:
    replies = [Message(name, None, "assistant", "", "", stats=Stats(), model=name) for name in ("one", "two")]
    assert [row.split(" | ")[-1] for row in stats_page(replies).split("\n")] == ["model |", "--- |", "one |", "two |"]


def test_stats_leave_out_the_speed_of_a_single_token() -> None:
    stats = Stats(prompt_tokens=5, reply_tokens=1, first_token_s=0.5, decode_s=0.5)
    assert "| #1 | 5 | 0 | 1 | 0.50 s |  | eos | 0 |" in stats_page(
        [Message("a", None, "assistant", "", "", stats=stats, stop="eos")]
    )


async def test_model_shows_what_is_loaded(start: Start) -> None:
    chat = await start()
    await chat.controller.submit("/model")
    assert chat.last(ShowPage).markdown == "`smollm2` is loading."
    await (await chat.ready()).say("/model")
    assert "| architecture | Script |" in chat.last(ShowPage).markdown


async def test_model_tries_again_what_could_not_be_loaded(start: Start) -> None:
    chat = await start(Script(load=(Fail("no network", status=3),)))
    await chat.until(lambda: chat.controller.phase == "down")
    await chat.controller.submit("/model")
    assert chat.last(ShowPage).markdown == "`smollm2` is not loaded."
    chat.engine.script = ANSWERS
    await chat.say("/model smollm2")
    assert len(chat.loads) == 2


async def test_system_shows_what_holds(start: Start) -> None:
    chat = await (await start()).ready()
    pages = []
    for line in ("/system", "/system Be brief.\nBe kind.", "/system", "/system off", "/system"):
        await chat.say(line)
        pages.append(chat.last(ShowPage).markdown)
    assert pages[0] == "Unset: the model's template decides."
    assert pages[2] == "From /set:\n\n> Be brief.\n> Be kind."
    assert pages[4] == "Off (/set)."


async def test_theme_is_chosen_by_name_or_by_looking(start: Start) -> None:
    chat = await (await start()).ready()
    await chat.say("/theme")
    assert isinstance(chat.events[-1], ChooseTheme)
    await chat.say("/theme nord", "/set theme south")
    assert chat.last(Notice).text.startswith("/set: there is no theme 'south' (there are daylight, ")
    await chat.say("/theme north")
    assert (chat.controller.settings["theme"], chat.last(SettingChanged).name) == ("nord", "theme")
    assert chat.last(Notice).text.startswith("/theme: there is no theme 'north' (there are daylight, ")


async def test_quit_asks_the_front_end_to_leave(start: Start) -> None:
    chat = await (await start()).ready()
    for word in ("quit", "exit", "q"):
        await chat.controller.run(word)
        assert isinstance(chat.events.pop(), QuitRequested)


async def test_new_open_rename_and_delete(start: Start, paths: Paths) -> None:
    chat = await (await start(ANSWERS, Session.create(paths))).ready()
    await chat.say("first question")
    first = chat.controller.session
    await chat.say("/new the second", "other question")
    assert (chat.controller.session.title, chat.texts[0]) == ("the second", "other question")
    await chat.say("/rename  a  better title ")
    assert [saved.title for saved in list_sessions(paths)] == ["a better title", "first question"]
    assert isinstance(chat.events[-1], SessionChanged)
    await chat.say("/open FIRST question")
    assert chat.texts[0] == "first question"
    await chat.say("/open QUEST")
    assert chat.last(ChooseSession).query == "QUEST"
    await chat.say("/open nothing like it")
    assert chat.last(ChooseSession).query == "QUEST"
    assert chat.last(Notice).text.startswith("there is no session 'nothing like it'")
    await chat.say("/open")
    assert chat.last(ChooseSession).query == ""
    await chat.say("/delete")
    assert (chat.texts, chat.controller.session.title) == ([], "")
    assert [saved.title for saved in list_sessions(paths)] == ["a better title"]
    assert first.file is not None
    assert (paths.sessions / ".trash" / first.file.name).exists()


async def test_opening_the_session_on_show_by_another_spelling_changes_nothing(
    start: Start, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = await (await start(ANSWERS, Session.create(paths))).ready()
    await chat.say("question")
    session = chat.controller.session
    assert session.file is not None
    monkeypatch.chdir(paths.sessions)
    await chat.say(f"/open ./{session.file.name}")
    assert chat.controller.session is session
    assert not session.read_only


async def test_more_undo_than_there_are_questions_goes_to_the_start(start: Start) -> None:
    chat = await (await start(ANSWERS)).ready()
    await chat.say("question", "/undo 999999")
    assert chat.texts == []
    await chat.say("/redo 999999")
    assert chat.texts == ["question", "one two three"]


async def test_a_chat_in_memory_stays_in_memory(start: Start, paths: Paths) -> None:
    chat = await (await start(ANSWERS)).ready()
    await chat.say("x", "/new", "y", "/fork", "z", "/delete", "w")
    assert not paths.data.exists()


async def test_a_damaged_session_is_refused_and_the_present_one_stays(start: Start, paths: Paths) -> None:
    chat = await (await start(ANSWERS, Session.create(paths))).ready()
    await chat.say("x")
    wreck = paths.sessions / "wreck.jsonl"
    wreck.write_bytes(b"\0" * 999)
    await chat.say(f"/open {wreck}")
    assert (chat.last(Notice).level, chat.last(Notice).status) == ("error", 6)
    await chat.say("y")
    assert len(chat.texts) == 4
    assert not chat.controller.session.read_only


@pytest.mark.parametrize(
    ("argument", "name"),
    [("", "my-chat.md"), ("json", "my-chat.json"), ("a file.txt", "a file.txt"), ("json x", "x"), ("x.csv", "x.csv")],
)
async def test_export(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    chat = await (await start(ANSWERS)).ready()
    await chat.say("/rename My chat", "question", f"/export {argument}")
    assert chat.last(Notice).text == f"written to {tmp_path / name}"
    text = (tmp_path / name).read_text("utf-8")
    if "json" in argument + name:
        assert json.loads(text)["messages"][0] == {"role": "user", "content": "question"}
    else:
        assert text.startswith("My chat" if name.endswith("txt") else "# My chat")
    await chat.say(f"/export {argument}")
    assert "already" in chat.last(Notice).text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/undo x", "'x' is not a number of times"),
        ("/undo 0", "'0' is not a number of times"),
        ("/retry #9", "'#9' is not a message (#1 to #2 are on show)"),
        ("/edit #0", "'#0' is not a message"),
        ("/edit #" + "9" * 5000, "'#999"),
        ("/undo " + "9" * 5000, "'999"),
        ("/branch #" + "9" * 5000, "'#999"),
        ("/branch", "/branch: every message here has one version"),
        ("/rename", "/rename: which title?"),
        ("/seed -1", "/set: seed is"),
        ("/redo", "/redo: nothing was undone here"),
        ("/seed abc", "/set: seed is a whole number from 0 to 9223372036854775807, not 'abc'"),
        ("/export pdf", "/export: there is no format 'pdf' (md, json, txt; a file without an ending is ./name)"),
        ("/branch 1 2", "/branch: every message here has one version"),
        ("/branch 1 2 #1", "/branch: '1 2' is not next, prev or 1 to 1"),
    ],
)
async def test_what_cannot_be_done_is_said(start: Start, line: str, message: str) -> None:
    chat = await (await start(ANSWERS)).ready()
    await chat.say("question", line)
    assert chat.last(Notice).text.startswith(message)
    assert len(chat.generated) == 1


async def test_a_command_without_arguments_refuses_one(start: Start, paths: Paths) -> None:
    chat = await (await start(ANSWERS, Session.create(paths))).ready()
    await chat.say("question")
    session, generated = chat.controller.session, len(chat.generated)
    bare = [row.name for row in COMMANDS if not row.syntax]
    assert {"delete", "fork", "continue", "stats", "quit"} <= set(bare)
    for name in bare:
        await chat.say(f"/{name} another title")
        assert chat.last(Notice).text == f"/{name} takes nothing after it, not 'another title' (/{name})"
    assert (chat.controller.session, len(chat.generated)) == (session, generated)
    assert not chat.of(QuitRequested)


async def test_text_that_no_file_can_hold(start: Start, paths: Paths) -> None:
    chat = await (await start(ANSWERS, Session.create(paths))).ready()
    await chat.say("a\udc80b\0", "/rename c\ud800", "/system \udfff", "/edit #1")
    assert chat.last(FillPrompt).text == "a?b\ufffd"
    await chat.say("/open a\0/b", "/export md a\0/b")
    assert [notice.status for notice in chat.of(Notice)[-2:]] == [6, 1]
    await chat.controller.close()
    assert Session.open("last", paths).title == "c?"


def test_statistics_tell_of_drafts_where_there_were_any():
    plain = Message("a", None, "assistant", "", "", stats=Stats(reply_tokens=9), model="one")
    drafted = Message(
        "b", None, "assistant", "", "", stats=Stats(drafted=1200, accepted=800, speed_up=1.5), model="one"
    )
    assert "drafts" not in stats_page([plain])
    page = stats_page([plain, drafted])
    assert "drafts accepted" in page
    assert "| 800 of 1,200, 1.50x |" in page
