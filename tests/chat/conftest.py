"""A chat over the scripted engine, and everything it says."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from exl2chat.chat.controller import Controller
from exl2chat.chat.events import ChatEvent
from exl2chat.chat.session import Session
from exl2chat.link import protocol as wire
from exl2chat.link.scripted import Hold, Read, Say, Script, ScriptedEngine
from exl2chat.paths import Paths
from exl2chat.settings import Settings

E = TypeVar("E", bound=ChatEvent)


def replies(*texts: str) -> Script:
    """A script that answers with `texts` in turn."""
    return Script(replies=tuple((Read(total=7, cached=2), Say(text)) for text in texts))


# The first reply halts after two words until the engine is released.
HELD = Script(replies=((Read(total=7), Say("one two"), Hold(), Say(" three")), (Say("next"),)))


class Chat:
    """A started controller, its engine, and the events so far."""

    def __init__(self, script: Script, session: Session, paths: Paths, settings: Settings) -> None:
        self.engine = ScriptedEngine(script)
        self.controller = Controller(self.engine, settings, paths, session)
        self.events: list[ChatEvent] = []
        self._changed = asyncio.Event()
        self.controller.subscribe(self._take)

    def _take(self, event: ChatEvent) -> None:
        self.events.append(event)
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for events until `holds`; fails after ten seconds."""
        async with asyncio.timeout(10):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    async def ready(self) -> "Chat":
        await self.until(lambda: self.controller.phase == "ready" and not self.controller.busy)
        return self

    async def say(self, *lines: str) -> None:
        """Submit lines one by one, each once the model is free."""
        for line in lines:
            await self.controller.submit(line)
            await self.ready()

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def last(self, kind: type[E]) -> E:
        return self.of(kind)[-1]

    @property
    def texts(self) -> list[str]:
        return [message.text for message in self.controller.path]

    @property
    def generated(self) -> list[wire.Generate]:
        return [request for request in self.engine.requests if isinstance(request, wire.Generate)]

    @property
    def loads(self) -> list[wire.Load]:
        return [request for request in self.engine.requests if isinstance(request, wire.Load)]


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths.default(tmp_path / "home")


Start = Callable[..., Awaitable[Chat]]


@pytest.fixture
async def start(paths: Paths) -> AsyncIterator[Start]:
    """Starts chats over scripts and closes them in the end."""
    chats: list[Chat] = []

    async def begin(
        script: Script | None = None, session: Session | None = None, settings: Settings | None = None
    ) -> Chat:
        chat = Chat(script or Script(), session or Session.in_memory(), paths, settings or Settings())
        chats.append(chat)
        await chat.controller.start()
        return chat

    yield begin
    for chat in chats:
        await chat.controller.close()
