"""System calls that fail, or never return, at a chosen moment."""

import os
from collections.abc import Callable
from errno import ENOSPC
from typing import Any

import pytest

CALLS = ("open", "write", "fdatasync", "fsync", "ftruncate", "fstat")


class FailingDisk:
    """Counts the calls the session file makes; the ones whose number is in `failing` raise `errno`.

    A failing write leaves its first half in the file when the disk is full.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: range, errno: int) -> None:
        self.calls = 0
        self._failing = failing
        self._errno = errno
        for name in CALLS:
            monkeypatch.setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls not in self._failing:
                return real(*args, **kwargs)
            if name == "write" and self._errno == ENOSPC:
                real(args[0], args[1][: len(args[1]) // 2])
            raise OSError(self._errno, os.strerror(self._errno))

        return call


def at_call(number: int, happen: Callable[[], None]) -> None:
    """Have `happen` called before call `number`, for the rest of this process."""
    calls = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                happen()
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
