"""Decoding that stays on the GPU: a step embeds the token that the last one drew, and draws the next, as one graph."""

import math
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exl2chat.engine import penalties
from exl2chat.engine.cache import KVCache
from exl2chat.engine.decode_graphs import Recorded
from exl2chat.engine.device_decoder import Take
from exl2chat.engine.device_penalties import DeviceWindow, count_window
from exl2chat.engine.samplers.reshaping import COLDEST
from exl2chat.engine.transformer import Transformer
from exl2chat.ops.sample import MOST_TOKENS, ROW, TokenSampler
from exl2chat.settings import Sampling

Row = NDArray[np.void]
RESULTS = 8  # tokens that the host has room for; more than steps in flight


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

    def take(self, place: int) -> int:
        """What the step of this event wrote to its place, once it has."""
        self.wait(place)
        return int(self.tokens[place])


def _wait(events: Sequence[Event], memory: Tensor) -> None:  # noqa: ARG001 (it is held as long as this waits)
    for event in events:
        event.synchronize()


class DeviceSteps:
    """The steps of one model over one cache, queued on torch's current stream."""

    def __init__(self, model: Transformer, cache: KVCache, vocabulary: int) -> None:
        """Tokens are drawn from the first `vocabulary`."""
        self.model = model  # or one of the same weights with other embeddings
        self._cache, self._vocabulary = cache, vocabulary
        self._token = torch.zeros(1, dtype=torch.int64, device=model.device)
        results = torch.empty(RESULTS, dtype=torch.int32, pin_memory=True)
        self._drawn = DrawnTokens(
            results,
            [torch.cuda.Event(blocking=True) for _ in range(RESULTS)],  # type: ignore[no-untyped-call]
        )
        self._sampler = TokenSampler(model.device, vocabulary)
        self._step = Recorded(partial(_decode, model, cache, self._token, self._sampler))  # not self: a cycle
        self._window: DeviceWindow | None = None
        self._next = 0

    @torch.inference_mode()
    def start(self, tokens: Sequence[int], settings: Sampling) -> None:
        """Go on after `tokens`, of which the cache holds the first: all but the last, which is a token, are computed.
        `settings.seed` is not None."""
        sequence = torch.tensor(tokens, device=self.model.device)
        self._cache.truncate(len(tokens) - 1)
        if self._cache.length < len(tokens) - 1:
            self.model.forward(self.model.inputs(tokens[self._cache.length : -1]), self._cache, last_only=True)
        self._cache.position.fill_(len(tokens) - 1)
        self._token.copy_(sequence[-1:])
        self._next = len(tokens)
        tensors = {"position": self._cache.position, "token": self._token, "results": self._drawn.memory}
        self._window = None
        if penalties.active(settings):
            reach, decay = settings.penalty_range, settings.penalty_decay
            self._window = count_window(sequence, reach, decay, self._vocabulary, self._cache.capacity + 1)
            tensors |= self._window._asdict()
        self._sampler.set_rows(sampling_row(settings, self._vocabulary, tensors))

    @torch.inference_mode()
    def queue(self) -> Take:
        """One more step. What comes back waits for its token, which is -1 where the logits are not numbers."""
        slot = self._next % RESULTS
        self._next += 1
        self._step()
        self._drawn.record(slot)
        return partial(self._drawn.take, slot)


def runs_on_device(model: Transformer, size: int) -> bool:
    """Whether the steps of `model` are recorded, and kernels/sample.cu can draw from `size` tokens."""
    return model.device.type == "cuda" and model.recorded_rows > 0 and size <= MOST_TOKENS


def _decode(model: Transformer, cache: KVCache, token: Tensor, sampler: TokenSampler) -> Tensor:
    logits = model.step(token, cache, last_only=False)
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
