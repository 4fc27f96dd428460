"""Steps of a few tokens as CUDA graphs: one call to the driver instead of hundreds of launches, each of which takes
longer to ask for than to run (7 us from Python, 1.2 us as a node of a graph, on an H200)."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Step = Callable[[Tensor], Tensor]


class Recorded:
    """Work on the device that reads and writes the same addresses each time, from its second time on a graph.

    The first time runs it as it is: kernels compile and reserve what they need, which a recording cannot.
    """

    def __init__(self, work: Callable[[], Tensor], pool: Any = None) -> None:
        """`pool`: that of another recording, to share its memory; then only one of them is in use at a time."""
        self._work, self._pool = work, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Tensor

    def __call__(self) -> Tensor:
        """What the work gives; the next call overwrites it."""
        if self._graph is not None:
            self._graph.replay()
            return self._result
        first = self._work()
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._result = self._work()
        self._graph = graph
        return first

    @property
    def pool(self) -> Any:
        """Its memory, once it was called."""
        return None if self._graph is None else self._graph.pool()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage is left where it is: it may be another graph, or wait for an event, and what ends either during a
    recording spoils that."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass(frozen=True, slots=True)
class _Recording:
    """A step that reads `tokens`."""

    tokens: Tensor
    step: Recorded


class DecodeGraphs:
    """The steps of one model over one cache, recorded by their number of tokens, each when it is first asked for."""

    def __init__(self) -> None:
        self._recordings: dict[int, _Recording] = {}

    def run(self, tokens: Tensor, step: Step) -> Tensor:
        """step(tokens), from the second time on as a graph; the logits are the caller's own."""
        count = tokens.shape[0]
        if count not in self._recordings:
            pool = next((other.step.pool for other in self._recordings.values()), None)
            own = tokens.clone()
            self._recordings[count] = _Recording(own, Recorded(lambda: step(own), pool))
        recording = self._recordings[count]
        recording.tokens.copy_(tokens)
        return recording.step().clone()
