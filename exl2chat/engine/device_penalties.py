"""The window of the penalties on the device, as kernels/penalties.cuh counts on from it."""

from typing import NamedTuple

import torch
from torch import Tensor

UNSEEN = -1


class DeviceWindow(NamedTuple):
    """What `penalties.PenaltyWindow` has counted, by token and not by slot.

    seen int32 [V + 1, 4]: occurrences at full strength, those that fade, the latest position or UNSEEN, and nothing;
    positions int64 [V + 1]: the sum of the positions that fade; history int32 [longest]: the tokens by position. What
    is no token counts as token V, which nothing draws.
    """

    seen: Tensor
    positions: Tensor
    history: Tensor


def count_window(tokens: Tensor, reach: int, decay: int, vocabulary: int, longest: int) -> DeviceWindow:
    """The window after `tokens` (int64 [n]), with a history that has room for `longest` tokens."""
    tokens, vocabulary = tokens.clamp(max=vocabulary), vocabulary + 1
    count = len(tokens)
    full = max(0, count - reach) if reach >= 0 else 0
    fading = max(0, full - decay) if reach >= 0 else 0
    places = torch.arange(count, device=tokens.device)
    seen = torch.zeros(vocabulary, 4, dtype=torch.int32, device=tokens.device)
    seen[:, 0] = torch.bincount(tokens[full:], minlength=vocabulary)
    seen[:, 1] = torch.bincount(tokens[fading:full], minlength=vocabulary)
    latest = torch.full((vocabulary,), UNSEEN, device=tokens.device)
    seen[:, 2] = latest.scatter_reduce_(0, tokens, places, "amax")
    positions = torch.zeros(vocabulary, dtype=torch.int64, device=tokens.device)
    positions.index_add_(0, tokens[fading:full], places[fading:full])
    history = torch.zeros(longest, dtype=torch.int32, device=tokens.device)
    history[:count] = tokens
    return DeviceWindow(seen, positions, history)
