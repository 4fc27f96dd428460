"""A process that chats with itself until it is killed, and prints what it was told is safe.

python talker.py messages FILE     appends messages; prints each id once `Session.add` has returned
python talker.py stream HOME       streams one long reply; prints the time in seconds and each chunk
"""

import asyncio
import json
import sys
import time
from pathlib import Path

from exl2chat.chat.controller import Controller
from exl2chat.chat.events import ChatEvent, Message, ReplyText
from exl2chat.chat.session import Session, new_id
from exl2chat.link.scripted import Say, Script, ScriptedEngine
from exl2chat.paths import Paths
from exl2chat.settings import Settings


def messages(path: Path) -> None:
    session = Session.open(path, Paths.default(path.parent))
    while True:
        parent = session.tree.head
        session.draft(new_id(), parent, "half a reply")
        message = Message(new_id(), parent, "user", f"after {parent}")
        session.add(message)
        print(message.id, flush=True)


async def stream(home: Path) -> None:
    paths = Paths.default(home)
    engine = ScriptedEngine(Script(replies=((Say("word " * 10_000, delay=0.002),),)))
    controller = Controller(engine, Settings(), paths, Session.create(paths))

    def tell(event: ChatEvent) -> None:
        if isinstance(event, ReplyText):
            print(json.dumps([time.monotonic(), event.text]), flush=True)

    controller.subscribe(tell)
    await controller.start()
    await controller.submit("go on")
    await asyncio.sleep(60)


if __name__ == "__main__":
    if sys.argv[1] == "messages":
        messages(Path(sys.argv[2]))
    else:
        asyncio.run(stream(Path(sys.argv[2])))
