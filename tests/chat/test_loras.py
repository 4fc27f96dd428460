"""Which LoRAs a reply is asked to use."""

import os

from exl2chat.link.protocol import LoraUse

from .conftest import Start, replies


async def test_each_reply_uses_what_is_set_when_it_begins(start: Start) -> None:
    home = os.path.expanduser("~")
    chat = await (await start(replies("a"))).ready()
    await chat.say("none", "/lora ~/a:0.5, /b:c,/d:-1,", "three", "/lora /e", "one", "/lora off", "none")
    assert [request.loras for request in chat.generated] == [
        (),
        (LoraUse(f"{home}/a", 0.5), LoraUse("/b:c"), LoraUse("/d", -1)),
        (LoraUse("/e"),),
        (),
    ]
    await chat.say("/set lora here", "/lora", "relative")
    assert chat.generated[-1].loras == (LoraUse(os.path.abspath("here")),)


async def test_changing_them_loads_no_model(start: Start) -> None:
    chat = await (await start(replies("a", "b"))).ready()
    await chat.say("one", "/lora /a", "two")
    assert len(chat.generated) == 2
    assert len(chat.loads) == 1
