"""Replies of a form that was asked for."""

import re

import pytest

from exl2chat.link import protocol as wire
from tests.link.serving import LOAD, ask, last, serve, text_of

# The form of a reply

SCHEMA = '{"properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false}'


OBJECT = SCHEMA.replace("{", '{"type": "object", "x-guidance": {"whitespace_flexible": false}, ', 1)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (wire.Form("json", OBJECT), r'\{"ok":(true|false)\}'),
        (wire.Form("regex", "[ab]{4}|[cd]{3}"), "[ab]{4}|[cd]{3}"),
        (wire.Form("grammar", 'start: "yes" | "no"'), "yes|no"),
        (wire.Form("grammar", 'root ::= "yes" | "no"'), "yes|no"),
    ],
)
def test_a_reply_has_the_form_that_was_asked_for_and_the_next_one_is_free(tmp_path, form, pattern):
    events = serve(tmp_path, LOAD, ask(form=form, max_tokens=40), ask("b", max_tokens=12))
    assert last(events).reason == "eos"
    assert re.fullmatch(pattern, text_of(events))
    assert text_of(events, "b") == text_of(serve(tmp_path, LOAD, ask("b", max_tokens=12)), "b")


@pytest.mark.parametrize(
    ("form", "complaint"),
    [
        (
            wire.Form("json", '{"properties": {"a": {"not": {}}}}', "s.json"),
            r"s\.json: JSON schema, at /properties/a",
        ),
        (wire.Form("json", "{"), "JSON schema, line 1, column 2"),
        (wire.Form("regex", "a(?=b)"), "regular expression"),
        (wire.Form("grammar", "start: nothing", "g.lark"), r"g\.lark: grammar"),
        (wire.Form("grammar", "root ::= ("), "GBNF grammar"),
    ],
)
def test_a_form_that_cannot_be_followed_is_an_error_and_no_reply(tmp_path, form, complaint):
    events = serve(tmp_path, LOAD, ask(form=form), ask("b"))
    assert last(events).status == 2
    assert re.match(complaint, last(events).message)
    assert text_of(events) == ""
    assert isinstance(last(events, "b"), wire.Finished)


def test_a_reply_that_has_begun_gets_no_form(tmp_path):
    turns = (wire.Turn("user", "hello"), wire.Turn("assistant", "{"))
    events = serve(tmp_path, LOAD, wire.Generate("a", turns, form=wire.Form("json", "{}")))
    assert "cannot be given a form" in last(events).message
