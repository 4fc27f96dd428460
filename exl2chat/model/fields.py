"""Typed, ranged reading of a table of untrusted values. Null counts as absent, as in every config of transformers."""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from exl2chat.errors import ModelError

_REMEDY = "mend the file or download the model again"


@dataclass(frozen=True, slots=True)
class Fields:
    """`values` of the file or table `where`. Every reader raises ModelError naming the field and what it may be."""

    where: str
    values: Mapping[str, Any]

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def wrong(self, name: str, expected: str) -> ModelError:
        """The error for a field that is missing or is not `expected`."""
        if name not in self:
            return ModelError(f"{self.where}: {name} is missing", f"it is {expected}; {_REMEDY}")
        return ModelError(f"{self.where}: {name} is {reprlib.repr(self.values[name])}, not {expected}", _REMEDY)

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number in [low, high]; required unless there is a default."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(name, f"a whole number from {low} to {high}")
        return value

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        """`integer`, or None where the field is absent."""
        return self.integer(name, low, high) if name in self else None

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in [low, high]; required unless there is a default."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not _is_number(value) or not low <= value <= high:
            raise self.wrong(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def optional_number(self, name: str, low: float, high: float) -> float | None:
        """`number`, or None where the field is absent."""
        return self.number(name, low, high) if name in self else None

    def flag(self, name: str, default: bool) -> bool:
        """True or false; `default` where absent."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str = "") -> str:
        """A string; `default` where absent."""
        value = self.values.get(name, default)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, "text")
        return value

    def strings(self, name: str) -> list[str]:
        """A list of strings; required."""
        value = self.values.get(name)
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, "a list of names")
        return value

    def table(self, name: str) -> "Fields":
        """The fields of a nested table; none where it is absent."""
        value = self.values.get(name)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.wrong(name, "a table")
        return Fields(f"{self.where}: {name}", value)

    def numbers(self, name: str, count: int, low: float, high: float) -> tuple[float, ...]:
        """Exactly `count` finite numbers in [low, high]; required."""
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) != count:
            raise self.wrong(name, f"a list of {count} numbers")
        if not all(_is_number(item) and low <= item <= high for item in value):
            raise self.wrong(name, f"{count} numbers from {low:g} to {high:g}")
        return tuple(float(item) for item in value)

    def ids(self, name: str, vocab_size: int) -> list[int]:
        """A token id or a list of them, each below `vocab_size`; [] where absent."""
        value = self.values.get(name)
        if value is None:
            return []
        ids = value if isinstance(value, list) else [value]
        if not all(type(item) is int and 0 <= item < vocab_size for item in ids):
            raise self.wrong(name, f"a token id below {vocab_size}, or a list of them")
        return ids


def _is_number(value: Any) -> TypeGuard[int | float]:
    return type(value) in (int, float)
