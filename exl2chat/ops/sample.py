"""Tokens drawn on the GPU: the launch of kernels/sample.cu, and the memory that it works in."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from exl2chat import kernels

# The structs of kernels/sample.cuh
ROW = np.dtype(
    [("seed", np.uint64)]
    + [(name, np.float64) for name in ("repetition", "presence", "frequency", "top_p")]
    + [(name, np.uint64) for name in ("position", "token", "results", "seen", "positions", "history")]
    + [(name, np.float32) for name in ("temperature", "least")]
    + [(name, np.int32) for name in ("top_k", "greedy", "reach", "decay", "mask", "unused")]
)
PROBLEM = np.dtype(
    [(name, np.uint64) for name in ("rows", "logits", "scores", "list", "picks", "shared")]
    + [(name, np.int32) for name in ("count", "stride")]
)
PICK_BYTES = 16
SHARED_BYTES = 16 + 32 + 1024 * (4 + 8)
THREADS = 512
PER_BLOCK = 2 * THREADS
MOST_TOKENS = 1 << 20


class TokenSampler:
    """Draws a token for each of up to `rows` sequences at once, each by its own `ROW`, from up to MOST_TOKENS."""

    def __init__(self, device: torch.device, vocabulary: int, rows: int = 1) -> None:
        blocks = self._blocks = -(-vocabulary // PER_BLOCK)
        self._kernels = [kernels.load("sample.cu", name, device) for name in ("score", "weigh", "sift")]
        self._draw = kernels.load("sample.cu", "draw", device)
        self._memory = {
            "rows": torch.zeros(rows, ROW.itemsize, dtype=torch.uint8, device=device),
            "scores": torch.empty(rows, vocabulary, device=device),
            "list": torch.empty(rows, vocabulary, dtype=torch.int64, device=device),
            "picks": torch.empty(rows, blocks, PICK_BYTES, dtype=torch.uint8, device=device),
            "shared": torch.zeros(rows, SHARED_BYTES, dtype=torch.uint8, device=device),
        }
        self._problem = np.zeros((), PROBLEM)
        self._problem["count"] = vocabulary
        for name, tensor in self._memory.items():
            self._problem[name] = tensor.data_ptr()

    def set_rows(self, rows: NDArray[np.void]) -> None:
        """Draw by `rows` of `ROW`, as many as there can be, from the next step on that is queued."""
        self._memory["rows"].copy_(torch.from_numpy(rows.reshape(-1, 1).view(np.uint8)))

    def queue(self, logits: Tensor) -> None:
        """Draw from logits [R, at least vocabulary] float32, once they are there; the first R rows say where to."""
        self._problem["logits"], self._problem["stride"] = logits.data_ptr(), logits.stride(0)
        rows = logits.shape[0]
        for kernel in self._kernels:
            kernel.launch((self._blocks, rows), THREADS, 0, self._problem)
        self._draw.launch((1, rows), THREADS, 0, self._problem, self._blocks)
