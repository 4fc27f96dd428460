"""Decoding that stays on the GPU: a step embeds the token that the last one drew, and draws the next, as one graph.

A step may have drafts behind its token: then it draws what follows each of them too, as if they had been drawn.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exl2chat.engine import penalties
from exl2chat.engine.cache import KVCache
from exl2chat.engine.decode_graphs import Recorded
from exl2chat.engine.device_penalties import DeviceWindow, count_window
from exl2chat.engine.samplers.reshaping import COLDEST
from exl2chat.engine.transformer import Transformer
from exl2chat.ops.sample import MOST_TOKENS, ROW, TokenSampler
from exl2chat.settings import Sampling

Row = NDArray[np.void]
Take = Callable[[], list[int]]
RESULTS = 8  # tokens that the host has room for: more than steps in flight, and as many as a step has rows


class Steps(Protocol):
    """Decoding steps on a device, each of which begins with the token that the one before drew."""

    def start(self, tokens: Sequence[int], settings: Sampling) -> None:
        """Go on after `tokens`, of which the cache holds the first. `settings.seed` is not None."""

    def follow(self, tokens: Sequence[int]) -> None:
        """Go on after `tokens`, those from the start on with what was drawn since. No step is in flight."""

    def queue(self, drafts: Sequence[int] = ()) -> Take:
        """One more step, of up to RESULTS rows; with drafts only just after `follow`, and without penalties. What comes
        back waits for the tokens drawn after the last one and after each draft, which are -1 where logits are not
        numbers. The next step begins with the first of them."""


class Event(Protocol):
    """A torch.cuda.Event. To wait for one that was never recorded takes no time."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class DrawnTokens:
    """Pinned memory int32 [n, ...] that steps write tokens into by its address, of which torch knows nothing: it would
    hand the memory out again while they still do. So it is given back only when they have ended."""

    def __init__(self, memory: Tensor, events: Sequence[Event]) -> None:
        """An event for each step that may be on its way."""
        self.memory, self._events = memory, events
        self.tokens: NDArray[np.int32] = memory.numpy()
        weakref.finalize(self, _wait, events, memory)

    def record(self, place: int) -> None:
        """The step that this event stands for has been queued."""
        self._events[place].record()

    def wait(self, place: int) -> None:
        """Until that step has ended."""
        self._events[place].synchronize()

    def take(self, place: int, count: int) -> list[int]:
        """What the step of this event wrote to its place and those after it, which go around, once it has."""
        self.wait(place)
        return [int(self.tokens[(place + row) % len(self.tokens)]) for row in range(count)]


def _wait(events: Sequence[Event], memory: Tensor) -> None:  # noqa: ARG001 (it is held as long as this waits)
    for event in events:
        event.synchronize()


