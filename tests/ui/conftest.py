"""The app over the scripted engine, without a terminal."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.pilot import Pilot

from exl2chat.chat.controller import Controller
from exl2chat.chat.session import Session
from exl2chat.link.scripted import Hold, Read, Say, Script, ScriptedEngine
from exl2chat.paths import Paths
from exl2chat.settings import Settings
from exl2chat.ui.app import ChatApp

PATIENCE = 10.0  # seconds; only a failing test waits that long
HELLO = Script(replies=((Read(total=8), Say("Hello **there**.\n\n- one\n- two")),))
HELD = Script(replies=((Read(total=8), Say("The beginning"), Hold(), Say(" and the end.")),))


class Screen:
    """A running app: its engine, its keys and what it shows."""

    def __init__(self, app: ChatApp, engine: ScriptedEngine, pilot: Pilot[int]) -> None:
        self.app = app
        self.engine = engine
        self.pilot = pilot

    @property
    def chat(self) -> Controller:
        return self.app.controller

    async def until(self, done: Callable[[], object]) -> None:
        """Return as soon as `done` is true; fail when it does not become so."""
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while not done():
            if asyncio.get_running_loop().time() > deadline:
                pytest.fail("waited in vain; the screen shows:\n" + self.text())
            await self.pilot.pause(0.01)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def type(self, text: str) -> None:
        """Insert `text` into the prompt as if typed."""
        self.app.prompt.insert(text)
        await self.pilot.pause()

    async def say(self, text: str) -> None:
        """Type and send."""
        await self.type(text)
        await self.press("enter")

    async def ready(self) -> None:
        await self.until(lambda: self.chat.phase == "ready")

    async def replied(self, replies: int = 1) -> None:
        """Wait until so many replies are complete and drawn."""
        await self.until(lambda: sum(m.role == "assistant" for m in self.chat.path) == replies and not self.chat.busy)
        await self.pilot.pause()

    def text(self) -> str:
        """What is on the screen, as the terminal would get it."""
        return "\n".join("".join(segment.text for segment in strip) for strip in self.strips())

    def strips(self):
        return self.app.screen._compositor.render_strips()

    def shown(self, text: str) -> bool:
        return text in self.text()


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths.default(tmp_path)


@pytest.fixture
def start(paths: Paths):
    """`async with start(...) as screen`: a chat that plays `script`."""

    @asynccontextmanager
    async def run(
        script: Script | None = None,
        session: Session | None = None,
        settings: Settings | None = None,
        size: tuple[int, int] = (100, 30),
    ) -> AsyncIterator[Screen]:
        engine = ScriptedEngine(script)
        controller = Controller(engine, settings or Settings(), paths, session or Session.create(paths))
        app = ChatApp(controller, paths)
        async with app.run_test(size=size, notifications=True) as pilot:
            yield Screen(app, engine, pilot)

    return run
