"""How the next token of a sequence comes about: here it is decided whether the host draws it, or the GPU by itself."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from exl2chat.engine.cache import KVCache
from exl2chat.engine.choosing import Chooser, Limits
from exl2chat.engine.device_decoder import DeviceDecoder
from exl2chat.engine.device_steps import DeviceSteps
from exl2chat.engine.drafting import Drafter
from exl2chat.engine.pace import Pace
from exl2chat.engine.samplers.vocabulary import Vocabulary
from exl2chat.engine.speculation import Speculated, SpeculativeLogits
from exl2chat.engine.step_logits import StepLogits
from exl2chat.engine.transformer import Transformer
from exl2chat.ops.sample import MOST_TOKENS
from exl2chat.settings import Sampling

# What kernels/sample.cu knows of `Sampling`. With any other field set the host samples.
ON_DEVICE = frozenset(
    (
        "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "frequency_penalty",
        "presence_penalty", "penalty_range", "penalty_decay",
    )
)  # fmt: skip


MOST_DRAFTS = 7  # with the token before them 8 rows, as many as kernels/gemv.cu multiplies at once


class Decoder(Protocol):
    """Draws the tokens of one reply."""

    @property
    def seed(self) -> int:
        """What reproduces them."""

    @property
    def chooser(self) -> Chooser | None:
        """What chooses them, if it is the host."""

    def next(self, tokens: Sequence[int]) -> int:
        """The token after `tokens`. The cache held the first of them, then it holds them all.

        With a chooser, `tokens` may be fewer than it has chosen: some were taken back. ChatError when the logits are
        not numbers.
        """


class Logits(Protocol):
    """Where the host has the logits of a sequence from."""

    def queue(self, tokens: Sequence[int]) -> None:
        """Have the logits of what follows `tokens`. The cache held the first of them, then it holds them all."""

    def take(self) -> NDArray[np.float32]:
        """The logits [V] that were asked for, until the next step."""


class HostDecoder:
    """Every token drawn by the host, from logits that are brought there."""

    def __init__(self, logits: Logits, chooser: Chooser) -> None:
        self._logits, self.chooser = logits, chooser

    @property
    def seed(self) -> int:
        return self.chooser.seed

    def next(self, tokens: Sequence[int]) -> int:
        self._logits.queue(tokens)
        self.chooser.prepare(len(tokens))  # while a GPU works
        return self.chooser.choose(self._logits.take(), len(tokens))


class Decoders:
    """The decoders of one model over one cache, which draw from the first `size` tokens of the vocabulary."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        vocabulary: Vocabulary,
        size: int,
        drafter: Drafter | None = None,
        most: int = MOST_DRAFTS,
    ) -> None:
        """`drafter` proposes up to `most` tokens at a time; then the host draws."""
        self.model = model  # or one of the same weights with other adapters and embeddings
        self._cache, self._vocabulary, self._size = cache, vocabulary, size
        self._logits = StepLogits(model, cache, size)
        self._steps: DeviceSteps | None = None
        self._drafter, self._pace = drafter, Pace(most)
        self._speculation: SpeculativeLogits | None = None

    @property
    def speculated(self) -> Speculated:
        """What drafts did for the last reply."""
        return self._speculation.statistics if self._speculation else Speculated()

    def choose(self, settings: Sampling, tokens: Sequence[int], longest: int, limits: Limits | None = None) -> Decoder:
        """That of a reply to the prompt `tokens`, with which the sequence has `longest` tokens at most.

        With `limits`, empty ones too, the host draws: whoever gives them wants to know or to say more than a GPU does.
        """
        if (
            self._drafter is None
            and limits is None
            and runs_on_device(self.model, self._size)
            and known_to_device(settings)
            and tokens[-1] < self._size
        ):
            self._steps = self._steps or DeviceSteps(self.model, self._cache, self._size)
            self._steps.model = self.model
            return DeviceDecoder(self._steps, self._cache, settings, longest)
        chooser = Chooser(settings, tokens, self._vocabulary, limits)
        self._logits.model = self.model
        if self._drafter is None:
            return HostDecoder(self._logits, chooser)
        self._drafter.begin(chooser.guess)
        self._speculation = SpeculativeLogits(self._logits, self._cache, self._drafter, self._pace, longest)
        return HostDecoder(self._speculation, chooser)


def runs_on_device(model: Transformer, size: int) -> bool:
    """Whether the steps of `model` are recorded, and kernels/sample.cu can draw from `size` tokens."""
    return model.device.type == "cuda" and model.recorded_rows > 0 and size <= MOST_TOKENS


def known_to_device(settings: Sampling) -> bool:
    """Whether nothing is set that only the host can do."""
    return settings == Sampling(**{name: getattr(settings, name) for name in ON_DEVICE})
