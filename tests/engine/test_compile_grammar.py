"""What cannot be followed exactly is refused, with its place."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from exl2chat.engine.compile_grammar import compile_choice, compile_grammar, compile_json_schema, compile_regex
from exl2chat.errors import UsageError
from tests.engine.constrained import spelled, table

KIND = "byte_level"


def refused(compiled: Callable[..., object], *arguments: Any, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        compiled(table(KIND), *arguments, **options)
    assert "\n" not in caught.value.message
    assert caught.value.remedy
    return caught.value.message


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {}}, 'at /: Unimplemented keys: ["not"]'),
        ({"type": "strin"}, "at /: Invalid type: strin"),
        ({"properties": {"a/b": {"items": {"format": "zz"}}}}, "at /properties/a~1b/items: Unknown format: zz"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"if": {}}}}, "at /anyOf/1"),
        ({"prefixItems": [{}, {"uniqueItems": True}]}, 'at /prefixItems/1: Unimplemented keys: ["uniqueItems"]'),
        ({"$ref": "#/$defs/none"}, "at /: Pointer '/$defs/none' does not exist"),
        ({"$ref": "https://example.com/a.json"}, "at /: Resource"),
        ({"type": "string", "pattern": "(a"}, "at /: regular expression, character 1: unclosed group"),
        (
            {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 2}}},
            "at /: Unsatisfiable schema: required property 'a' is unsatisfiable",
        ),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "at /: oneOf constraints are not"),
        ({"x-guidance": {"lenient": True}, "not": {}}, 'at /: Unimplemented keys: ["not"]'),
        ({"x-guidance": {"nonsense": True}}, "unknown field `nonsense`"),
        ({"x-guidance": 1}, "at /x-guidance: not a table"),
    ],
)
def test_schemas_that_cannot_be_followed_are_refused_at_their_place(schema: dict[str, Any], message: str) -> None:
    assert message in refused(compile_json_schema, schema)
    assert message in refused(compile_json_schema, json.dumps(schema))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"type":\n "string",}', "line 2, column 11"),
        ("", "line 1, column 1"),
        ("false", "false allows nothing"),
        ("[1]", "[1] allows nothing"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_schema_is_refused(text: str, message: str) -> None:
    assert message in refused(compile_json_schema, text)


def test_what_is_not_json_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    assert "nested too deeply" in refused(compile_json_schema, deep)
    assert "not JSON serializable" in refused(compile_json_schema, {"const": object()})


def test_a_schema_followed_in_part_only_is_refused() -> None:
    loose = {"x-guidance": {"coerce_one_of": True}, "oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}
    assert "oneOf not fully supported" in refused(compile_json_schema, loose)


def followed(schema: dict[str, Any], text: str) -> bool:
    """Whether the schema allows `text`, token by token."""
    constraint = compile_json_schema(table(KIND), schema)
    for token in spelled(KIND, text):
        if not constraint.mask()[token]:
            return False
        constraint.advance(token)
    return constraint.accepting


@pytest.mark.parametrize("indent", [None, 2, 8])
def test_json_is_spaced_as_json_dumps_spaces_it(indent: int | None) -> None:
    assert followed({}, json.dumps({"a": [1, {"b": {"c": []}}]}, indent=indent))


@pytest.mark.parametrize("spaces", ["  ", "\n\n", "\n" + " " * 65])
def test_white_space_in_json_comes_to_an_end(spaces: str) -> None:
    assert not followed({}, f'{{{spaces}"a": 1}}')
    assert followed({"x-guidance": {"whitespace_flexible": True}}, f'{{{spaces}"a": 1}}')


def test_true_allows_all_json_and_says_so() -> None:
    constraint = compile_json_schema(table(KIND), "true")
    for token in spelled(KIND, '{"a": [1, true]}'):
        constraint.advance(token)
    assert constraint.accepting


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("ab(c", "regular expression, character 3: unclosed group"),
        ("ab(?=c)", "regular expression, character 3: look-around"),
        (r"(a)\1", "regular expression, character 4: backreferences"),
        (r"a\bc", "regular expression: lookarounds not supported yet"),
        (r"\p{Nonsense}", "regular expression, character 1: Unicode property not found"),
        ("(" * 1000, "regular expression"),
    ],
)
def test_expressions_that_cannot_be_followed_are_refused_at_their_place(pattern: str, message: str) -> None:
    assert message in refused(compile_regex, pattern)


@pytest.mark.parametrize("pattern", ["a/b", "a\nb", r"a\/b", "[/]#", "a b"])
def test_expressions_may_hold_what_delimits_them_in_a_grammar(pattern: str) -> None:
    constraint = compile_regex(table(KIND), pattern)
    for token in spelled(KIND, pattern.replace("\\", "").replace("[/]", "/")):
        constraint.advance(token)
    assert constraint.finished


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("start: foo", 'grammar, line 1, column 8: unknown name: "foo"'),
        ("start: A\nA: /a(?=b)/", "grammar, line 2, column 4: invalid regex"),
        ('start "a"', "grammar, line 1, column 7: Expected token ':'"),
        ("start: <nope>", "grammar, line 1, column 8: unknown special token"),
        ("", "grammar: no start rule found"),
        ('start: %json {"not": {}}', "grammar, line 1, column 8: failed to compile JSON schema: Unimplemented"),
        ("root ::= foo", "GBNF grammar: Rule 'foo' not found"),
        ('root ::= "a" [b', "GBNF grammar: Unexpected end of input at line 1"),
    ],
)
def test_grammars_that_cannot_be_followed_are_refused_at_their_place(text: str, message: str) -> None:
    assert message in refused(compile_grammar, text)


def test_many_empty_lines_of_a_grammar_are_no_trouble() -> None:
    """When each was tried together with all that follow, these took half a minute."""
    constraint = compile_grammar(table(KIND), "\n" * 50_000 + 'start: "a"')
    constraint.begin()
    assert constraint.mask().any()


def test_choices_are_options_of_at_least_one_character() -> None:
    assert "needs options" in refused(compile_choice, [])
    assert "needs options" in refused(compile_choice, ["a", ""])


def test_case_can_be_ignored() -> None:
    constraint = compile_choice(table(KIND), ["été"], ignore_case=True)
    for text in ("été", "ÉTÉ", "Été"):
        constraint.begin()
        for token in spelled(KIND, text):
            constraint.advance(token)
        assert constraint.finished


def test_a_grammar_may_name_settings_of_its_own() -> None:
    word = max((text for text in table(KIND).texts if text.isalpha()), key=len).decode()
    constraint = compile_grammar(table(KIND), f'%llguidance {{"no_forcing": false}}\nstart: "{word}"')
    assert len(np.flatnonzero(constraint.mask())) > 1


def test_text_that_is_no_unicode_is_refused_at_its_place() -> None:
    assert refused(compile_regex, "ab\ud800") == "regular expression, character 3: half a surrogate pair"
    assert refused(compile_grammar, 'start: "\udfff"').startswith("grammar, character 9")
    assert refused(compile_choice, ["a", "\ud800"]).startswith("choice, character 1")
