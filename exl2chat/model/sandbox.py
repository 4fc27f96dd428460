"""Chat templates run by minijinja, bounded.

A template is a program by a stranger. minijinja has no way to Python objects, counts its steps (fuel) and is given
nothing but strings, lists and dicts. The dialect is that of transformers' chat templates: trim_blocks, lstrip_blocks,
loop controls, `{% generation %}` (no effect when prompting), raise_exception, strftime_now and a tojson that does not
escape HTML. What a library cannot bound, an allocation that aborts the process, is met by `exl2chat.model.vet`.
"""

import json
import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import minijinja

from exl2chat.errors import ModelError

MAX_SOURCE = 1 << 20
MAX_OUTPUT = 8 << 20
FUEL = 500_000
FUEL_PER_MESSAGE = 20_000
MAX_DATE_FORMAT = 100
REMEDY = "use another version of the model, or write a chat_template.jinja beside it"

_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_WIDE = re.compile(r"%[-+ #0]*\d{5,}|%[^a-zA-Z%]*\.\d{5,}|:[^{}]*\d{5,}[^{}]*\}")


class Refusal(Exception):
    """The template called raise_exception: it does not take this conversation."""


class Sandbox:
    """One compiled template. `where` names it in messages. ModelError if it is no valid template."""

    def __init__(self, source: str, where: str) -> None:
        if len(source) > MAX_SOURCE:
            raise ModelError(f"{where}: the chat template is larger than {MAX_SOURCE >> 10} KiB", REMEDY)
        if _WIDE.search(source):
            raise ModelError(f"{where}: the chat template pads to an absurd width", REMEDY)
        self.source = source
        self.where = where
        self._environment = minijinja.Environment(trim_blocks=True, lstrip_blocks=True, fuel=FUEL)
        self._environment.add_filter("tojson", _tojson)
        self._environment.add_test("iterable", _is_iterable)
        self._environment.add_global("raise_exception", _raise_exception)
        self._environment.add_global("strftime_now", _strftime_now)
        try:
            self._environment.add_template("chat", _GENERATION.sub(_without_effect, source))
        except minijinja.TemplateError as fault:
            raise ModelError(f"{where}: the chat template has an error: {_first_line(fault)}", REMEDY) from None

    def render(self, messages: list[dict[str, str]], variables: dict[str, Any]) -> str:
        """The text. Refusal if the template raises an exception of its own, ModelError if it fails."""
        self._environment.fuel = FUEL + FUEL_PER_MESSAGE * len(messages)
        try:
            text = self._environment.render_template("chat", messages=messages, **variables)
        except Refusal:
            raise
        except (minijinja.TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as fault:
            raise ModelError(f"{self.where}: the chat template failed: {_first_line(fault)}", REMEDY) from None
        if len(text) > MAX_OUTPUT:
            raise ModelError(f"{self.where}: the chat template wrote over {MAX_OUTPUT >> 20} MiB", REMEDY)
        return text


def _without_effect(tag: re.Match[str]) -> str:
    """`{% generation %}` as a statement that does nothing and trims white space alike."""
    return f"{{%{tag[1]} {'endif' if tag[2] else 'if true'} {tag[3]}%}}"


def _is_iterable(value: object) -> bool:
    """As in Jinja; minijinja counts none as iterable, and templates ask this of `tools`."""
    return isinstance(value, Iterable)


def _raise_exception(message: str) -> None:
    raise Refusal(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > MAX_DATE_FORMAT:
        raise ValueError("a date format too long to be real")
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=None if indent is None else min(indent, 16),
        separators=None if separators is None else (separators[0], separators[1]),
        sort_keys=sort_keys,
    )


def _first_line(fault: Exception) -> str:
    text = getattr(fault, "message", None) or str(fault) or type(fault).__name__
    return str(text).splitlines()[0][:300]
