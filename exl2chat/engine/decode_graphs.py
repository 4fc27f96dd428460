"""Steps of a few tokens as CUDA graphs: one call to the driver instead of hundreds of launches, each of which takes
longer to ask for than to run (7 us from Python, 1.2 us as a node of a graph, on an H200)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from exl2chat.ops.recording import record

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
        self._graph, self._result = record(self._work, self._pool)
        return first

    @property
    def pool(self) -> Any:
        """Its memory, once it was called."""
        return None if self._graph is None else self._graph.pool()


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
