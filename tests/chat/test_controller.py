"""The controller over a scripted engine."""

from exl2chat.chat.events import MessageAdded, ModelReady, Notice, ReplyFinished, ReplyText
from exl2chat.chat.session import Session
from exl2chat.link.scripted import Die, Fail, Hold, Read, Say, Script

from .conftest import Start


def replies(*texts: str) -> Script:
    return Script(replies=tuple((Read(total=7, cached=2), Say(text)) for text in texts))


async def test_a_message_gets_a_reply(start: Start) -> None:
    chat = await (await start(replies("Hello there."))).ready()
    await chat.say("hi")
    assert chat.texts == ["hi", "Hello there."]
    assert chat.last(ModelReady).model.name == "scripted"
    assert chat.last(MessageAdded).message.text == "hi"
    assert "".join(event.text for event in chat.of(ReplyText)) == "Hello there."
    message = chat.last(ReplyFinished).message
    assert message.stop == "eos"
    assert message.stats is not None
    assert message.stats.seed == chat.generated[0].sampling.seed
    assert chat.controller.context_used == 9
