"""Where the host's logits come from: a step of the model for every token."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from exl2chat.engine.cache import KVCache
from exl2chat.engine.transformer import Transformer


class StepLogits:
    """The logits of one model over one cache, brought to the host."""

    def __init__(self, model: Transformer, cache: KVCache, size: int) -> None:
        """Those of the first `size` ids."""
        self.model = model  # or one of the same weights with other adapters and embeddings
        self._cache, self._size = cache, size
        self._host = torch.empty(size, pin_memory=model.device.type == "cuda")
        self._row = self._host

    def queue(self, tokens: Sequence[int]) -> None:
        """Compute the logits of what follows `tokens`. The cache held the first of them, then it holds them all."""
        self._row = self.rows(tokens, ())[-1]

    def take(self) -> NDArray[np.float32]:
        """The logits [V] that were queued, until the next step."""
        return self.on_host(self._row)

    def rows(self, tokens: Sequence[int], drafts: Sequence[int]) -> torch.Tensor:
        """The logits [1 + k, V] of what follows `tokens` and each of the k `drafts` behind them.

        The cache has room for all. It then holds `tokens`; what it would hold of the drafts lies behind its end.
        """
        self._cache.truncate(len(tokens) - 1)
        ids = [*tokens[self._cache.length :], *drafts]
        logits = self.model.forward(self.model.inputs(ids), self._cache, last_only=not drafts)
        self._cache.truncate(len(tokens))
        return logits[-1 - len(drafts) :, : self._size]

    def on_host(self, logits: torch.Tensor) -> NDArray[np.float32]:
        """A row of them, until the next call."""
        if not logits.is_cuda:
            return logits.numpy()
        self._host.copy_(logits, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return self._host.numpy()
