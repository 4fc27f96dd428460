"""Which loads were asked for, and what the engine holds by what it told."""

from collections import deque
from typing import Literal

from exl2chat.chat.recall import whole_path
from exl2chat.link.protocol import Load, Ready
from exl2chat.settings import LAYERS, OPTIONS, Settings

OF_A_LOAD = frozenset(row.name for row in OPTIONS if row.group == "model")


class Loads:
    """The loads of one engine. Each ends with Ready or Failed, in the order in which they were sent.

    When a load fails before the model there was is given up, a Ready of that model with 0 seconds follows the Failed.
    """

    def __init__(self) -> None:
        self.wanted: Load | None = None
        self.held: Settings | None = None  # those by which the model was loaded that answers
        self._pending: deque[Settings] = deque()
        self._failed = False  # the last outcome was Failed, and no load was sent since

    def begin(self, settings: Settings) -> Load:
        """The request for the model of `settings`, which is now the wanted one."""
        self.wanted, self._failed = load_request(settings), False
        self._pending.append(settings)
        return self.wanted

    def fail(self) -> bool:
        """A load failed. Whether it was the last one asked for."""
        self._failed = True
        if self._pending:
            self._pending.popleft()
        return not self._pending

    def take(self, event: Ready) -> Literal["new", "kept", "outdated"]:
        """What `event` tells: the wanted model is there, or still the one before, or another load is to follow."""
        kept = self._failed and self.held is not None and event.seconds == 0.0
        self._failed = False
        if not kept and self._pending:
            self.held = self._pending.popleft()
        if self._pending:
            return "outdated"
        self.wanted = load_request(self.held) if self.held else None
        return "kept" if kept else "new"

    def forget(self) -> None:
        """The engine died: it holds nothing and answers no load."""
        self.held, self._failed = None, False
        self._pending.clear()


def load_request(settings: Settings) -> Load:
    """What is to be loaded by `settings`."""
    names = ("device", "dtype", "context", "cache", "draft_model", "speculate")
    return Load(whole_path(settings["model"]), **{name: settings[name] for name in names})


def put_back(settings: Settings, held: Settings) -> Settings:
    """`settings` with all that a load depends on as it is in `held`, layer by layer."""
    return Settings(
        {
            origin: {
                **{name: value for name, value in settings.layers.get(origin, {}).items() if name not in OF_A_LOAD},
                **{name: value for name, value in held.layers.get(origin, {}).items() if name in OF_A_LOAD},
            }
            for origin in LAYERS
        }
    )
