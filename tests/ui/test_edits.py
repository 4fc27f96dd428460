"""Commands that change what was said, typed at the app."""

import pytest

from exl2chat.link.protocol import Generate
from exl2chat.link.scripted import Script

from .conftest import HELLO


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
        await screen.until(lambda: screen.app.prompt.text == "before" and screen.shown("ready  ·  editing"))
        await screen.press(*erase)
        await screen.until(lambda: screen.shown("no longer editing") and not screen.shown("·  editing"))
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
