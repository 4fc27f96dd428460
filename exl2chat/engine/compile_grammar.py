"""Schemas, expressions and grammars to constraints. UsageError, with the place, for what cannot be followed exactly."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from exl2chat.engine.grammar import GrammarConstraint
from exl2chat.engine.token_table import TokenTable
from exl2chat.errors import UsageError
from exl2chat.expressions import PARSE_ERROR, check_text, regex_as_lark, regex_reason

Schema = dict[str, Any]

# JSON Schema keywords whose value is a schema, a list of schemas, or a table of them.
SCHEMAS = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else", "propertyNames")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
TABLES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

# Otherwise, where only one text can follow, masks allow only one way to tokenise it.
EVERY_SPELLING = '\n%llguidance {"no_forcing": true}\n'

# A space, or a new line with its indentation. Without a bound a small model may write white space for ever.
WHITE_SPACE = r"[ \t]|\r?\n[ \t]{0,64}"

GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
LARK_ERROR = re.compile(r"(?:at )?(?P<line>\d+)\((?P<column>\d+)\): (?P<reason>.*)")


def compile_json_schema(table: TokenTable, schema: str | Schema | bool) -> GrammarConstraint:
    """Replies that are JSON of `schema`, its text or what that parses to, with white space as `json.dumps` writes it or
    as the schema's own `x-guidance` says."""
    parsed = _parse(schema)
    if parsed is True:
        parsed = {}
    if not isinstance(parsed, dict):
        raise UsageError(f"JSON schema: {json.dumps(parsed):.40} allows nothing", 'write a table: {"type": "object"}')
    options = _options(parsed)
    spaced = {} if "whitespace_flexible" in options else {"whitespace_pattern": WHITE_SPACE}
    strict = {**parsed, "x-guidance": {**spaced, **options, "lenient": False}}
    if fault := _schema_fault(strict):
        place = _place(strict, strict, fault) or "/"
        raise UsageError(f"JSON schema, at {place:.200}: {_one_line(fault)}", "take it out or say it in another way")
    return _constraint(table, f"start: %json {json.dumps(strict)}", "JSON schema", _lark_reason)


def compile_regex(table: TokenTable, pattern: str) -> GrammarConstraint:
    """Replies that `pattern` matches from first to last character. Syntax of the Rust crate regex, no look-around."""
    return _constraint(table, regex_as_lark(pattern), "regular expression", regex_reason)


def compile_grammar(table: TokenTable, text: str) -> GrammarConstraint:
    """Replies of a grammar in llguidance's dialect of Lark, or in GBNF as llama.cpp has it."""
    check_text("grammar", text)
    if not GBNF_RULE.search(text):
        return _constraint(table, text, "grammar", _lark_reason)
    try:
        lark = gbnf_to_lark(text)
    except Exception as fault:  # the converter raises what it likes
        raise UsageError(f"GBNF grammar: {_one_line(str(fault))}", "see llama.cpp's guide to GBNF") from None
    return _constraint(table, lark, "GBNF grammar", _lark_reason)


def compile_choice(table: TokenTable, options: Sequence[str], ignore_case: bool = False) -> GrammarConstraint:
    """Replies that are one of `options`."""
    if not options or not all(options):
        raise UsageError("a choice needs options, each of at least one character", "give them")
    check_text("choice", *options)
    lark = "start: OPTION\nOPTION: " + " | ".join(lark_string(option) + "i" * ignore_case for option in options)
    return _constraint(table, lark, "choice", _lark_reason)


def lark_string(text: str) -> str:
    """`text` as a terminal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _constraint(table: TokenTable, lark: str, kind: str, reason: Callable[[str], str]) -> GrammarConstraint:
    matcher = LLMatcher(table.library, LLMatcher.grammar_from_lark(lark + EVERY_SPELLING), log_level=0)
    if matcher.is_error():
        raise UsageError(f"{kind}{reason(matcher.get_error())}", "correct it or use something simpler")
    if warnings := matcher.get_grammar_warnings():
        raise UsageError(f"{kind}: {warnings[0]}", "what can only be followed in part is not followed at all")
    return GrammarConstraint(table, matcher)


def _parse(schema: str | Schema | bool) -> object:
    """The schema as plain JSON values."""
    try:
        return json.loads(schema if isinstance(schema, str) else json.dumps(schema))
    except json.JSONDecodeError as fault:
        place = f"line {fault.lineno}, column {fault.colno}"
        raise UsageError(f"JSON schema, {place}: {fault.msg}", "it is not JSON") from None
    except RecursionError:
        raise UsageError("JSON schema: nested too deeply", "use a flatter one") from None
    except (TypeError, ValueError) as fault:
        raise UsageError(f"JSON schema: {fault}", "it is not JSON") from None


def _options(schema: Schema) -> Schema:
    """The schema's own settings of the library, as `{"whitespace_flexible": false}`."""
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict):
        raise UsageError("JSON schema, at /x-guidance: not a table", "take it out")
    return options


def _schema_fault(schema: Schema) -> str:
    """Why a schema cannot be followed; "" if it can."""
    try:
        fault: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    except ValueError as error:
        fault = str(error)
    return fault


def _place(schema: Schema, root: Schema, fault: str) -> str:
    """JSON pointer to the smallest part of a schema that has the same fault by itself."""
    shared: Schema = {key: root[key] for key in ("$defs", "definitions") if key in root}
    for pointer, child in _parts(schema):
        if _schema_fault({**shared, **child}) == fault:
            return pointer + _place(child, root, fault)
    return ""


def _parts(schema: Schema) -> Iterator[tuple[str, Schema]]:
    for key, value in schema.items():
        if key in SCHEMAS and isinstance(value, dict):
            yield f"/{key}", value
        elif key in LISTS and isinstance(value, list):
            yield from ((f"/{key}/{n}", child) for n, child in enumerate(value) if isinstance(child, dict))
        elif key in TABLES and isinstance(value, dict):
            escaped = ((name.replace("~", "~0").replace("/", "~1"), child) for name, child in value.items())
            yield from ((f"/{key}/{name}", child) for name, child in escaped if isinstance(child, dict))


def _lark_reason(error: str) -> str:
    if found := LARK_ERROR.match(error):
        return f", line {found['line']}, column {found['column']}: {found['reason']:.200}"
    return f": {_one_line(error)}"


def _one_line(error: str) -> str:
    return (
        "regular expression" + regex_reason(error) if PARSE_ERROR.search(error) else f"{' '.join(error.split()):.200}"
    )
