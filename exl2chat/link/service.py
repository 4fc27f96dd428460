"""What the worker does, whatever carries its records: loads models and answers, one request at a time.

`submit` may be called from any thread and returns at once; `run` does the work on its own thread and is the only one to
emit. torch is imported by the first load, not by this module.
"""

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from exl2chat.errors import ChatError, ModelError, is_out_of_memory
from exl2chat.link import protocol as wire
from exl2chat.model import hub
from exl2chat.paths import Paths

if TYPE_CHECKING:
    from exl2chat.link.host import Host

PROGRESS_SECONDS = 0.1

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, slots=True)
class _Job:
    """A request that is not answered yet; `id` is what a Stop calls it."""

    request: wire.Load | wire.Generate
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def id(self) -> str:
        return self.request.id if isinstance(self.request, wire.Generate) else ""


class LoadStopped(Exception):
    """A Stop with the empty id arrived during a load."""


class Service:
    """Takes requests, emits events. Nothing that a request does ends it, short of the death of the process."""

    def __init__(self, paths: Paths, emit: Callable[[wire.Event], None]) -> None:
        self._paths = paths
        self._emit = emit
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._open: list[_Job] = []
        self._lock = threading.Lock()
        self._host: Host | None = None

    def submit(self, request: wire.Request) -> None:
        """Queue a request; a Stop acts on what is queued or in hand."""
        with self._lock:
            if isinstance(request, wire.Load | wire.Generate):
                job = _Job(request)
                self._open.append(job)
                self._queue.put(job)
                return
            for job in self._open:
                if isinstance(request, wire.Shutdown) or job.id == request.id:
                    job.cancelled.set()
            if isinstance(request, wire.Shutdown):
                self._queue.put(None)

    def run(self) -> None:
        """Answer requests until Shutdown. Raises only where a GPU will answer no more (`LoadedModel.recover`)."""
        while (job := self._queue.get()) is not None:
            outcome = self._outcome(job)
            self._emit(outcome)
            if self._host and isinstance(outcome, wire.Failed):
                self._host.model.recover()
                if isinstance(job.request, wire.Load):
                    self._emit(wire.Ready(self._host.info, seconds=0.0))
            with self._lock:
                self._open.remove(job)

    def _outcome(self, job: _Job) -> wire.Event:
        """The event that ends the request, whatever happens."""
        try:
            if isinstance(job.request, wire.Load):
                return self._load(job, job.request)
            return self._answer(job, job.request)
        except LoadStopped:
            if self._host:
                return wire.Failed("", "the load was stopped")
            return wire.Failed("", "the load was stopped: no model is loaded", "the next message loads it again")
        except ChatError as fault:
            return wire.Failed(job.id, fault.message, fault.remedy, fault.status)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as fault:  # a panic in a Rust library is no Exception
            log.exception("%s failed", type(job.request).__name__)
            status = ChatError.status if job.id else ModelError.status
            return wire.Failed(job.id, *self._explain(fault), status)

    def _load(self, job: _Job, request: wire.Load) -> wire.Ready:
        """Load a model; the one there is stays until nothing but the new weights is left to load."""
        started = time.perf_counter()
        progress = _LoadProgress(job, self._emit)
        path = hub.resolve(request.model, self._paths, progress)
        draft = request.draft_model if request.speculate in ("auto", "draft") else None
        draft_path = hub.resolve(draft, self._paths, progress) if draft else None
        progress("starting the engine")
        from exl2chat.link.host import HostPlan

        plan = HostPlan(path, draft_path, request, self._paths, progress, self._host)
        self._host = None
        gc.collect()  # the old model must be gone before the new one takes its place
        self._host = plan.load(progress)
        seconds = time.perf_counter() - started
        log.info("loaded %s in %.1f s", self._host.info.name, seconds)
        return wire.Ready(self._host.info, seconds, self._host.note)

    def _answer(self, job: _Job, request: wire.Generate) -> wire.Finished:
        if self._host is None:
            raise ModelError("no model is loaded", "load one first")
        return self._host.answer(request, job.cancelled.is_set, self._emit)

    def _explain(self, fault: BaseException) -> tuple[str, str]:
        """Message and remedy for a failure that no part of ours foresaw."""
        if is_out_of_memory(fault):
            now = f", now {self._host.info.context}" if self._host else ""
            remedy = f"use a shorter context (--ctx{now}), fewer bits per weight or a smaller model"
            return "out of memory", f"close what else fills it; or {remedy}"
        first_line = str(fault).partition("\n")[0][:200]
        return f"the engine failed: {type(fault).__name__}: {first_line}", f"details are in {self._paths.log}"


class _LoadProgress:
    """A Progress that emits Loading events, ten a second within a stage, and ends a load that was stopped."""

    def __init__(self, job: _Job, emit: Callable[[wire.Event], None]) -> None:
        self._job = job
        self._emit = emit
        self._stage = ""
        self._next = 0.0

    def __call__(self, stage: str, done: int = 0, total: int = 0, unit: str = "") -> None:
        if self._job.cancelled.is_set():
            raise LoadStopped
        now = time.monotonic()
        if stage != self._stage or done == total or now >= self._next:
            self._stage, self._next = stage, now + PROGRESS_SECONDS
            self._emit(wire.Loading(stage, done, total, unit))
