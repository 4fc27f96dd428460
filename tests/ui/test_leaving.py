"""How the app is left: asked twice, told what is unfinished, killed, by a defect."""

import signal
from functools import partial

import pytest

from exl2chat.chat.session import Session
from exl2chat.link.scripted import Hold, Script

from .conftest import HELD, HELLO


async def test_ctrl_c_stops_then_clears_then_asks_then_leaves(start) -> None:
    async with start(HELD) as screen:
        await screen.ready()
        await screen.say("question")
        await screen.until(lambda: screen.shown("The beginning"))
        await screen.press("ctrl+c")
        await screen.replied()
        await screen.type("draft")
        await screen.press("ctrl+c")
        assert screen.app.prompt.text == ""
        assert screen.app.is_running
        await screen.press("ctrl+c")
        assert screen.shown("press Ctrl+C again to quit")
        await screen.press("ctrl+c")
        await screen.until(lambda: screen.app.return_code == 0)


async def test_ctrl_d_leaves_only_an_empty_prompt(start) -> None:
    async with start() as screen:
        await screen.type("ab")
        await screen.press("home", "ctrl+d")
        assert screen.app.prompt.text == "b"
        await screen.press("ctrl+d", "ctrl+d")
        await screen.until(lambda: screen.app.return_code == 0)


async def test_any_key_between_two_ctrl_c_takes_the_first_back(start) -> None:
    async with start() as screen:
        await screen.press("ctrl+c")
        assert screen.shown("press Ctrl+C again to quit")
        await screen.press("up", "left_control")
        assert not screen.shown("press Ctrl+C again to quit")
        await screen.press("ctrl+c")
        assert screen.shown("press Ctrl+C again to quit")
        assert screen.app.is_running
        await screen.press("left_control", "ctrl+c")
        await screen.until(lambda: screen.app.return_code == 0)


@pytest.mark.parametrize("words", ["", "/quit"])
async def test_leaving_asks_while_something_is_unfinished(start, words) -> None:
    async with start(HELD) as screen:
        leave = partial(screen.say, words) if words else partial(screen.press, "ctrl+d")
        await screen.ready()
        await screen.say("question")
        await screen.until(lambda: screen.shown("The beginning"))
        await screen.say("second")
        await leave()
        await screen.until(lambda: screen.shown("a reply is running and 1 message"))
        assert screen.app.is_running
        await leave()
        await screen.until(lambda: screen.app.return_code == 0)


async def test_ctrl_c_takes_back_what_is_queued_before_it_leaves(start) -> None:
    async with start(Script(load=(Hold(),))) as screen:
        await screen.say("early")
        await screen.until(lambda: screen.shown("1 queued"))
        await screen.press("ctrl+c")
        assert screen.app.prompt.text == "early"
        assert not screen.chat.queued


async def test_stopping_says_that_it_took_a_message_back_and_what_it_does_next(start) -> None:
    async with start(HELD) as screen:
        await screen.ready()
        await screen.say("question")
        await screen.until(lambda: screen.shown("The beginning"))
        await screen.say("second")
        await screen.say("third")
        await screen.press("escape")
        await screen.until(lambda: screen.shown("taken back; Esc again takes back the one before"))
        await screen.press("ctrl+c")
        await screen.until(lambda: screen.shown("taken back; Ctrl+C again stops the reply"))
        assert screen.chat.busy
        await screen.press("escape")
        await screen.replied()
    async with start(Script(load=(Hold(),))) as screen:
        await screen.say("early")
        await screen.press("escape")
        await screen.until(lambda: screen.shown("taken back; Esc again cancels the load"))


@pytest.mark.parametrize("words", ["", "/quit"])
async def test_leaving_asks_once_what_cannot_be_saved(start, paths, words) -> None:
    paths.data.mkdir()
    paths.sessions.touch()  # no folder, so nothing can be saved in it
    async with start(HELLO) as screen:
        leave = partial(screen.say, words) if words else partial(screen.press, "ctrl+d")
        await screen.ready()
        await screen.say("question")
        await screen.replied()
        await screen.until(lambda: screen.shown("ready  ·  not saved"))
        await leave()
        await screen.until(lambda: screen.shown("not saved: "))
        assert screen.app.is_running
        await leave()
        await screen.until(lambda: screen.app.return_code == 0)


async def test_leaving_saves_what_can_be_saved_by_then(start, paths) -> None:
    paths.data.mkdir()
    paths.sessions.touch()
    async with start(HELLO) as screen:
        await screen.ready()
        await screen.say("question")
        await screen.replied()
        await screen.press("ctrl+d")
        await screen.until(lambda: screen.shown("not saved: "))
        paths.sessions.unlink()
        await screen.press("ctrl+d")
        await screen.until(lambda: screen.app.return_code == 0)
    assert screen.chat.session.fault is None
    assert [message.role for message in Session.open("last", paths).path] == ["user", "assistant"]


async def test_a_terminated_app_leaves_with_its_status(start) -> None:
    async with start() as screen:
        signal.raise_signal(signal.SIGTERM)
        await screen.until(lambda: screen.app.return_code == 128 + signal.SIGTERM)


async def test_a_defect_prints_one_line_and_no_values(start, paths, capsys) -> None:
    secret = "secret prompt"

    def broken() -> None:
        note = secret  # a local variable that a dump with values would show
        raise RuntimeError(f"{len(note)} characters")

    try:
        async with start() as screen:
            screen.app.call_later(broken)
            await screen.until(lambda: not screen.app.is_running)
    except RuntimeError:
        pass
    log = paths.state / "screen.log"
    assert "RuntimeError: 13 characters" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600
    assert secret not in log.read_text()
    printed = capsys.readouterr()
    assert secret not in printed.out + printed.err
