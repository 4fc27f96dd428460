"""Functions that see a token when it was sampled, and may change it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from exl2chat.engine.replies.jobs import Choice


@dataclass(slots=True)
class ExLlamaV2PostSamplingResult:
    """One draw: sampled_token int64 [1, 1] and its probability [1, 1], the candidates int64 [1, 1, n] with theirs, the
    likeliest first, and the logits float32 [1, 1, V]. A hook may set `sampled_token`, and `feed_filters` to False so
    that the filters do not hear of it."""

    sampled_token: Tensor
    sampled_prob: Tensor
    candidate_tokens: Tensor
    candidate_probs: Tensor
    logits: Tensor
    feed_filters: bool = True


class ExLlamaV2PostSamplingHook:
    """What a hook of the user may extend; any function of the result is one too."""

    def __call__(self, result: ExLlamaV2PostSamplingResult) -> None:
        """A token was sampled."""


def engine_hook(hook: Callable[[ExLlamaV2PostSamplingResult], object]) -> Callable[[Choice], None]:
    """The hook as the engine calls it."""

    def call(choice: Choice) -> None:
        logits, ids = choice.candidates
        order = np.argsort(-logits, kind="stable")
        probabilities = torch.softmax(torch.from_numpy(logits[order]), 0)
        tokens = torch.from_numpy(ids[order])
        result = ExLlamaV2PostSamplingResult(
            torch.tensor([[choice.token]]),
            probabilities[tokens == choice.token].sum().view(1, 1),
            tokens.view(1, 1, -1),
            probabilities.view(1, 1, -1),
            torch.from_numpy(choice.logits.copy()).view(1, 1, -1),
            choice.fed,
        )
        hook(result)
        choice.token, choice.fed = int(result.sampled_token), result.feed_filters

    return call
