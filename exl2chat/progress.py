"""How long work tells how far it is."""

from typing import Protocol


class Progress(Protocol):
    """Called now and then during work that may take over a second; `total` 0 means unknown."""

    def __call__(self, stage: str, done: int = 0, total: int = 0, unit: str = "") -> None: ...


def silent(stage: str, done: int = 0, total: int = 0, unit: str = "") -> None:
    """A Progress nobody watches."""
