"""A deterministic engine for tests and demonstrations: it does what its script says, in the order of the script.

A script is a list of steps for the load and one list per reply (used in turn, then from the first again). In a file
(`--engine scripted:FILE`) it is JSON, each step tagged with its class name:

    {"load": [{"type": "Progress", "stage": "loading weights", "done": 1, "total": 2}],
     "replies": [[{"type": "Read", "total": 12}, {"type": "Say", "text": "Hello there."}]]}
"""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from exl2chat.errors import UsageError
from exl2chat.link import protocol as wire

MODEL = wire.ModelInfo(
    name="scripted",
    path="",
    architecture="Script",
    quantization="none",
    context=4096,
    vocab_size=0,
    device="cpu",
    dtype="float32",
    weight_bytes=0,
    cache_bytes=0,
)


class Step(msgspec.Struct, frozen=True, tag=True):
    """Base of the steps."""


class Progress(Step, frozen=True):
    """A load reports where it is."""

    stage: str
    done: int = 0
    total: int = 0
    unit: str = ""


class Read(Step, frozen=True):
    """`total` prompt tokens are read, `cached` of them were there already."""

    total: int
    cached: int = 0


class Say(Step, frozen=True):
    """Stream `text`, one chunk and one token per word, `delay` seconds before each."""

    text: str
    delay: float = 0.0


class Wait(Step, frozen=True):
    """Do nothing for a while; a Stop cuts it short."""

    seconds: float


class Hold(Step, frozen=True):
    """Do nothing until `ScriptedEngine.release` or a Stop: a test looks at the middle of a reply without sleeping."""


class Finish(Step, frozen=True):
    """End the reply for `reason`; a script without it ends with "eos"."""

    reason: wire.StopReason = "eos"


class Fail(Step, frozen=True):
    """The load or the reply fails as a model that is broken or too large does."""

    message: str
    remedy: str = ""
    status: int = 1


class Die(Step, frozen=True):
    """The engine process is gone. The next Load revives it, as a new worker would."""

    detail: str = "the engine was killed by SIGKILL"


Steps = tuple[Progress | Read | Say | Wait | Hold | Finish | Fail | Die, ...]

DEMO = (
    "A *scripted* engine says the same thing every time.\n\n"
    "```python\nfor word in script:\n    print(word)\n```\n\n"
    "1. It needs **no model**.\n2. It is deterministic.\n"
)


class Script(msgspec.Struct, frozen=True):
    """What a ScriptedEngine does: the steps of every load, and those of each reply."""

    load: Steps = ()
    replies: tuple[Steps, ...] = ((Read(total=16), Say(DEMO, delay=0.02)),)
    note: str = ""  # what the user should know of the load


