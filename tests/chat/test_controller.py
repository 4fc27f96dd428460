"""The controller over a scripted engine: what it says, what it asks for, what it keeps."""

from exl2chat.chat.events import (
    FillPrompt,
    LoadProgress,
    MessageAdded,
    ModelReady,
    Notice,
    PathChanged,
    PrefillProgress,
    ReplyFinished,
    ReplyStarted,
    ReplyText,
    SessionChanged,
)
from exl2chat.link.protocol import Stop, Turn
from exl2chat.link.scripted import Hold, Progress, Read, Say, Script

from .conftest import HELD, Start, replies


async def test_a_message_gets_a_reply(start: Start) -> None:
    chat = await (await start(replies("Hello there."))).ready()
    await chat.say("hi")
    assert chat.texts == ["hi", "Hello there."]
    kinds = [type(event) for event in chat.events if not isinstance(event, LoadProgress | ReplyText)]
    assert kinds == [ModelReady, MessageAdded, SessionChanged, ReplyStarted, PrefillProgress, ReplyFinished]
    assert "".join(event.text for event in chat.of(ReplyText)) == "Hello there."
    message = chat.last(ReplyFinished).message
    assert (message.stop, message.model) == ("eos", "scripted")
    assert message.stats is not None
    assert message.stats.seed == chat.generated[0].sampling.seed
    assert chat.controller.context_used == 9
    assert chat.controller.tokens_per_second == message.stats.tokens_per_second > 0


async def test_each_reply_has_its_own_seed_unless_one_is_set(start: Start) -> None:
    chat = await (await start(replies("a"))).ready()
    await chat.say("1", "/retry", "/seed 7", "/retry", "/retry", "/seed random", "/retry")
    seeds = [request.sampling.seed for request in chat.generated]
    assert len(set(seeds)) == 4
    assert seeds[2:4] == [7, 7]
    assert None not in seeds


async def test_what_the_model_reads(start: Start) -> None:
    chat = await (await start(replies("a", "b"))).ready()
    await chat.say("/system Be brief.", "one", "//two", " /three")
    assert chat.generated[-1].turns == (
        Turn("system", "Be brief."),
        Turn("user", "one"),
        Turn("assistant", "a"),
        Turn("user", "/two"),
        Turn("assistant", "b"),
        Turn("user", "/three"),
    )
    await chat.say("/system off", "/set max_tokens 5", "/set temperature 0", "x")
    request = chat.generated[-1]
    assert request.turns[0].role == "user"
    assert (request.max_tokens, request.sampling.temperature) == (5, 0.0)


async def test_messages_typed_while_the_model_loads_are_sent_in_order(start: Start) -> None:
    script = Script(load=(Progress("reading", 1, 2), Hold()), replies=((Say("a"),), (Say("b"),)))
    chat = await start(script)
    await chat.controller.submit("first")
    await chat.controller.submit("second")
    assert (chat.controller.queued, chat.controller.phase, chat.texts) == (("first", "second"), "loading", [])
    chat.engine.release()
    await chat.until(lambda: len(chat.of(ReplyFinished)) == 2)
    assert chat.texts == ["first", "a", "second", "b"]
    assert LoadProgress("reading", 1, 2, "") in chat.events


async def test_what_is_to_be_known_of_a_load_is_a_notice(start) -> None:
    chat = await start(Script(replies=((Say("a"),),), note="the context is 1024 tokens"))
    await chat.ready()
    assert [(notice.text, notice.level) for notice in chat.of(Notice)] == [("the context is 1024 tokens", "warning")]


async def test_messages_typed_while_a_reply_streams_wait_their_turn(start: Start) -> None:
    chat = await (await start(HELD)).ready()
    await chat.controller.submit("first")
    await chat.controller.submit("second")
    await chat.until(lambda: chat.controller.reply == (chat.last(ReplyStarted).id, "one two"))
    assert (chat.controller.queued, chat.texts, chat.controller.phase) == (("second",), ["first"], "streaming")
    assert chat.controller.context_used == 9
    assert chat.controller.tokens_per_second > 0
    chat.engine.release()
    await chat.until(lambda: len(chat.of(ReplyFinished)) == 2)
    assert chat.texts == ["first", "one two three", "second", "next"]


async def test_stop_takes_back_what_is_queued_and_then_stops_keeping_the_text(start: Start) -> None:
    chat = await (await start(HELD)).ready()
    for line in ("first", "second", "third"):
        await chat.controller.submit(line)
    await chat.until(lambda: (chat.controller.reply or ("", ""))[1] == "one two")
    await chat.controller.stop()
    await chat.controller.stop()
    assert [event.text for event in chat.of(FillPrompt)] == ["third", "second"]
    await chat.controller.run("stop")
    await chat.ready()
    assert chat.texts == ["first", "one two"]
    assert chat.last(ReplyFinished).message.stop == "stopped"
    await chat.controller.stop()
    assert len([request for request in chat.engine.requests if isinstance(request, Stop)]) == 1


async def test_a_reply_stopped_before_its_first_word_leaves_no_message(start: Start) -> None:
    chat = await (await start(Script(replies=((Read(total=5), Hold()), (Say("yes"),))))).ready()
    await chat.controller.submit("hi")
    await chat.until(lambda: bool(chat.of(PrefillProgress)))
    assert chat.controller.phase == "prefill"
    await chat.controller.stop()
    await chat.ready()
    assert (chat.texts, chat.of(ReplyFinished)) == (["hi"], [])
    assert isinstance(chat.events[-1], PathChanged)
    await chat.say("again")
    assert chat.generated[-1].turns == (Turn("user", "hi\n\nagain"),)


async def test_completion_knows_what_the_front_end_knows(start: Start) -> None:
    chat = await start()
    chat.controller.models = ("org/other",)
    assert [found.text for found in chat.controller.complete("/model or later", len("/model or"))] == [
        "/model org/other"
    ]
