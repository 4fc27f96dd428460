"""When a reply ends: stop ids, stop strings and the text held back while one may be forming. Pure Python."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from exl2chat.errors import UsageError

StopReason = Literal["eos", "stop_string", "max_tokens", "context", "stopped"]


class StopConditionError(UsageError, ValueError):
    """A stop condition that is neither a token id nor a string of at least one character."""


@dataclass(frozen=True, slots=True)
class StopConditions:
    """Token ids and strings that end a reply. Neither appears in its text."""

    ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()

    @classmethod
    def of(cls, conditions: Iterable[object]) -> "StopConditions":
        """From a mixture of ids and strings; StopConditionError (a ValueError) on anything else and on "".

        One string alone is refused too: its characters would each become a stop string.
        """
        if isinstance(conditions, str) or not isinstance(conditions, Iterable):
            raise StopConditionError(
                f"stop conditions are a list, not {conditions!r:.40}", f"write [{conditions!r:.40}]"
            )
        ids: set[int] = set()
        strings: dict[str, None] = {}
        for condition in conditions:
            if isinstance(condition, str) and condition:
                strings[condition] = None
            elif isinstance(condition, int) and not isinstance(condition, bool):
                ids.add(condition)
            else:
                raise StopConditionError(f"{condition!r} cannot end a reply", "give token ids and non-empty strings")
        return cls(frozenset(ids), tuple(strings))


class StopStrings:
    """Finds stop strings in text that arrives in pieces; what may still become one is held back.

    However the text is cut into pieces, the result is that of feeding single characters: the stop string completed
    first ends the text, the longest of those completed by the same character.
    """

    def __init__(self, strings: Collection[str]) -> None:
        self._strings = tuple(strings)
        self._longest = max(map(len, self._strings), default=0)
        self.held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that is now certain to precede any stop string. Sets `found` when one is complete."""
        text = self.held + text
        self.held = ""
        matches = [(at + len(stop), at, stop) for stop in self._strings if (at := text.find(stop)) >= 0]
        if matches:
            _, at, self.found = min(matches)
            return text[:at]
        keep = self._partial(text)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _partial(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._strings):
                return length
        return 0

    def flush(self) -> str:
        """The held text: no more is coming, so it was no stop string."""
        text, self.held = self.held, ""
        return text