def read_script(path: Path) -> Script:
    """The script in a JSON file. UsageError names the file and the field."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Script)
    except (OSError, msgspec.MsgspecError) as fault:
        raise UsageError(f"{path}: {fault}", "see exl2chat/link/scripted.py for the form of a script") from None


FIRST_TOKEN_S = 0.25
TOKEN_S = 0.02


class _Stopped(Exception):
    """The request in hand was stopped."""


class ScriptedEngine:
    """A `protocol.Engine` that plays a Script. `requests` records everything it was sent.

    The seconds in its Stats are made up (FIRST_TOKEN_S, TOKEN_S per token), so that they too are the same every time.
    """

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.requests: list[wire.Request] = []
        self._events: asyncio.Queue[wire.Event | None] = asyncio.Queue()
        self._inbox: asyncio.Queue[wire.Load | wire.Generate] = asyncio.Queue()
        self._stopped: set[str] = set()
        self._releases = 0
        self._wake = asyncio.Event()
        self._alive = False
        self._replies = 0
        self._tokens = 0
        self._task: asyncio.Task[None] | None = None

    async def send(self, request: wire.Request) -> None:
        self.requests.append(request)
        if isinstance(request, wire.Load | wire.Generate):
            self._stopped.discard(_id(request))
            self._inbox.put_nowait(request)
            self._task = self._task or asyncio.create_task(self._serve())
        elif isinstance(request, wire.Stop):
            self._stopped.add(request.id)
            self._wake.set()
        else:
            await self.close()

    async def events(self) -> AsyncIterator[wire.Event]:
        while (event := await self._events.get()) is not None:
            yield event

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._events.put_nowait(None)

    def release(self) -> None:
        """Let one `Hold` go on, the present one or the next."""
        self._releases += 1
        self._wake.set()

    async def _serve(self) -> None:
        while True:
            request = await self._inbox.get()
            event = await (self._load(request) if isinstance(request, wire.Load) else self._reply(request))
            self._alive = isinstance(event, wire.Ready) or (self._alive and not isinstance(event, wire.Died))
            self._emit(event)

    async def _load(self, request: wire.Load) -> wire.Event:
        """Play the script's load; the event that ends it."""
        self._alive = False
        try:
            for step in self.script.load:
                if isinstance(step, Progress):
                    self._emit(wire.Loading(step.stage, step.done, step.total, step.unit))
                elif end := await self._shared("", step):
                    return end
        except _Stopped:
            return wire.Failed("", "the load was stopped")
        return wire.Ready(
            msgspec.structs.replace(MODEL, context=request.context or MODEL.context), 0.0, self.script.note
        )

    async def _reply(self, request: wire.Generate) -> wire.Event:
        """Play the next reply of the script; the event that ends it."""
        if not self._alive:
            return wire.Failed(request.id, "no model is loaded", "load one first", status=3)
        steps = self.script.replies[self._replies % len(self.script.replies)]
        self._replies += 1
        self._tokens = 0
        read = Read(total=0)
        reason: wire.StopReason = "eos"
        try:
            for step in steps:
                if isinstance(step, Read):
                    read = step
                    self._emit(wire.Prefill(request.id, read.total, read.total, read.cached))
                elif isinstance(step, Say):
                    await self._say(request, step)
                elif isinstance(step, Finish):
                    reason = step.reason
                elif end := await self._shared(request.id, step):
                    return end
                if self._tokens == request.max_tokens:
                    reason = "max_tokens"
                    break
        except _Stopped:
            reason = "stopped"
        seconds = TOKEN_S * max(0, self._tokens - 1)
        stats = wire.Stats(read.total, read.cached, self._tokens, FIRST_TOKEN_S, seconds, request.sampling.seed or 0)
        return wire.Finished(request.id, reason, stats)

    async def _say(self, request: wire.Generate, step: Say) -> None:
        """Stream the words of one step, never beyond `max_tokens`."""
        for word in re.findall(r"\s*\S+|\s+", step.text):
            if self._tokens == request.max_tokens:
                return
            await self._pause(request.id, Wait(step.delay))
            self._tokens += 1
            self._emit(wire.Chunk(request.id, word, self._tokens))

    async def _shared(self, id: str, step: Step) -> wire.Event | None:
        """Play a step that loads and replies have in common; the event that ends the request if the step does."""
        if isinstance(step, Fail):
            return wire.Failed(id, step.message, step.remedy, step.status)
        if isinstance(step, Die):
            return wire.Died(step.detail)
        if isinstance(step, Wait | Hold):
            await self._pause(id, step)
        return None

    async def _pause(self, id: str, step: Wait | Hold) -> None:
        """Wait as the step says; _Stopped as soon as `id` is to stop."""
        while id not in self._stopped:
            if isinstance(step, Hold) and self._releases:
                self._releases -= 1
                return
            self._wake.clear()
            try:
                async with asyncio.timeout(step.seconds if isinstance(step, Wait) else None):
                    await self._wake.wait()  # under wait_for of Python 3.11, a cancel right after a wake is lost
            except TimeoutError:
                return
        raise _Stopped

    def _emit(self, event: wire.Event) -> None:
        self._events.put_nowait(event)


def _id(request: wire.Load | wire.Generate) -> str:
    """The id under which a Stop names the request; a load has the empty one."""
    return "" if isinstance(request, wire.Load) else request.id
