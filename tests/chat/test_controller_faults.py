"""The controller where something fails: engines that die, replies that cannot be, defects."""

import asyncio

import pytest

from exl2chat.chat.controller import Controller
from exl2chat.chat.events import (
    ChatEvent,
    FillPrompt,
    ModelDown,
    Notice,
    ReplyFinished,
)
from exl2chat.chat.reply import Reply
from exl2chat.chat.session import Session
from exl2chat.link import framing
from exl2chat.link.protocol import Request
from exl2chat.link.scripted import Die, Fail, Say, Script, ScriptedEngine
from exl2chat.paths import Paths

from . import conftest
from .conftest import Start, replies


@pytest.mark.parametrize("said", [(), (Say("par tial"),)])
async def test_an_engine_that_dies_costs_nothing_and_comes_back(
    start: Start, paths: Paths, said: tuple[Say, ...]
) -> None:
    script = Script(replies=((*said, Die("killed by SIGKILL")), (Say("back"),)))
    chat = await (await start(script, Session.create(paths))).ready()
    await chat.controller.submit("hi")
    await chat.until(lambda: chat.controller.phase == "down")
    down = chat.last(ModelDown)
    assert "SIGKILL" in down.message
    assert chat.texts == ["hi", *(["par tial"] if said else [])]
    assert [event.message.stop for event in chat.of(ReplyFinished)] == ["crash"] * len(said)
    await chat.say("/retry")
    assert chat.texts == ["hi", "back"]
    assert len(chat.loads) == 2
    saved = Session.open(chat.controller.session.id, paths)
    assert saved.tree == chat.controller.session.tree


async def test_a_message_after_a_death_starts_the_engine_again(start: Start) -> None:
    chat = await (await start(Script(replies=((Die(),), (Say("back"),))))).ready()
    await chat.controller.submit("hi")
    await chat.until(lambda: chat.controller.phase == "down")
    await chat.say("there")
    assert chat.texts == ["hi", "there", "back"]


@pytest.mark.parametrize("said", [(), (Say("half"),)])
async def test_a_reply_that_fails(start: Start, said: tuple[Say, ...]) -> None:
    chat = await (await start(Script(replies=((*said, Fail("a defect", "see the log")), (Say("fine"),))))).ready()
    await chat.say("hi")
    notice = chat.last(Notice)
    assert (notice.text, notice.level, notice.status) == ("a defect (see the log)", "error", 1)
    assert chat.texts == ["hi", *(["half"] if said else [])]
    await chat.say("/retry")
    assert chat.texts == ["hi", "fine"]


TOO_LONG = (Fail("9 tokens too many", "shorten it", status=4),)


async def test_a_message_that_does_not_fit_comes_back_into_the_prompt(start: Start) -> None:
    chat = await (await start(Script(replies=((Say("a"),), TOO_LONG, TOO_LONG, (Say("b"),))))).ready()
    await chat.say("hi", " /long message")
    assert (chat.last(FillPrompt), chat.texts) == (FillPrompt(" /long message"), ["hi", "a"])
    assert chat.last(Notice).status == 4
    await chat.say("still too long")
    assert (chat.last(FillPrompt), chat.texts) == (FillPrompt("still too long"), ["hi", "a"])
    await chat.say("short")
    assert chat.texts == ["hi", "a", "short", "b"]
    assert [turn.text for turn in chat.generated[-1].turns] == ["hi", "a", "short"]


async def test_an_edit_that_does_not_fit_leaves_what_it_was_to_replace(start: Start) -> None:
    chat = await (await start(Script(replies=((Say("a"),), TOO_LONG, (Say("b"),))))).ready()
    await chat.say("hi", "/edit")
    edited = chat.last(FillPrompt).replaces
    await chat.controller.submit("far too long", edited)
    await chat.ready()
    assert (chat.last(FillPrompt), chat.texts) == (FillPrompt("far too long", edited), ["hi", "a"])


async def test_a_retry_that_does_not_fit_leaves_the_message_and_its_reply(start: Start) -> None:
    chat = await (await start(Script(replies=((Say("a"),), TOO_LONG)))).ready()
    await chat.say("hi", "/retry")
    assert (chat.of(FillPrompt), chat.texts) == ([], ["hi", "a"])


async def test_a_listener_that_fails_stops_nothing(start: Start) -> None:
    chat = await start(replies("a"))
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.append(context))
    failures: list[dict[str, object]] = []

    def fail(_: ChatEvent) -> None:
        raise ZeroDivisionError

    unsubscribe = chat.controller.subscribe(fail)
    await chat.ready()
    await chat.say("hi")
    assert chat.texts == ["hi", "a"]
    assert failures
    unsubscribe()
    failures.clear()
    await chat.say("hi")
    assert failures == []


@pytest.mark.parametrize(
    ("defect", "kept"),
    [((Reply, "begin"), []), ((Reply, "message"), []), ((Controller, "_draft_soon"), ["hi", "one"])],
)
async def test_a_defect_in_handling_an_event_ends_the_reply_with_an_error_and_not_the_chat(
    start: Start, monkeypatch: pytest.MonkeyPatch, defect: tuple[type, str], kept: list[str]
) -> None:
    chat = await (await start(replies("one two", "b"))).ready()
    failures: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.append(context))
    with monkeypatch.context() as patch:
        patch.setattr(*defect, lambda *_: 1 / 0)
        await chat.controller.submit("hi")
        await chat.until(lambda: bool(chat.of(Notice)))
        await chat.ready()
    assert isinstance(failures[0]["exception"], ZeroDivisionError)
    notice = chat.last(Notice)
    assert (notice.level, notice.status) == ("error", 1)
    assert "ZeroDivisionError" in notice.text
    assert chat.texts == (kept or ["hi"])
    await chat.say("more")
    assert chat.texts == [*(kept or ["hi"]), "more", "b"]


@pytest.mark.parametrize("queued", [True, False])
async def test_a_conversation_too_long_for_the_engine_returns_to_the_prompt(
    start: Start, monkeypatch: pytest.MonkeyPatch, queued: bool
) -> None:
    monkeypatch.setattr(conftest, "ScriptedEngine", FramingEngine)
    monkeypatch.setattr(framing, "MAX_FRAME", 10_000)
    chat = await start(replies("a"))
    if not queued:
        await chat.ready()
    await chat.controller.submit("x" * 10_001)
    await chat.until(lambda: bool(chat.of(Notice)))
    await chat.ready()
    assert (chat.last(Notice).status, chat.last(FillPrompt).text) == (4, "x" * 10_001)
    await chat.say("hi")
    assert chat.texts == ["hi", "a"]


class FramingEngine(ScriptedEngine):
    """Refuses what fits no frame, as the one behind a pipe does."""

    async def send(self, request: Request) -> None:
        framing.pack(request)
        await super().send(request)
