"""How the next token of a sequence comes about: here it is decided whether the host draws it, or the GPU by itself."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from exl2chat.engine.cache import KVCache
from exl2chat.engine.choosing import Chooser, Limits
from exl2chat.engine.device_decoder import DeviceDecoder
from exl2chat.engine.device_steps import DeviceSteps
from exl2chat.engine.samplers.vocabulary import Vocabulary
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


class HostDecoder:
    """One step at a time, its logits brought to the host."""

    def __init__(self, model: Transformer, cache: KVCache, chooser: Chooser, host: torch.Tensor) -> None:
        """Draws from the first len(host) tokens. `host` float32 is where logits from a GPU go, in pinned memory."""
        self._model, self._cache, self.chooser, self._host = model, cache, chooser, host

    @property
    def seed(self) -> int:
        return self.chooser.seed

    def next(self, tokens: Sequence[int]) -> int:
        self._cache.truncate(len(tokens) - 1)
        missing = torch.tensor(tokens[self._cache.length :], dtype=torch.int64, device=self._model.device)
        logits = self._model.forward(missing, self._cache, last_only=True)[-1]
        self.chooser.prepare(len(tokens))  # while a GPU works
        return self.chooser.choose(self._on_host(logits[: len(self._host)]), len(tokens))

    def _on_host(self, logits: torch.Tensor) -> NDArray[np.float32]:
        if not logits.is_cuda:
            return logits.numpy()
        self._host.copy_(logits, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return self._host.numpy()


class Decoders:
    """The decoders of one model over one cache, which draw from the first `size` tokens of the vocabulary."""

    def __init__(self, model: Transformer, cache: KVCache, vocabulary: Vocabulary, size: int) -> None:
        self.model = model  # or one of the same weights with other adapters
        self._cache, self._vocabulary, self._size = cache, vocabulary, size
        self._host = torch.empty(size, pin_memory=model.device.type == "cuda")
        self._steps: DeviceSteps | None = None

    def choose(self, settings: Sampling, tokens: Sequence[int], longest: int, limits: Limits | None = None) -> Decoder:
        """That of a reply to the prompt `tokens`, with which the sequence has `longest` tokens at most.

        With `limits`, empty ones too, the host draws: whoever gives them wants to know or to say more than a GPU does.
        """
        if limits is None and runs_on_device(self.model, self._size) and known_to_device(settings):
            self._steps = self._steps or DeviceSteps(self.model, self._cache, self._size)
            return DeviceDecoder(self._steps, self._cache, settings, longest)
        chooser = Chooser(settings, tokens, self._vocabulary, limits)
        return HostDecoder(self.model, self._cache, chooser, self._host)


def runs_on_device(model: Transformer, size: int) -> bool:
    """Whether the steps of `model` are recorded, and kernels/sample.cu can draw from `size` tokens."""
    return model.device.type == "cuda" and model.recorded_rows > 0 and size <= MOST_TOKENS


def known_to_device(settings: Sampling) -> bool:
    """Whether nothing is set that only the host can do."""
    return settings == Sampling(**{name: getattr(settings, name) for name in ON_DEVICE})
