"""Stop strings, however the text that holds them is cut into pieces."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl2chat.engine.stopping import StopConditions, StopStrings
from exl2chat.errors import ChatError

STOPS = st.lists(st.text("ab#", min_size=1, max_size=5), max_size=4, unique=True)
PIECES = st.lists(st.text("ab#", max_size=4), max_size=12)


def feed(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopStrings(stops)
    text = ""
    for piece in pieces:
        text += matcher.push(piece)
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
    matcher = StopStrings(stops)
    for piece in pieces:
        matcher.push(piece)
        if matcher.found is not None:
            return
        assert matcher.held == "" or any(stop.startswith(matcher.held) for stop in stops)
        assert matcher.held not in stops


def test_the_longest_partial_match_is_held() -> None:
    matcher = StopStrings(["<end>", "nd of it"])
    assert matcher.push("that is the <en") == "that is the "
    assert matcher.held == "<en"
    assert matcher.push("d o") == "<e"
    assert matcher.held == "nd o"


def test_a_complete_match_does_not_wait_for_a_longer_one() -> None:
    matcher = StopStrings(["abcd", "bc"])
    assert matcher.push("xab") == "x"
    assert matcher.push("c") == "a"
    assert matcher.found == "bc"


def test_without_stop_strings_nothing_is_held() -> None:
    matcher = StopStrings([])
    assert matcher.push("anything") == "anything"
    assert matcher.flush() == ""


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
