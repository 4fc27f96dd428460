"""The dynamic generator for asyncio: it runs in a thread of its own, and every job's results are awaited by whoever
wants them. The event loop never waits for the model."""

import asyncio
import queue
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread

from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.replies.jobs import Failed, Job, Result, Streamed
from exl2chat.errors import UsageError

Command = Callable[[], None]


class Stream:
    """The results of one job: `async for result in stream`. The error of a job, or of the model, is raised there."""

    def __init__(self, make: Callable[[], Job], generator: "AsyncDynamicGenerator") -> None:
        self.make = make
        self.serial: int | None = None
        self.ended = False
        self._generator = generator
        self._loop = asyncio.get_running_loop()
        self._results: asyncio.Queue[Result | BaseException | None] = asyncio.Queue()

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Result:
        result = await self._results.get()
        if result is None or isinstance(result, BaseException):
            self._results.put_nowait(result)  # for whoever else waits, and for the next call
            raise StopAsyncIteration if result is None else result
        return result

    async def cancel(self) -> None:
        """End the job. Whoever waits for its results is told at once, this call when its pages are free again."""
        while not self._results.empty():
            self._results.get_nowait()
        self.ended = True
        self._results.put_nowait(None)
        await self._generator.forget(self)

    def put(self, result: Result | BaseException | None) -> None:
        """A result, or an error or None for the end. In the thread of the event loop; nothing follows the end."""
        if self.ended:
            return
        self.ended = result is None or isinstance(result, BaseException)
        self._results.put_nowait(result)

    def deliver(self, *results: Result | BaseException | None) -> None:
        """As `put`, from any thread. A loop that is closed has nobody who waits."""
        for result in results:
            try:
                self._loop.call_soon_threadsafe(self.put, result)
            except RuntimeError:
                return


class AsyncDynamicGenerator:
    """Runs a dynamic generator, which nobody else may call meanwhile, from the first job to `close`."""

    def __init__(self, generator: DynamicGenerator) -> None:
        self._generator = generator
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._streams: dict[int, Stream] = {}  # touched by the thread only
        self._thread: Thread | None = None
        self._closed = False

    def enqueue(self, make: Callable[[], Job]) -> Stream:
        """The results of a new job, or the error of making it, which is done in the thread: a table for filters takes
        a second. Call it from a running event loop."""
        if self._closed:
            raise UsageError("the generator is closed", "make a new one")
        stream = Stream(make, self)
        self._commands.put(lambda: self._enqueue(stream))
        if self._thread is None:
            self._thread = Thread(target=self._run, name="dynamic generator", daemon=True)
            self._thread.start()
        return stream

    async def forget(self, stream: Stream) -> None:
        """Cancel the job of a stream; returns once that is done."""
        if self._thread is None or self._closed:
            return
        done: Future[None] = Future()

        def cancel() -> None:
            if stream.serial is not None and self._streams.pop(stream.serial, None) is not None:
                self._generator.cancel(stream.serial)
            if done.set_running_or_notify_cancel():  # not where whoever waits was cancelled itself
                done.set_result(None)

        self._commands.put(cancel)
        await asyncio.wrap_future(done)

    async def close(self) -> None:
        """Cancel all jobs, whose streams end, and wait for the thread to end."""
        self._closed = True
        self._commands.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _enqueue(self, stream: Stream) -> None:
        try:
            stream.serial = self._generator.enqueue(stream.make())
        except Exception as error:
            stream.deliver(error)
        else:
            self._streams[stream.serial] = stream

    def _run(self) -> None:
        while True:
            command = self._next()
            if command is None:
                break
            command()
        self._generator.clear()
        for stream in self._streams.values():
            stream.deliver(None)
        self._streams.clear()

    def _next(self) -> Command | None:
        """What is to be done next: a command if there is one, else a step. Without jobs it waits for a command."""
        if not self._streams:
            return self._commands.get()
        try:
            return self._commands.get_nowait()
        except queue.Empty:
            return self._step

    def _step(self) -> None:
        """A step of the model. Its error is that of every job; the next ones find a generator that works."""
        try:
            results = self._generator.iterate()
        except BaseException as error:
            self._generator.clear()
            for stream in self._streams.values():
                stream.deliver(error)
            self._streams.clear()
            return
        for result in results:
            self._hand_over(result)

    def _hand_over(self, result: Result) -> None:
        stream = self._streams[result.serial]
        if isinstance(result, Failed):
            stream.deliver(result.error)
            del self._streams[result.serial]
        elif isinstance(result, Streamed) and result.final is not None:
            stream.deliver(result, None)
            del self._streams[result.serial]
        else:
            stream.deliver(result)
