"""The controller and the tree of messages: other replies, edits, undo, longer replies."""

from exl2chat.chat.events import (
    FillPrompt,
    Notice,
    ReplyStarted,
)
from exl2chat.link.protocol import Turn
from exl2chat.link.scripted import Finish, Hold, Say, Script

from .conftest import Start, replies


async def test_retry_makes_a_sibling_and_branch_goes_between_them(start: Start) -> None:
    chat = await (await start(replies("a", "b", "c"))).ready()
    await chat.say("hi", "/retry")
    assert chat.texts == ["hi", "b"]
    await chat.say("more", "/branch prev #2")
    assert chat.texts == ["hi", "a"]
    await chat.say("/branch")
    assert chat.texts == ["hi", "b", "more", "c"]
    await chat.say("/branch 1 #2", "/branch 7 #2")
    assert chat.texts == ["hi", "a"]
    assert "1 to 2" in chat.last(Notice).text
    assert len(chat.controller.session.tree.messages) == 5


async def test_retry_of_an_earlier_message(start: Start) -> None:
    chat = await (await start(replies("a", "b", "c"))).ready()
    await chat.say("1", "2", "/retry #2")
    assert chat.texts == ["1", "c"]
    assert chat.generated[-1].turns == (Turn("user", "1"),)


async def test_the_path_on_show_ends_with_what_is_being_answered(start: Start) -> None:
    chat = await (await start(Script(replies=((Say("a"),), (Say("b"), Hold()))))).ready()
    await chat.say("hi")
    await chat.controller.submit("/retry")
    await chat.until(lambda: (chat.controller.reply or ("", ""))[1] == "b")
    assert chat.texts == ["hi"]
    refused = chat.controller.session.tree
    for line in ("/undo", "/retry", "/new", "/edit", "/continue", "/set context 512", "/model other"):
        await chat.controller.submit(line)
        assert "stop" in chat.last(Notice).text
    assert (chat.controller.session.tree, len(chat.loads)) == (refused, 1)


async def test_edit_branches_and_loses_nothing(start: Start) -> None:
    chat = await (await start(replies("a", "b"))).ready()
    await chat.say("/unknown", "  wrong", "/edit")
    prompt = chat.last(FillPrompt)
    assert prompt.text == "  wrong"
    await chat.controller.submit("right", replaces=prompt.replaces)
    await chat.ready()
    assert chat.texts == ["right", "b"]
    await chat.say("/branch prev")
    assert chat.texts == ["  wrong", "a"]


async def test_an_edited_reply_is_saved_and_not_answered(start: Start) -> None:
    chat = await (await start(replies("a"))).ready()
    await chat.say("hi", "/edit #2")
    await chat.controller.submit("A better one.", replaces=chat.last(FillPrompt).replaces)
    assert chat.texts == ["hi", "A better one."]
    assert len(chat.generated) == 1
    await chat.say("/continue")
    assert chat.generated[-1].turns[-1] == Turn("assistant", "A better one.")
    assert chat.texts == ["hi", "A better one.a"]


async def test_what_looks_like_a_command_is_edited_as_text(start: Start) -> None:
    chat = await (await start(replies("a"))).ready()
    await chat.say(" /help", "/edit")
    await chat.controller.submit(chat.last(FillPrompt).text, replaces=chat.last(FillPrompt).replaces)
    await chat.ready()
    assert chat.texts == ["/help", "a"]


async def test_undo_and_redo_move_the_head(start: Start) -> None:
    chat = await (await start(replies("a", "b", "c"))).ready()
    await chat.say("1", "2", "3", "/undo 2")
    assert chat.texts == ["1", "a"]
    await chat.say("/redo")
    assert chat.texts == ["1", "a", "2", "b"]
    await chat.say("/undo 9", "/undo")
    assert chat.texts == []
    assert chat.last(Notice).text == "/undo: everything is undone: `/redo` steps forward again"
    await chat.say("/redo 9")
    assert chat.texts == ["1", "a", "2", "b", "3", "c"]
    await chat.say("/redo")
    assert "nothing was undone" in chat.last(Notice).text


async def test_continue_adds_to_the_reply(start: Start) -> None:
    chat = await (await start(Script(replies=((Say("Once"), Finish("max_tokens")), (Say(" upon"),), ())))).ready()
    await chat.say("tell", "/continue")
    assert chat.texts == ["tell", "Once upon"]
    assert chat.generated[-1].turns == (Turn("user", "tell"), Turn("assistant", "Once"))
    assert chat.last(ReplyStarted).text == "Once"
    await chat.say("/continue")
    assert chat.texts == ["tell", "Once upon"]
    assert len(chat.controller.session.tree.messages) == 3
