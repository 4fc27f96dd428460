"""The app as a user meets it: keys in, screen out."""

import signal
from functools import partial

import pytest
from textual import events

from exl2chat.chat.controller import Controller
from exl2chat.chat.events import Message
from exl2chat.chat.session import Session, now
from exl2chat.link.protocol import Generate, Stop
from exl2chat.link.scripted import Die, Fail, Finish, Hold, Progress, Read, Say, Script, ScriptedEngine
from exl2chat.settings import Settings
from exl2chat.ui.app import ChatApp, run_app
from exl2chat.ui.panels import Page, Picker

HELLO = Script(replies=((Read(total=8), Say("Hello **there**.\n\n- one\n- two")),))
HELD = Script(replies=((Read(total=8), Say("The beginning"), Hold(), Say(" and the end.")),))


async def test_a_reply_streams_in_and_is_kept(start) -> None:
    async with start(HELD) as screen:
        await screen.ready()
        await screen.say("question")
        await screen.until(lambda: screen.shown("The beginning"))
        assert screen.shown("writing")
        screen.engine.release()
        await screen.replied()
        await screen.until(lambda: screen.shown("The beginning and the end."))
        assert screen.shown("ready")
        assert screen.shown("5 tok · 50 tok/s")
        assert screen.shown("context")
        assert screen.chat.path[-1].text == "The beginning and the end."


async def test_the_load_is_shown_and_typing_goes_on_meanwhile(start) -> None:
    load = (Progress("downloading weights", 30 << 20, 120 << 20, "B"), Hold())
    async with start(Script(load=load, replies=HELLO.replies)) as screen:
        await screen.until(lambda: screen.shown("downloading weights"))
        assert screen.shown(" 25% · 30.0 MB of 120.0 MB")
        await screen.say("early")
        await screen.until(lambda: screen.shown("1 queued") and screen.shown("queued: early"))
        screen.engine.release()
        await screen.replied()
        await screen.until(lambda: screen.shown("Hello there."))
        assert not screen.shown("downloading")


async def test_escape_cancels_a_load(start) -> None:
    async with start(Script(load=(Progress("downloading weights", 1, 2), Hold()))) as screen:
        await screen.until(lambda: screen.shown("downloading weights") and screen.shown("loading  ·  Esc cancels"))
        await screen.say("early")
        await screen.until(lambda: screen.shown("queued: early"))
        await screen.press("escape")
        assert (screen.app.prompt.text, screen.chat.phase) == ("early", "loading")
        await screen.press("escape")
        await screen.until(lambda: screen.shown("no model") and screen.shown("the load was stopped"))
        assert not screen.shown("downloading")


async def test_escape_stops_and_keeps_the_text(start) -> None:
    async with start(HELD) as screen:
        await screen.ready()
        await screen.say("question")
        await screen.until(lambda: screen.shown("The beginning"))
        await screen.press("escape")
        await screen.replied()
        await screen.until(lambda: screen.shown("■ stopped"))
        assert screen.shown("The beginning")
        assert screen.chat.path[-1].stop == "stopped"


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


async def test_an_app_that_could_not_save_says_so_when_it_has_gone(paths, monkeypatch, capsys) -> None:
    controller = Controller(ScriptedEngine(), Settings(), paths, Session.create(paths))
    monkeypatch.setattr(ChatApp, "run", lambda _: None)
    assert run_app(controller, paths) == 0
    assert not capsys.readouterr().err
    controller.session.add(Message("a", None, "user", "hello", now()))
    controller.session._file.fault = "No space left on device"
    run_app(controller, paths)
    assert f"not saved in {controller.session.file}: No space left on device" in capsys.readouterr().err


async def test_a_query_without_a_match_says_so(start) -> None:
    async with start() as screen:
        await screen.say("/open nosuch")
        await screen.until(lambda: screen.shown("there is no session 'nosuch'"))
        screen.app.choose_session("nosuch")
        await screen.until(lambda: isinstance(screen.app.screen, Picker) and screen.shown("no match"))
        await screen.press("down", "enter", "escape")
        await screen.until(lambda: not isinstance(screen.app.screen, Picker))


async def test_how_replies_end_is_told(start) -> None:
    replies = (
        (Read(total=1), Say("cut"), Finish("max_tokens")),
        (Read(total=1), Say("died"), Die()),
        (Fail("the prompt has 9 tokens", "shorten it", 4),),
    )
    async with start(Script(replies=replies)) as screen:
        await screen.ready()
        await screen.say("one")
        await screen.until(lambda: screen.shown("the token limit was reached"))
        await screen.say("two")
        await screen.until(lambda: screen.shown("cut off here"))
        await screen.say("three")
        await screen.until(lambda: screen.shown("the prompt has 9 tokens (shorten it)"))


async def test_a_model_that_does_not_load_leaves_the_chat(start) -> None:
    async with start(Script(load=(Fail("no such model", "name another", 3),))) as screen:
        await screen.until(lambda: screen.shown("no such model (name another)"))
        assert screen.shown("no model")


