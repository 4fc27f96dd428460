"""Small things that scripts for exllamav2 use."""

import time
from dataclasses import dataclass
from typing import NamedTuple, Self

from torch import Tensor


class Timer:
    """Measures the seconds of a with block, its `interval`."""

    interval = 0.0

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *raised: object) -> None:
        self.interval = time.perf_counter() - self._start


@dataclass(frozen=True, slots=True)
class SeqTensor:
    """Ids of a job."""

    ids: Tensor

    def torch(self) -> Tensor:
        """int64 [1, n]."""
        return self.ids


class JobSequence(NamedTuple):
    """One of the texts that a job continues."""

    input_ids: SeqTensor
