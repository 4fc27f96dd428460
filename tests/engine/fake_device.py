"""A device made of lists that draws tokens itself, generators over it, and drafts as right as one likes."""

import random
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from exl2chat.engine import decoders, penalties
from exl2chat.engine.decoders import Decoder
from exl2chat.engine.device_decoder import DEPTH
from exl2chat.engine.drafting import Drafter
from exl2chat.engine.generators.streaming import StreamingGenerator
from exl2chat.engine.paced_drafts import Source
from exl2chat.engine.replies.choosing import Chooser
from exl2chat.engine.sampler import Sampler
from exl2chat.settings import Sampling
from tests.engine.fake_model import VOCABULARY, Claimed, FakeModel, FakeTokenizer
from tests.engine.speculative import Always

CAPACITY = 40
SETTINGS = (Sampling(temperature=0), Sampling(seed=1), Sampling(seed=2, repetition_penalty=1.5, penalty_range=9))
NO_NUMBERS = -1


class Memory(Claimed):
    """A cache: what was ever written stays behind its end, as on a GPU."""

    def __init__(self) -> None:
        self.capacity, self.length = CAPACITY, 0
        self.written = [-7] * CAPACITY

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    def write(self, place: int, token: int) -> None:
        assert 0 <= place < CAPACITY
        self.written[place] = token


class Device:
    """A model, and the stream that its work is queued on. It works when it is asked for something, or at once."""

    adapters = ()
    embedded = ()
    inputs = FakeModel.inputs

    def __init__(self, memory: Memory, eager: bool) -> None:
        self.memory, self.eager = memory, eager
        self.device, self.dtype, self.config = torch.device("cpu"), torch.bfloat16, FakeModel().config
        self.stream: deque[Callable[[], None]] = deque()
        self.in_flight = self.drawn = 0
        self.rows: list[int] = []  # of each step
        self.fault: str | None = None
        self._logits = FakeModel().logits

    # the host's way

    def forward(self, tokens: torch.Tensor, _cache: Memory, last_only: bool) -> torch.Tensor:
        self.run()
        rows = []
        for token in tokens.tolist():
            self.memory.write(self.memory.length, token)
            self.memory.length += 1
            rows.append(self._logits(self.memory.written[: self.memory.length]))
        return torch.from_numpy(np.stack(rows[-1:] if last_only else rows))

    def run(self) -> None:
        while self.stream:
            self.stream.popleft()()

    # its own: engine/device_steps.py

    def start(self, tokens: Sequence[int], settings: Sampling) -> None:
        self.run()
        missing = torch.tensor(tokens[self.memory.length : -1], dtype=torch.int64)
        if len(missing):
            self.forward(missing, self.memory, True)
        self.in_flight = 0
        self._sampler, self._counts = Sampler(settings, tokens), penalties.active(settings)
        self.follow(tokens)

    def follow(self, tokens: Sequence[int]) -> None:
        assert self.in_flight == 0
        self._position, self._token = len(tokens) - 1, tokens[-1]

    def queue(self, drafts: Sequence[int] = ()) -> Callable[[], list[int]]:
        if self.fault == "queue":
            self.fault = None
            raise RuntimeError("out of memory")
        assert not (drafts and (self.in_flight or self._counts))
        self.in_flight += 1
        assert self.in_flight <= DEPTH
        self.rows.append(1 + len(drafts))
        drawn: list[int] = []
        self.stream.append(lambda: drawn.extend(self._step(drafts)))
        if self.eager:
            self.run()

        def take() -> list[int]:
            self.run()
            self.drawn += 1
            self.in_flight -= 1
            return drawn

        return take

    def _step(self, drafts: Sequence[int]) -> list[int]:
        drawn = []
        for place, token in enumerate((self._token, *drafts), self._position):
            self.memory.write(place, token)
            drawn.append(self._sampler.sample(self._logits(self.memory.written[: place + 1]), place + 1))
        if self.fault == "logits":
            self.fault = None
            drawn = [NO_NUMBERS] * len(drawn)
        self._position, self._token = self._position + 1, drawn[0]
        self._sampler.observe(self._token)
        return drawn


class Oracle:
    """Drafts as right as chance has it, and any number of them."""

    is_model = False

    def __init__(self, right: float, seed: int = 0) -> None:
        self._right, self._chance = right, random.Random(seed)

    def begin(self, chooser: Chooser) -> bool:
        self._sampling = chooser.sampling
        return True

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        sequence, sampler = list(tokens), Sampler(self._sampling, tokens)
        for _ in range(count if self._right in (0, 1) else self._chance.randint(0, count)):
            token = sampler.sample(FakeModel().logits(sequence), len(sequence))
            sequence.append(token if self._chance.random() < self._right else (token + 1) % 256)
        return sequence[len(tokens) :]


def on_device(eager: bool, *drafters: Drafter) -> tuple[StreamingGenerator, Device]:
    device = Device(Memory(), eager)
    subject = StreamingGenerator(device, device.memory, FakeTokenizer())  # type: ignore[arg-type]

    class OnDevice(Decoder):
        def begin(self, chooser: Chooser, longest: int) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(decoders, "runs_on_device", lambda *_: True)
                patch.setattr(decoders, "DeviceSteps", lambda *_: device)
                super().begin(chooser, longest)

    decoder = subject._decoder = OnDevice(device, device.memory, VOCABULARY, drafters)  # type: ignore[arg-type]
    decoder._sources = [Source(drafter, Always(5)) for drafter in drafters]  # type: ignore[arg-type]
    return subject, device


def on_host() -> StreamingGenerator:
    device = Device(Memory(), eager=True)
    return StreamingGenerator(device, device.memory, FakeTokenizer())  # type: ignore[arg-type]
