"""The engine as a supervised process on this machine."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator

import msgspec

from exl2chat.errors import ChatError
from exl2chat.link import protocol as wire
from exl2chat.link.framing import pack, read_frame
from exl2chat.link.threads import worker_environment
from exl2chat.paths import Paths, open_private, private_folder
from exl2chat.safetext import scrub_line
from exl2chat.settings import child_environment

LOG_LIMIT = 1 << 20  # bytes after which the log is started anew; one old log is kept
CLOSE_SECONDS = 1.0


class LocalEngine:
    """A worker process behind the protocol. It is started by the first request, and again by the next after a death.

    The worker runs in its own session, so a Ctrl-C in the terminal does not reach it, and it leaves by itself when its
    standard input ends, so it never outlives this process.
    """

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._events: asyncio.Queue[wire.Event | None] = asyncio.Queue()
        self._starting = asyncio.Lock()
        self._worker: Process | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the worker that is alive."""
        return self._worker.pid if self._worker else None

    async def send(self, request: wire.Request) -> None:
        if isinstance(request, wire.Shutdown):
            return await self.close()
        async with self._starting:
            if self._worker is None:
                if isinstance(request, wire.Stop):
                    return None
                await self._start()
        if self._worker and self._worker.stdin:
            self._worker.stdin.write(pack(request))
        return None

    async def events(self) -> AsyncIterator[wire.Event]:
        while (event := await self._events.get()) is not None:
            yield event

    async def close(self) -> None:
        async with self._starting:
            worker, self._worker = self._worker, None
        if worker:
            await _end(worker)
        if self._watcher:
            await self._watcher
        self._events.put_nowait(None)

    async def _start(self) -> None:
        folders = (self._paths.config, self._paths.data, self._paths.cache, self._paths.state)
        # -P keeps a torch.py in the current folder from being imported; faulthandler explains a crash in the log.
        command = (sys.executable, "-P", "-X", "faulthandler", "-m", "exl2chat.link.worker", *map(str, folders))
        log = _open_log(self._paths)
        log_start = 0 if log is None else os.fstat(log).st_size
        try:
            self._worker = await asyncio.create_subprocess_exec(
                *command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL if log is None else log,
                env=child_environment(worker_environment(self._paths)),
                start_new_session=True,
            )
        except OSError as fault:
            return self._events.put_nowait(wire.Died(f"the engine cannot be started: {fault.strerror}"))
        finally:
            if log is not None:
                os.close(log)
        self._watcher = asyncio.create_task(self._watch(self._worker, log_start))
        return None

    async def _watch(self, worker: Process, log_start: int) -> None:
        """Pass on what the worker says; when it falls silent for good, say that it died unless we closed it."""
        decoder = msgspec.msgpack.Decoder(wire.Event)
        damage = ""
        try:
            while worker.stdout and (frame := await read_frame(worker.stdout)) is not None:
                self._events.put_nowait(decoder.decode(frame))
        except (ChatError, msgspec.MsgspecError) as fault:
            damage = f"the engine sent damaged data ({fault})"
        async with self._starting:  # the next worker must not speak before the death of this one is told
            if self._worker is worker:
                self._worker = None
                await _end(worker)
                how = damage or _cause_of_death(worker.returncode or 0)
                self._events.put_nowait(wire.Died(how + _last_words(self._paths, log_start, worker.pid)))


async def _end(worker: Process) -> None:
    """End the worker, by closing its input, else SIGTERM, else SIGKILL, within two seconds; then what it had started,
    such as a pip that is downloading: the worker leads a session of its own."""
    if worker.stdin:
        worker.stdin.close()
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(worker.wait(), CLOSE_SECONDS / 2)
            break
        with contextlib.suppress(ProcessLookupError):
            worker.send_signal(signal_number)
    await worker.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)


def _open_log(paths: Paths) -> int | None:
    """A descriptor of the log to append to; None where it cannot be written, as on a full or read-only disk."""
    try:
        private_folder(paths.log.parent)
        if paths.log.exists() and paths.log.stat().st_size > LOG_LIMIT:
            paths.log.replace(paths.log.with_suffix(".log.1"))
        return open_private(paths.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except (OSError, ChatError):
        return None


def _last_words(paths: Paths, start: int, pid: int) -> str:
    """The error with which the log of the worker `pid` ends, from offset `start` on, made safe; else where the log is.

    Several processes share the log, so only a line that carries the pid counts.
    """
    try:
        with paths.log.open("rb") as log:
            log.seek(max(start, log.seek(0, os.SEEK_END) - 4096))
            lines = log.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    own = [words[3] for line in lines if len(words := line.split(" ", 3)) == 4 and words[2] == str(pid)]
    if not own or own[-1].startswith("INFO"):
        return f"; the log is {paths.log}"
    return f"; its last words: {scrub_line(own[-1])[:200]} (more in {paths.log})"


def _cause_of_death(status: int) -> str:
    if status == -signal.SIGKILL:
        return "the engine was killed by SIGKILL, which is often the system being out of memory"
    if status < 0:
        name = next((known.name for known in signal.Signals if known == -status), f"signal {-status}")
        return f"the engine was killed by {name}"
    return f"the engine left with status {status}"
