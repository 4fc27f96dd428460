"""Replies under a grammar, with tokenizers of every kind: always valid, never less than the grammar allows."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from exl2chat.engine.compile_grammar import compile_choice, compile_grammar, compile_json_schema, compile_regex
from exl2chat.engine.constraints import Constraint
from exl2chat.engine.grammar import GrammarConstraint
from exl2chat.errors import ChatError
from tests.engine.constrained import WITHOUT_BYTES, reply, spelled, table, text_of, tokenizer
from tests.model.tokenizer_files import KINDS

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["été", "winter", "日本"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 7, "maximum": 120}, "maxItems": 3},
        "dead": {"type": ["boolean", "null"]},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
DATE = r"(19|20)\d\d-[01]\d( é|, 日本| 😀)?"
LIST = 'start: "[" item ("," item)* "]"\nitem: /[a-z]{1,3}/ | start'
LIST_GBNF = 'root ::= "[" item ("," item)* "]"\nitem ::= [a-z] [a-z]? | root\n'
OPTIONS = ["yes", "yes, sir", "no", "日本語", 'a "quoted" \\ word', "two\nlines\t", "é", "\x01"]


def is_person(text: str) -> bool:
    value = json.loads(text)
    assert value.keys() >= {"name", "kind", "ages"}
    assert value.keys() <= {"name", "kind", "ages", "dead"}
    assert len(value["name"]) <= 5
    assert value["kind"] in ("été", "winter", "日本")
    assert all(7 <= age <= 120 and type(age) is int for age in value["ages"])
    return len(value["ages"]) <= 3 and value.get("dead") in (True, False, None)


def is_list(text: str) -> bool:
    while (shorter := re.sub(r"\[[a-z]{1,3}(,[a-z]{1,3})*\]", "x", text)) != text:
        text = shorter
    return text == "x"


VALID: dict[str, tuple[Callable[[Any], GrammarConstraint], Callable[[str], object]]] = {
    "schema": (lambda kind: compile_json_schema(table(kind), PERSON), is_person),
    "schema text": (lambda kind: compile_json_schema(table(kind), json.dumps(PERSON)), is_person),
    "regex": (lambda kind: compile_regex(table(kind), DATE), re.compile(DATE).fullmatch),
    "lark": (lambda kind: compile_grammar(table(kind), LIST), is_list),
    "gbnf": (lambda kind: compile_grammar(table(kind), LIST_GBNF), is_list),
    "choice": (lambda kind: compile_choice(table(kind), OPTIONS), OPTIONS.__contains__),
}


ABLE = [kind for kind in KINDS if kind not in WITHOUT_BYTES]


@pytest.mark.parametrize("form", VALID)
@pytest.mark.parametrize("kind", ABLE)
def test_every_random_reply_is_valid_as_it_is_shown(kind: str, form: str) -> None:
    make, valid = VALID[form]
    constraint = make(kind)
    for seed in range(8):
        for continuing in (False, True):
            constraint.begin(continuing)
            text = text_of(kind, reply(constraint, seed, set(table(kind).end_ids.tolist())), continuing)
            assert valid(text), text


@pytest.mark.parametrize("kind", WITHOUT_BYTES)
def test_so_is_that_of_a_vocabulary_that_lacks_characters(kind: str) -> None:
    pattern = "(the|capital| ?of| ?France| ?and){1,5}"
    constraint = compile_regex(table(kind), pattern)
    for seed in range(20):
        constraint.begin()
        text = text_of(kind, reply(constraint, seed, set(table(kind).end_ids.tolist())))
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_has_the_bytes_that_are_shown(kind: str) -> None:
    known = table(kind)
    anchor = next(token for token, text in enumerate(known.texts) if text == b"e")
    for token in range(known.size):
        if known.texts[token].startswith(b"\xff"):
            assert known.rows[token] == b""
            continue
        first = known.rows[known.openings[token]] if known.shown(token) else b""
        assert first.decode("utf-8", "replace") == text_of(kind, [token])
        inside = text_of(kind, [anchor, token])
        assert (b"e" + known.texts[token]).decode("utf-8", "replace") == inside or token in known.end_ids


@pytest.mark.parametrize("continuing", [False, True])
@pytest.mark.parametrize("kind", ABLE)
def test_the_mask_is_exactly_the_tokens_that_keep_the_reply_the_start_of_an_option(kind: str, continuing: bool) -> None:
    known, options = table(kind), [option.encode() for option in OPTIONS]
    constraint = compile_choice(known, OPTIONS)
    for option in OPTIONS:
        constraint.begin(continuing)
        written, ids = b"", spelled(kind, option, continuing)
        if text_of(kind, ids, continuing) != option:
            assert kind == "spm_unigram"  # its normaliser changes white space
            continue
        for position, token in enumerate(ids):
            opening = position == 0 and not continuing
            pieces = [known.rows[known.openings[i]] if opening else known.rows[i] for i in range(known.size)]
            fits = [bool(piece) and any(o.startswith(written + piece) for o in options) for piece in pieces]
            fits = [fit or (written in options and i in known.end_ids) for i, fit in enumerate(fits)]
            fits = [fit or (opening and known.texts[i] == b" " and not pieces[i]) for i, fit in enumerate(fits)]
            np.testing.assert_array_equal(constraint.mask(), fits)
            constraint.advance(token)
            written += pieces[token]
        assert written == option.encode()
        assert constraint.accepting
        assert constraint.finished == (option != "yes")


@pytest.mark.parametrize("kind", ABLE)
def test_the_mask_is_what_the_library_accepts_byte_by_byte(kind: str) -> None:
    known = table(kind)
    constraint = compile_json_schema(known, {"type": "object", "additionalProperties": {"type": ["string", "number"]}})
    choose = random.Random(5)
    for step in range(40):
        mask = constraint.mask()
        for token in range(known.size):
            row = known.openings[token] if step == 0 else token
            data = [known.byte_row + byte for byte in known.rows[row]]
            shown = known.shown(token) and bool(data)
            silent = step == 0 and known.texts[token] == b" " and not data
            accepted = silent or (shown and constraint._matcher.validate_tokens(data) == len(data))
            assert mask[token] == (accepted or (token in known.end_ids and constraint.accepting))
        constraint.advance(choose.choice(np.flatnonzero(mask).tolist()))
        if constraint.finished:
            break


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "spm_bpe"])
def test_the_end_is_allowed_exactly_where_the_expression_matches(kind: str) -> None:
    known = table(kind)
    pattern = r"a(bc|bcbc)?(\.| é)*"
    constraint = compile_regex(known, pattern)
    for seed in range(10):
        constraint.begin()
        ids: list[int] = []
        choose = random.Random(seed)
        for _ in range(12):
            ends = constraint.mask()[known.end_ids].all()
            matched = bool(re.fullmatch(pattern, text_of(kind, ids)))
            assert ends == constraint.accepting == matched
            ids.append(choose.choice([i for i in np.flatnonzero(constraint.mask()).tolist() if i not in known.end_ids]))
            constraint.advance(ids[-1])


def state(constraint: Constraint) -> tuple[list[int], bool, bool, list[int]]:
    allowed = [] if constraint.finished else np.flatnonzero(constraint.mask()).tolist()
    return allowed, constraint.accepting, constraint.finished, constraint.forced()


@pytest.mark.parametrize("healed", [None, "e"])
@pytest.mark.parametrize("form", VALID)
@pytest.mark.parametrize("kind", ["byte_level", "llama2"])
def test_taking_tokens_back_is_never_having_had_them(kind: str, form: str, healed: str | None) -> None:
    known, choose = table(kind), random.Random(11)
    make = VALID[form][0]
    token = None if healed is None else known.texts.index(healed.encode())
    constraint = make(kind)
    constraint.begin(healed=token)
    ids: list[int] = []
    for _ in range(60):
        if not constraint.finished and choose.random() < 0.7:
            ids.append(choose.choice(np.flatnonzero(constraint.mask()).tolist()))
            constraint.advance(ids[-1])
        else:
            count = choose.randint(0, len(ids))
            constraint.rollback(count)
            del ids[len(ids) - count :]
        fresh = make(kind)
        fresh.begin(healed=token)
        for known_token in ids:
            fresh.advance(known_token)
        assert state(constraint) == state(fresh)
        assert state(constraint.clone()) == state(fresh)


def test_a_clone_goes_its_own_way() -> None:
    constraint = compile_regex(table("byte_level"), "ab|cd")
    clone = constraint.clone()
    before = state(constraint)
    for token in spelled("byte_level", "ab"):
        clone.advance(token)
    assert clone.finished
    assert state(constraint) == before
    clone.rollback(1)
    with pytest.raises(ValueError, match="2 of 1 tokens"):
        clone.rollback(2)


def test_a_constraint_can_begin_again() -> None:
    known = table("byte_level")
    constraint = compile_regex(known, "a*")
    before = state(constraint)
    for token in (*spelled("byte_level", "a"), *known.end_ids.tolist()):
        constraint.advance(token)
    constraint.begin()
    assert state(constraint) == before
    with pytest.raises(ValueError, match="1 of 0 tokens"):
        constraint.rollback(1)


def test_after_the_end_nothing_else_follows() -> None:
    known = table("byte_level")
    constraint = compile_regex(known, "a*")
    [end] = known.end_ids.tolist()
    constraint.advance(end)
    assert constraint.finished
    assert np.flatnonzero(constraint.mask()).tolist() == [end]
    with pytest.raises(ChatError, match="not what the grammar asks for"):
        constraint.advance(*spelled("byte_level", "a"))


def test_a_token_outside_the_grammar_is_refused_and_changes_nothing() -> None:
    known = table("byte_level")
    constraint = compile_regex(known, "ab")
    [token, end] = [*spelled("byte_level", "b"), *known.end_ids.tolist()]
    before = state(constraint)
    for refused in (token, end, known.size - 1, tokenizer("byte_level").id_of("<s>")):
        assert refused is not None
        with pytest.raises(ChatError):
            constraint.advance(refused)
        assert state(constraint) == before


@pytest.mark.parametrize("kind", KINDS)
def test_control_tokens_are_no_text_but_a_grammar_can_name_them(kind: str) -> None:
    hidden = tokenizer(kind).special_ids - set(table(kind).end_ids.tolist())
    anything = compile_regex(table(kind), "(?s:.*)").mask()
    assert not anything[list(hidden)].any()
    assert anything[spelled(kind, "e")].all()
    constraint = compile_grammar(table(kind), 'start: <s> "Paris"')
    start = tokenizer(kind).id_of("<s>") if kind != "golden" else None
    if start is not None:
        assert set(np.flatnonzero(constraint.mask())) == {start, *table(kind).silent}
        for token in [start, *spelled(kind, "Paris")]:
            constraint.advance(token)
        assert constraint.finished


@pytest.mark.parametrize("kind", ["llama2", "phi3", "spm_bpe"])
def test_the_space_that_is_not_shown_at_the_start_is_not_part_of_the_reply(kind: str) -> None:
    spaced = [
        token for token, text in enumerate(table(kind).texts) if text.startswith(b" P") and b" Paris".startswith(text)
    ]
    assert spaced
    constraint = compile_regex(table(kind), "Paris")
    assert constraint.mask()[spaced].all()
    constraint.begin(continuing=True)
    assert not constraint.mask()[spaced].any()


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "unigram", "spm_bpe"])
def test_a_healed_token_is_repeated_and_continued(kind: str) -> None:
    known = table(kind)
    constraint = compile_choice(known, ["ris is", "rome"])
    healed = known.texts.index(b"a")
    constraint.begin(healed=healed)
    full = [b"aris is", b"arome"]
    fits = [text.startswith(b"a") and any(f.startswith(text) for f in full) for text in known.texts]
    np.testing.assert_array_equal(constraint.mask(), fits)
    assert not constraint.accepting
    constraint.advance(healed)
    for token in spelled(kind, "rome", continuing=True):
        constraint.advance(token)
    assert constraint.finished


def test_a_reply_cannot_end_before_its_healed_token() -> None:
    known = table("byte_level")
    constraint = compile_regex(known, "[a-z]*")
    healed = known.texts.index(b"e")
    constraint.begin(healed=healed)
    assert not constraint.accepting
    assert not constraint.finished
    assert not constraint.mask()[known.end_ids].any()
    constraint.advance(healed)
    assert constraint.accepting
    assert constraint.mask()[known.end_ids].all()


@pytest.mark.parametrize("kind", ABLE)
def test_forced_tokens_can_be_taken_as_they_are(kind: str) -> None:
    constraint = compile_json_schema(table(kind), {"const": {"the capital": "of France is Paris"}})
    total = 0
    for token in spelled(kind, '{"the capital": "of France is Paris"}'):
        clone = constraint.clone()
        forced = clone.forced()
        total += len(forced)
        for guess in forced:
            clone.advance(guess)
        constraint.advance(token)
    assert total > 10
    assert constraint.finished


@pytest.mark.parametrize("kind", ["byte_level", "llama2"])
def test_a_grammar_of_the_empty_text_is_finished_at_once(kind: str) -> None:
    constraint = compile_regex(table(kind), "")
    assert constraint.finished
    np.testing.assert_array_equal(np.flatnonzero(constraint.mask()), table(kind).end_ids)


def test_a_reply_that_no_token_can_continue_is_an_error() -> None:
    constraint = compile_regex(table("unigram"), "a\x02")
    constraint.advance(*spelled("unigram", "a", continuing=True))
    with pytest.raises(ChatError, match="no token of this model"):
        constraint.mask()
