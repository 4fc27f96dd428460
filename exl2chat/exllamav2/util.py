"""Small things that scripts for exllamav2 use."""

import time
from typing import Self


class Timer:
    """Measures the seconds of a with block, its `interval`."""

    interval = 0.0

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *raised: object) -> None:
        self.interval = time.perf_counter() - self._start