class DeviceSteps:
    """The steps of one model over one cache, queued on torch's current stream."""

    def __init__(self, model: Transformer, cache: KVCache, vocabulary: int) -> None:
        """Tokens are drawn from the first `vocabulary`."""
        self.model = model  # or one of the same weights with other embeddings
        self._cache, self._vocabulary = cache, vocabulary
        # the position of the step's token; the tokens of its rows; the positions of those behind the first
        self._numbers = torch.zeros(1 + RESULTS, dtype=torch.int64, device=model.device)
        self._told = torch.zeros(1 + RESULTS, dtype=torch.int64, pin_memory=True)  # read when the copy runs
        self._places = torch.zeros(RESULTS, dtype=torch.int32, device=model.device)
        results = torch.empty(RESULTS, dtype=torch.int32, pin_memory=True)
        self._drawn = DrawnTokens(
            results,
            [torch.cuda.Event(blocking=True) for _ in range(RESULTS)],  # type: ignore[no-untyped-call]
        )
        self._sampler = TokenSampler(model.device, vocabulary, RESULTS)
        # not self: a cycle
        self._work = partial(_decode, model, cache, self._numbers, self._places, self._sampler)
        self._graphs: dict[tuple[int, bool], Recorded] = {}
        self._window: DeviceWindow | None = None
        self._next, self._follows = 0, False

    @torch.inference_mode()
    def start(self, tokens: Sequence[int], settings: Sampling) -> None:
        """Go on after `tokens`, of which the cache holds the first: all but the last, which is a token, are computed.
        `settings.seed` is not None."""
        self._cache.truncate(len(tokens) - 1)
        if self._cache.length < len(tokens) - 1:
            self.model.forward(self.model.inputs(tokens[self._cache.length : -1]), self._cache, last_only=True)
        self._sampler.set_rows(self._rows(tokens, settings))  # once all that was queued before has ended
        self.follow(tokens)

    def follow(self, tokens: Sequence[int]) -> None:
        """Go on after `tokens`, those from the start on with what was drawn since. No step is in flight."""
        self._told.numpy()[:2] = len(tokens) - 1, tokens[-1]
        self._next, self._follows = len(tokens), True

    @torch.inference_mode()
    def queue(self, drafts: Sequence[int] = ()) -> Take:
        """One more step, as `Steps` has it."""
        slot, rows, told = self._next % RESULTS, 1 + len(drafts), self._follows
        self._next, self._follows = self._next + 1, False
        if told:
            self._told.numpy()[2 : 1 + rows] = drafts
            self._numbers.copy_(self._told, non_blocking=True)
        if (rows, told) not in self._graphs:
            pool = next((graph.pool for graph in self._graphs.values()), None)
            self._graphs[rows, told] = Recorded(partial(self._work, rows, told), pool)
        self._graphs[rows, told]()
        self._drawn.record(slot)
        return partial(self._drawn.take, slot, rows)

    def _rows(self, tokens: Sequence[int], settings: Sampling) -> Row:
        """How each row of a step draws. Penalties count for the first alone."""
        tensors = {"position": self._cache.position, "token": self._numbers[1:], "results": self._drawn.memory}
        self._window = None
        if penalties.active(settings):
            reach, decay = settings.penalty_range, settings.penalty_decay
            sequence = torch.tensor(tokens, device=self.model.device)
            self._window = count_window(sequence, reach, decay, self._vocabulary, self._cache.capacity + 1)
            tensors |= self._window._asdict()
        rows = np.repeat(sampling_row(settings, self._vocabulary, tensors), RESULTS)
        numbers = np.arange(RESULTS, dtype=np.uint64)
        rows["token"] += numbers * np.uint64(self._numbers.element_size())
        rows["position"][1:] = self._places.data_ptr() + numbers[1:] * np.uint64(self._places.element_size())
        return rows


def runs_on_device(model: Transformer, size: int) -> bool:
    """Whether the steps of `model` are recorded, and kernels/sample.cu can draw from `size` tokens."""
    return model.device.type == "cuda" and model.recorded_rows > 0 and size <= MOST_TOKENS


def _decode(
    model: Transformer,
    cache: KVCache,
    numbers: Tensor,
    places: Tensor,
    sampler: TokenSampler,
    rows: int,
    told: bool,
) -> Tensor:
    """A step of so many tokens, at the position in `numbers` or else at that of the cache, which goes on by one. What
    is drawn takes the place of the tokens."""
    if told:
        cache.position.copy_(numbers[:1])
    if rows > 1:
        torch.arange(rows, out=places[:rows])
        places[:rows].add_(cache.position)
    logits = model.step(numbers[1 : 1 + rows], cache, last_only=False)
    sampler.queue(logits)
    return logits


def sampling_row(settings: Sampling, vocabulary: int, tensors: Mapping[str, Tensor]) -> Row:
    """The `ROW` [1] by which kernels/sample.cu draws from `vocabulary` tokens; `tensors` by the names of its pointers.
    settings.seed is not None."""
    row = np.zeros(1, ROW)
    for name, tensor in tensors.items():
        row[name] = tensor.data_ptr()
    row["seed"], row["greedy"], row["temperature"] = (
        settings.seed,
        settings.temperature <= COLDEST,
        settings.temperature,
    )
    row["top_k"] = settings.top_k if settings.top_k < vocabulary else 0
    row["top_p"] = settings.top_p
    row["least"] = math.log(settings.min_p) if settings.min_p else -math.inf
    row["repetition"], row["presence"] = settings.repetition_penalty, settings.presence_penalty
    row["frequency"] = settings.frequency_penalty
    row["reach"], row["decay"] = settings.penalty_range, settings.penalty_decay
    row["mask"] = RESULTS - 1
    return row
