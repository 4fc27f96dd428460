"""What a reply must be, as users say it: a JSON schema, a regular expression, a grammar; the text itself or a file."""

import json
import os
from pathlib import Path
from typing import Literal

from exl2chat.chat.session import storable
from exl2chat.errors import UsageError
from exl2chat.link.protocol import Form
from exl2chat.paths import read_file

Kind = Literal["json", "regex", "grammar"]
MEANING = {
    "json": "JSON of this schema",
    "regex": "what this regular expression matches as a whole",
    "grammar": "sentences of this grammar",
}
FORMS = {"json": "JSON schema", "regex": "regular expression", "grammar": "grammar"}
LARGEST = 4 << 20  # bytes of a file


def form_of(kind: Kind, argument: str) -> Form:
    """`argument` is the schema, expression or grammar, or, but for an expression, names the file that holds it.

    UsageError naming file and place where it cannot be read, is not JSON or no regular expression. The engine says
    whether it can be followed.
    """
    if not argument.strip():
        raise UsageError(f"the {FORMS[kind]} is empty", "give one")
    if kind == "regex" or _is_itself(kind, argument):
        if argument != storable(argument):
            raise UsageError(f"the {FORMS[kind]} holds a NUL or is not UTF-8", "take that out")
        form = Form(kind, argument)
    else:
        form = Form(kind, _read(kind, argument), storable(argument))
    if kind == "json":
        _check_json(form)
    elif kind == "regex":
        _check_regex(form)
    return form


def _is_itself(kind: Kind, argument: str) -> bool:
    """Whether `argument` is no name of a file: an object, if a misspelt one, or `true`, or rules with their colons."""
    if kind == "json" and (argument.lstrip().startswith("{") or argument.strip() in ("true", "false")):
        return True
    return ("{" if kind == "json" else ":") in argument and not os.path.exists(os.path.expanduser(argument))


def _read(kind: Kind, name: str) -> str:
    try:
        data = read_file(Path(os.path.expanduser(name)), LARGEST)
    except (OSError, ValueError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else "no name of a file"
        itself = "which begins with {" if kind == "json" else "with the colons of its rules"
        raise UsageError(f"{name:.200}: {reason}", f"give a file, or the {FORMS[kind]} itself, {itself}") from None
    try:
        return data.decode()
    except UnicodeDecodeError as fault:
        line = data.count(b"\n", 0, fault.start) + 1
        raise UsageError(f"{name:.200}: line {line} is not UTF-8 text", "save the file as UTF-8") from None


def _check_json(form: Form) -> None:
    where = form.source or "JSON schema"
    try:
        schema = json.loads(form.text)
    except json.JSONDecodeError as fault:
        place = f"line {fault.lineno}, column {fault.colno}"
        raise UsageError(f"{where:.200}: {place}: {fault.msg}", "it is not JSON") from None
    except (RecursionError, ValueError):
        raise UsageError(f"{where:.200}: nested too deeply, or with a number too long", "use a plainer one") from None
    if not isinstance(schema, dict | bool):
        raise UsageError(f"{where:.200}: this JSON is no schema", "a schema is an object, or true or false")


def _check_regex(form: Form) -> None:
    from llguidance import LLMatcher  # it takes 50 ms to import, and few chats use it

    from exl2chat.expressions import regex_as_lark, regex_reason

    if fault := LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(regex_as_lark(form.text))):
        raise UsageError(f"regular expression{regex_reason(fault)}", "correct it or use something simpler")
