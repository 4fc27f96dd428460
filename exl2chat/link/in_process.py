"""The engine on a thread of this process, for debugging: a debugger sees everything, and a crash takes all with it."""

import asyncio
import threading
from collections.abc import AsyncIterator

from exl2chat.link import protocol as wire
from exl2chat.link.service import Service
from exl2chat.paths import Paths

JOIN_SECONDS = 2.0


class InProcessEngine:
    """The service of the worker behind the same protocol."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._events: asyncio.Queue[wire.Event | None] = asyncio.Queue()
        self._service: Service | None = None
        self._thread: threading.Thread | None = None

    async def send(self, request: wire.Request) -> None:
        if isinstance(request, wire.Shutdown):
            return await self.close()
        if self._service is None:
            loop = asyncio.get_running_loop()

            def emit(event: wire.Event) -> None:
                loop.call_soon_threadsafe(self._events.put_nowait, event)

            self._service = Service(self._paths, emit)
            self._thread = threading.Thread(target=self._service.run, daemon=True)
            self._thread.start()
        self._service.submit(request)
        return None

    async def events(self) -> AsyncIterator[wire.Event]:
        while (event := await self._events.get()) is not None:
            yield event

    async def close(self) -> None:
        if self._service and self._thread:
            self._service.submit(wire.Shutdown())
            await asyncio.to_thread(self._thread.join, JOIN_SECONDS)
        self._events.put_nowait(None)
