"""Stop strings, however the text that holds them is cut into pieces."""

import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl2chat.engine.stopping import Gate, StopConditions, lower
from exl2chat.errors import ChatError

STOPS = st.lists(st.text("ab#", min_size=1, max_size=5), max_size=4, unique=True)
PIECES = st.lists(st.text("ab#", max_size=4), max_size=12)


def feed(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = Gate(stops)
    text = ""
    for piece in pieces:
        text += matcher.push(piece).text
        if matcher.found is not None:
            return text, matcher.found
    return text + matcher.flush(), None


def oracle(stops: list[str], text: str) -> tuple[str, str | None]:
    """The first end at which some stop string is complete; of those that end there, the longest."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(STOPS, PIECES)
def test_the_result_is_that_of_single_characters_however_the_text_is_cut(stops: list[str], pieces: list[str]) -> None:
    assert feed(stops, pieces) == oracle(stops, "".join(pieces))


@given(STOPS, PIECES)
def test_only_what_may_become_a_stop_string_is_held(stops: list[str], pieces: list[str]) -> None:
    matcher = Gate(stops)
    for piece in pieces:
        matcher.push(piece)
        if matcher.found is not None:
            return
        assert matcher.held == "" or any(stop.startswith(matcher.held) for stop in stops)
        assert matcher.held not in stops


def test_the_longest_partial_match_is_held() -> None:
    matcher = Gate(["<end>", "nd of it"])
    assert matcher.push("that is the <en").text == "that is the "
    assert matcher.held == "<en"
    assert matcher.push("d o").text == "<e"
    assert matcher.held == "nd o"


def test_a_long_string_takes_no_more_memory_than_its_text() -> None:
    long = "ab" * 20_000
    tracemalloc.start()
    try:
        gate = Gate([long + "c"], [long + "d"])
        assert (gate.push("x" + long).text, gate.held) == ("", "x" + long)
        assert tracemalloc.get_traced_memory()[1] < 100 * len(long)
    finally:
        tracemalloc.stop()
    gate.push("c")
    assert (gate.found, gate.held) == (long + "c", long + "c")


def test_a_complete_match_does_not_wait_for_a_longer_one() -> None:
    matcher = Gate(["abcd", "bc"])
    assert matcher.push("xab").text == "x"
    assert matcher.push("c").text == "a"
    assert matcher.found == "bc"


def test_without_stop_strings_nothing_is_held() -> None:
    matcher = Gate([])
    assert matcher.push("anything") == ("anything", 1)
    assert matcher.flush() == ""


# Banned strings


@given(STOPS, STOPS, PIECES)
def test_what_is_complete_first_counts_and_nothing_banned_passes(
    stops: list[str], banned: list[str], pieces: list[str]
) -> None:
    """As if the text came in whole tokens: where a banned string is first, they are taken back to where it begins."""
    gate, passed, tokens, sent = Gate(stops, banned), "", 0, []
    for piece in pieces:
        sent.append(piece)
        step = gate.push(piece)
        passed, tokens = passed + step.text, tokens + step.tokens
        text, found = oracle([*stops, *banned], "".join(sent))
        if gate.found is not None:
            assert (passed, gate.found) == (text, found)
            return
        if gate.banned:
            assert found in banned
            assert gate.banned.text == "".join(sent[len(sent) - gate.banned.tokens :])
            before = len("".join(sent)) - len(gate.banned.text)
            assert before <= len(text)
            assert passed == "".join(sent)[: len(passed)]
            assert len(passed) <= before
            assert tokens <= len(sent) - gate.banned.tokens
            del sent[len(sent) - gate.banned.tokens :]
        else:
            assert found is None
    assert passed + gate.flush() == "".join(sent)


def test_of_a_token_that_begins_a_banned_string_nothing_passes() -> None:
    gate = Gate(banned=["bad"])
    assert gate.push("so ") == ("so ", 1)
    assert gate.push("xb") == ("", 0)
    assert gate.push("a") == ("", 0)
    assert gate.push("d") == ("", 0)
    assert gate.banned == (3, "xbad")
    assert gate.push("y") == ("y", 1)
    assert gate.banned is None


def test_a_stop_string_does_not_wait_for_a_banned_one_nor_the_other_way() -> None:
    gate = Gate(["bcd"], ["abcde"])
    assert gate.push("xabcd") == ("xa", 0)
    assert gate.found == "bcd"
    gate = Gate(["abcde"], ["bcd"])
    gate.push("ab")
    gate.push("cd")
    assert gate.banned == (2, "abcd")


def test_what_a_stop_string_held_can_still_be_banned() -> None:
    """The hold began before the banned string did: exllamav2 went back to a checkpoint of an earlier one."""
    gate = Gate(["###"], ["#a"])
    assert gate.push("s#").text == ""
    gate.push("#")
    gate.push("a")
    assert gate.banned == (2, "#a")
    assert gate.push("#").text == ""
    assert gate.push("b").text == "s##b"


@pytest.mark.parametrize(("stops", "banned"), [([], ["ab"]), (["ab"], ["ac"])])
def test_text_before_what_is_taken_back_may_begin_another_string(stops: list[str], banned: list[str]) -> None:
    gate = Gate(stops, banned)
    assert [gate.push("a"), gate.push("a")] == [("", 0), ("", 0)]
    gate.push(banned[0][1])
    assert gate.banned == (2, banned[0])
    assert gate.push("b").text == ""
    assert gate.banned == ((2, "ab") if not stops else None)
    assert gate.found == ("ab" if stops else None)


def test_banned_strings_count_in_any_case() -> None:
    gate = Gate(banned=["bAd ÉTÉ"])
    gate.push("BaD été")
    assert gate.banned == (1, "BaD été")
    assert lower("İÉ") == "İé"


def test_the_tokens_of_one_character_stay_together() -> None:
    gate = Gate(banned=["é"])
    assert [gate.push("a"), gate.push(""), gate.push("")] == [("a", 1), ("", 0), ("", 0)]
    gate.push("é")
    assert gate.banned == (3, "é")


@pytest.mark.parametrize("bad", ["abc", ["", "a"], [None]])
def test_what_cannot_be_banned_is_a_value_error(bad: Any) -> None:
    with pytest.raises(ValueError, match="no list of texts"):
        Gate(banned=bad)


# Conditions


def test_conditions_are_ids_and_strings_in_any_order() -> None:
    conditions = StopConditions.of([2, "User:", 7, "User:", "###"])
    assert conditions == StopConditions(frozenset({2, 7}), ("User:", "###"))


@pytest.mark.parametrize("bad", [None, "", 1.5, True, b"x", ["nested"]])
def test_anything_else_is_a_value_error_that_a_user_can_read(bad: object) -> None:
    with pytest.raises(ValueError, match="cannot end a reply") as caught:
        StopConditions.of([1, bad])
    assert isinstance(caught.value, ChatError)


@pytest.mark.parametrize("bad", ["###", 2, None])
def test_stop_conditions_are_a_list(bad: Any) -> None:
    with pytest.raises(ValueError, match="stop conditions are a list"):
        StopConditions.of(bad)
