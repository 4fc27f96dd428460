"""How the next token of a sequence comes about: here it is decided whether the host draws it, or the GPU by itself."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from exl2chat.engine import penalties
from exl2chat.engine.cache import KVCache
from exl2chat.engine.device_decoder import DeviceDecoder
from exl2chat.engine.device_steps import DeviceSteps, runs_on_device
from exl2chat.engine.drafting import Drafter, rounds_alike
from exl2chat.engine.pace import Pace
from exl2chat.engine.paced_drafts import PacedDrafts, Source, Speculated
from exl2chat.engine.replies.choosing import Chooser
from exl2chat.engine.speculation import SpeculativeLogits
from exl2chat.engine.step_logits import StepLogits
from exl2chat.engine.transformer import Transformer

MOST_DRAFTS = 7  # with the token before them 8 rows, as many as kernels/gemv.cu multiplies at once


class Logits(Protocol):
    """Where the host has the logits of a sequence from."""

    def queue(self, tokens: Sequence[int]) -> None:
        """Have the logits of what follows `tokens`. The cache held the first of them, then it holds them all."""

    def take(self) -> NDArray[np.float32]:
        """The logits [V] that were asked for, until the next step."""


class Decoder:
    """Draws the tokens of one reply after another, from the first `size` tokens of the vocabulary of one model, over
    one cache."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        size: int,
        drafters: Sequence[Drafter] = (),
        most: int = MOST_DRAFTS,
    ) -> None:
        """`drafters` propose up to `most` tokens at a time."""
        self.model = model  # or one of the same weights with other adapters and embeddings
        self._cache, self._size = cache, size
        self._step_logits = StepLogits(model, cache, size)
        self._logits: Logits = self._step_logits
        self._steps: DeviceSteps | None = None
        self._device: DeviceDecoder | None = None
        self._sources = [Source(drafter, Pace(most)) for drafter in drafters]
        self._drafts = PacedDrafts()

    @property
    def speculated(self) -> Speculated:
        """What drafts did for the last reply."""
        return self._drafts.statistics

    def begin(self, chooser: Chooser, longest: int) -> None:
        """A reply begins, with which the sequence has `longest` tokens at most."""
        self._step_logits.model = self.model
        self._device, self._logits, self._drafts = None, self._step_logits, PacedDrafts()
        alike = rounds_alike(self.model)
        sources = [source for source in self._sources if alike and source.drafter.begin(chooser)]
        counts = penalties.active(chooser.sampling)  # of the tokens, one by one: a device can have no drafts among them
        models = any(source.drafter.is_model for source in sources)
        if chooser.plain and not (counts and models) and runs_on_device(self.model, self._size):
            self._drafts = PacedDrafts(() if counts else sources)
            self._steps = self._steps or DeviceSteps(self.model, self._cache, self._size)
            self._steps.model = self.model
            self._device = DeviceDecoder(self._steps, self._cache, chooser.sampling, longest, self._drafts)
        elif sources:
            self._drafts = PacedDrafts(sources)
            self._logits = SpeculativeLogits(self._step_logits, self._cache, self._drafts, longest)

    def next(self, chooser: Chooser) -> int:
        """The token after those of `chooser`, with which the reply began. The cache held the first of them, then it
        holds them all. ChatError when the logits are not numbers, or no token may come next."""
        if self._device is not None:
            if chooser.on_device and chooser.tokens[-1] < self._size:
                return self._device.next(chooser.tokens)
            self._device.interrupt()
        self._logits.queue(chooser.tokens)
        chooser.prepare()  # while a GPU works
        return chooser.draw(self._logits.take()[np.newaxis])