async def test_the_path_is_shown_with_versions(start) -> None:
    async with start(HELLO) as screen:
        await screen.ready()
        await screen.say("question")
        await screen.replied()
        await screen.say("/retry")
        await screen.until(lambda: screen.shown("‹2/2›"))
        await screen.say("/branch prev")
        await screen.until(lambda: screen.shown("‹1/2›"))
        await screen.say("/undo")
        await screen.until(lambda: not screen.shown("Hello there"))


async def test_edit_fills_the_prompt_and_branches(start) -> None:
    async with start(HELLO) as screen:
        await screen.ready()
        await screen.say("first wording")
        await screen.replied()
        await screen.say("/edit")
        await screen.until(lambda: screen.app.prompt.text == "first wording")
        await screen.press("!", "enter")
        await screen.until(lambda: screen.shown("first wording!"))
        await screen.replied()
        first, second = screen.chat.session.tree.siblings(screen.chat.path[0].id)
        assert (first.text, second.text) == ("first wording", "first wording!")


@pytest.mark.parametrize("erase", [("ctrl+u",), ("ctrl+c",), ("ctrl+z",), ("backspace",) * 6])
async def test_an_edit_whose_text_is_erased_has_ended(start, erase) -> None:
    async with start(HELLO) as screen:
        await screen.ready()
        await screen.say("before")
        await screen.replied()
        await screen.say("/edit")
        await screen.until(lambda: screen.app.prompt.text == "before")
        await screen.press(*erase)
        await screen.until(lambda: screen.shown("no longer editing"))
        await screen.say("anew")
        await screen.replied(2)
        assert [message.text for message in screen.chat.path[::2]] == ["before", "anew"]


async def test_an_edit_ends_even_where_typing_goes_on_at_once(start) -> None:
    async with start(HELLO) as screen:
        await screen.ready()
        screen.app.prompt.put("before")
        screen.app.prompt.replaces = "a message"
        screen.app.prompt.clear()
        screen.app.prompt.insert("anew")
        assert screen.app.prompt.replaces is None


async def test_an_edit_may_begin_without_text(start) -> None:
    """A reply may be empty; to edit it is to write it."""
    async with start(Script(replies=((),))) as screen:
        await screen.ready()
        await screen.say("question")
        await screen.replied()
        await screen.say("/edit #2")
        await screen.until(lambda: screen.app.prompt.replaces)
        await screen.pilot.pause()
        await screen.say("my answer")
        await screen.until(lambda: screen.chat.path[-1].text == "my answer")
        assert screen.chat.path[-1].role == "assistant"


async def test_an_unknown_command_never_reaches_the_model(start) -> None:
    async with start(HELLO) as screen:
        await screen.ready()
        await screen.say("/hlep")
        await screen.until(lambda: screen.shown("there is no command /hlep"))
        assert not [r for r in screen.engine.requests if isinstance(r, Generate)]


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


async def test_small_and_changing_terminals(start) -> None:
    async with start(HELD, size=(40, 12)) as screen:
        await screen.ready()
        await screen.say("question")
        await screen.until(lambda: screen.shown("The beginning"))
        for size in ((80, 24), (20, 5), (1, 1), (200, 50), (40, 12)):
            await screen.pilot.resize_terminal(*size)
        screen.engine.release()
        await screen.replied()
        await screen.until(lambda: screen.shown("The beginning and the end."))


async def test_a_resumed_session_shows_its_end(start, paths) -> None:
    async with start(HELLO) as screen:
        await screen.ready()
        await screen.say("an earlier question")
        await screen.replied()
    async with start(HELLO, session=Session.open("last", paths)) as screen:
        await screen.until(lambda: screen.shown("an earlier question") and screen.shown("Hello there."))


async def test_no_color(start, monkeypatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with start(HELLO) as screen:
        await screen.ready()
        await screen.say("question")
        await screen.until(lambda: screen.shown("Hello there."))
        styles = [segment.style for strip in screen.strips() for segment in strip if segment.style]
        colors = {color.get_truecolor() for style in styles for color in (style.color, style.bgcolor) if color}
        assert all(red == green == blue for red, green, blue in colors)


async def test_the_prompt_keeps_the_focus_when_the_transcript_is_clicked(start) -> None:
    async with start(HELLO) as screen:
        await screen.pilot.click("#transcript")
        assert screen.app.focused is screen.app.prompt


async def test_a_wheel_over_the_transcript_scrolls_it(start) -> None:
    long = Script(replies=((Read(total=1), Say("line\n\n" * 60)),))
    async with start(long) as screen:
        await screen.ready()
        await screen.say("question")
        await screen.replied()
        before = screen.app.transcript.document.y
        screen.app.transcript.post_message(
            events.MouseScrollUp(screen.app.transcript, 5, 5, 0, -1, 0, False, False, False, 5, 5, None)
        )
        await screen.until(lambda: screen.app.transcript.document.y < before)
        assert not screen.app.transcript.following


async def test_settings_choose_the_theme(start) -> None:
    async with start(settings=Settings().with_layer("flag", {"theme": "paper"})) as screen:
        assert screen.app.theme == "paper"
