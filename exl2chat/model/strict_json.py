"""JSON from strangers: parsed strictly, or refused in one line.

The standard parser accepts duplicate keys (the last wins), NaN and Infinity, numbers that overflow to infinity, and
half surrogate pairs; a checkpoint with any of these is damaged, or made to be read differently by two programs.
"""

import json
import math
import re
from typing import Any, Never

from exl2chat.errors import ModelError

MAX_DEPTH = 64
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `data` (UTF-8). ModelError naming `where` for anything else."""
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_constant, parse_float=_finite
        )
    except UnicodeDecodeError as fault:
        raise _damaged(where, f"is not UTF-8 at byte {fault.start}") from None
    except json.JSONDecodeError as fault:
        raise _damaged(where, f"is not JSON: {fault.msg} at line {fault.lineno}, column {fault.colno}") from None
    except RecursionError:
        raise _damaged(where, f"is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as fault:
        raise _damaged(where, f"is not JSON we accept: {fault}") from None
    if not isinstance(value, dict):
        raise _damaged(where, "is not a JSON object")
    if not _shallow(value):
        raise _damaged(where, f"is nested deeper than {MAX_DEPTH} levels")
    if _SURROGATE.search(data) and not _is_text(value):
        raise _damaged(where, "has half a surrogate pair in a text")
    return value


def _damaged(where: str, what: str) -> ModelError:
    return ModelError(f"{where}: {what}", "the file is damaged; download the model again")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice[:40]!r} is there twice")
    return table


def _constant(name: str) -> Never:
    raise ValueError(f"{name} is not a number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large")
    return value


def _shallow(value: Any) -> bool:
    """Whether `value` nests at most MAX_DEPTH levels; breadth first, so that its own depth cannot hurt."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [child for node in level for child in (node.values() if isinstance(node, dict) else node)]
        level = [child for child in inner if isinstance(child, dict | list)]
        if not level:
            return True
    return False


def _is_text(value: Any) -> bool:
    """Whether every string in `value` can be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
