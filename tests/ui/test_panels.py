"""Pages, lists and notices over the chat."""

import os
import shutil

import pytest

from exl2chat.chat.events import Message
from exl2chat.chat.session import Session, now
from exl2chat.link.protocol import Stop
from exl2chat.settings import Settings
from exl2chat.ui.panels import Page, Picker

from .conftest import HELD, HELLO


async def test_few_notices_are_shown_and_each_once(start) -> None:
    async with start() as screen:
        await screen.ready()
        for number in range(8):
            screen.app.say(f"long notice {number} " + "word " * 30, "error")
        screen.app.say("last", "warning")
        screen.app.say("last", "warning")
        await screen.until(lambda: screen.shown("last"))
        await screen.until(lambda: not screen.shown("long notice 5"))
        rows = screen.text().split("\n")
        assert [row for row in rows if "long notice 7" in row]
        assert len([row for row in rows if "last" in row]) == 1
        assert rows.index(next(row for row in rows if "❯" in row)) > 20
        assert not [row for row in rows[len(rows) // 2 + 2 :] if "word" in row]


@pytest.mark.parametrize("size", [(100, 30), (60, 20), (40, 12)])
@pytest.mark.parametrize("key", ["f3", "f6"])
async def test_notices_stand_below_a_panel_and_not_on_it(start, size, key) -> None:
    async with start(size=size) as screen:
        await screen.press(key)
        await screen.until(lambda: screen.shown("╰"))
        before = screen.text().split("\n")
        screen.app.say("a notice", "warning")
        await screen.until(lambda: screen.shown("a notice"))
        panel = next(number for number, row in enumerate(before) if "╰" in row) + 1
        assert screen.text().split("\n")[:panel] == before[:panel]


async def test_a_query_without_a_match_says_so(start) -> None:
    async with start() as screen:
        await screen.say("/open nosuch")
        await screen.until(lambda: screen.shown("there is no session 'nosuch'"))
        screen.app.choose_session("nosuch")
        await screen.until(lambda: isinstance(screen.app.screen, Picker) and screen.shown("no match"))
        await screen.press("down", "enter", "escape")
        await screen.until(lambda: not isinstance(screen.app.screen, Picker))


async def test_help_opens_scrolls_and_closes(start) -> None:
    async with start() as screen:
        await screen.press("f1")
        await screen.until(lambda: isinstance(screen.app.screen, Page) and screen.shown("what it does"))
        assert not screen.shown("· End")
        await screen.press("end")
        await screen.until(lambda: screen.shown("/quit"))
        await screen.press("escape")
        await screen.until(lambda: not isinstance(screen.app.screen, Page))
        await screen.press("x")
        assert screen.app.prompt.text == "x"


async def test_escape_closes_a_panel_before_it_stops_a_reply(start) -> None:
    async with start(HELD) as screen:
        await screen.ready()
        await screen.say("question")
        await screen.until(lambda: screen.shown("The beginning"))
        await screen.press("f1")
        await screen.until(lambda: isinstance(screen.app.screen, Page))
        await screen.press("escape")
        await screen.until(lambda: not isinstance(screen.app.screen, Page))
        assert not [r for r in screen.engine.requests if isinstance(r, Stop)]
        assert screen.chat.busy


async def test_a_saved_session_is_picked_from_the_list(start) -> None:
    async with start(HELLO) as screen:
        await screen.ready()
        await screen.say("about cats")
        await screen.replied()
        await screen.press("ctrl+n")
        await screen.until(lambda: not screen.chat.path)
        await screen.say("about dogs")
        await screen.replied()
        await screen.press("f3")
        await screen.until(lambda: isinstance(screen.app.screen, Picker) and screen.shown("2 messages"))
        await screen.press(*"cats")
        await screen.until(lambda: not any("dogs" in line and "messages" in line for line in screen.text().split("\n")))
        await screen.press("enter")
        await screen.until(lambda: [m.text for m in screen.chat.path][:1] == ["about cats"])
        await screen.until(lambda: screen.shown("about cats"))


async def test_a_session_file_that_was_copied_is_listed_and_opened_beside_the_other(start, paths) -> None:
    session = Session.create(paths)
    session.add(Message("a", None, "user", "about cats", now()))
    copy = shutil.copy(session.file, paths.sessions / "copy.jsonl")
    os.utime(copy, (0, 0))
    async with start() as screen:
        await screen.press("f3")
        await screen.until(lambda: screen.text().count(" · 1 message ") == 2)
        await screen.press("down", "enter")
        await screen.until(lambda: screen.chat.session.file == copy)


async def test_a_session_file_that_cannot_be_read_is_listed_with_the_reason_and_not_opened(start, paths) -> None:
    for number, name in enumerate(("oldest", "older", "newer")):
        session = Session.create(paths)
        session.add(Message("a", None, "user", name, now()))
        os.utime(session.file, (number, number))
    for number, name in ((0.5, "damaged"), (9, "lost")):
        (paths.sessions / f"{name}.jsonl").write_bytes(b"")
        os.utime(paths.sessions / f"{name}.jsonl", (number, number))
    async with start() as screen:
        await screen.press("f3")
        await screen.until(lambda: screen.shown("damaged.jsonl  cannot be read: it is empty"))
        lines = [line for line in screen.text().split("\n") if "1970" in line or "cannot" in line]
        names = [next(word for word in line.split() if word.isascii()) for line in lines]
        assert names == ["lost.jsonl", "newer", "older", "damaged.jsonl", "oldest"]
        await screen.press("down", "down", "up", "down", "enter")
        await screen.until(lambda: [message.text for message in screen.chat.path] == ["oldest"])
        await screen.say("/open damage")
        await screen.until(lambda: isinstance(screen.app.screen, Picker) and screen.shown("damaged.jsonl"))
        assert not screen.shown("lost.jsonl")
        await screen.press("down", "enter")
        assert isinstance(screen.app.screen, Picker)


async def test_the_theme_chooser_previews_and_restores(start) -> None:
    async with start() as screen:
        await screen.press("f4")
        await screen.until(lambda: isinstance(screen.app.screen, Picker))
        assert screen.app.theme == "exl2-dark"
        await screen.press("down")
        await screen.until(lambda: screen.app.theme == "exl2-light")
        light = screen.app.transcript.document.renderer.look
        await screen.press("escape")
        await screen.until(lambda: screen.app.theme == "exl2-dark")
        assert screen.app.transcript.document.renderer.look != light
        await screen.say("/theme nord")
        await screen.until(lambda: screen.app.theme == "nord")


async def test_the_theme_chooser_keeps_up_with_quick_typing(start) -> None:
    async with start() as screen:
        await screen.press("f4")
        await screen.until(lambda: isinstance(screen.app.screen, Picker))
        await screen.press(*"ezq")
        await screen.until(lambda: screen.shown("no match"))
        await screen.press("escape")
        await screen.until(lambda: screen.app.theme == "exl2-dark")


async def test_a_broken_theme_leaves_the_old_one(start, paths) -> None:
    paths.themes.mkdir(parents=True)
    (paths.themes / "broken.toml").write_text("dark = 3")
    async with start() as screen:
        await screen.say("/theme broken")
        await screen.until(lambda: screen.shown("broken.toml"))
        assert screen.app.theme == "exl2-dark"


async def test_the_palette_offers_the_commands(start) -> None:
    async with start() as screen:
        names = {command.title for command in screen.app.get_system_commands(screen.app.screen)}
        assert {"help", "new", "open", "theme", "quit"} <= names


async def test_settings_choose_the_theme(start) -> None:
    async with start(settings=Settings().with_layer("flag", {"theme": "paper"})) as screen:
        assert screen.app.theme == "paper"


async def test_a_theme_that_is_written_while_the_chat_runs_can_be_put_on(start, paths) -> None:
    async with start() as screen:
        paths.themes.mkdir(parents=True)
        (paths.themes / "mine.toml").write_text('extends = "nord"')
        await screen.say("/theme mine")
        await screen.until(lambda: screen.app.theme == "mine")


@pytest.mark.parametrize("key", ["f3", "f4", "ctrl+p", "f1"])
async def test_panels_fit_into_a_small_terminal(start, key) -> None:
    async with start(size=(40, 10)) as screen:
        await screen.press(key)
        await screen.until(lambda: screen.shown("╮"))
        assert screen.text().count("╭") == screen.text().count("╮")


async def test_completions_leave_the_prompt_in_sight_of_a_small_terminal(start) -> None:
    async with start(size=(40, 10)) as screen:
        await screen.type("/")
        await screen.until(lambda: screen.shown("/help"))
        rows = [row for row in screen.text().split("\n") if row.lstrip().startswith("/")]
        assert [row.split()[0] for row in rows] == ["/help", "/retry", "/continue"]
        assert screen.shown("❯ /")
