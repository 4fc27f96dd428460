"""The app as a user meets it: keys in, screen out."""

from textual import events

from exl2chat.chat.session import Session
from exl2chat.link.scripted import Die, Fail, Finish, Hold, Progress, Read, Say, Script

from .conftest import HELD, HELLO


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
