"""Texts that a stream may not contain: tokens are taken back, and others drawn."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl2chat.engine.compile_grammar import compile_regex
from exl2chat.engine.generators.streaming import Extras
from exl2chat.errors import ChatError
from exl2chat.settings import Sampling
from tests.engine.fake_model import END, VOCABULARY, FakeModel, FakeTokenizer, saying
from tests.engine.streams import GREEDY, PROMPT, generator, reply, stream, table


def test_a_banned_string_is_taken_back_and_another_token_stands_where_it_began() -> None:
    def second_choice(tokens: list[int]) -> int:
        return list(b"so bad it is")[len(tokens) - 3] if len(tokens) < 15 else END

    subject = generator(FakeModel(second_choice))
    subject.begin_stream_ex(PROMPT, GREEDY, extras=Extras(banned_strings=("BAD",)))
    results = list(stream(subject))
    text = "".join(result.text for result in results)
    assert [result.suppressed for result in results if result.suppressed] == ["bad"]
    assert (text[:3], text[4:]) == ("so ", "ad it is")
    assert text[3] != "b"
    assert [token for result in results for token in result.tokens] == list(text.encode())
    assert subject.tokens == [*PROMPT, *text.encode(), END]
    assert results[-1].reply_tokens == len(text) + 1


def test_a_text_begins_anew_where_its_first_token_was_taken_back() -> None:
    """Without a space before its first word, and with a cache that knows nothing of what was."""
    words = (" bad", " good")
    names = FakeTokenizer(words=words)

    class Second(FakeModel):
        def logits(self, tokens: list[int]) -> np.ndarray:  # noqa: ARG002
            logits = np.zeros(VOCABULARY, np.float32)
            logits[[names.id_of(" bad"), names.id_of(" good")]] = 9, 8
            return logits

    subject = generator(Second(), words)
    subject.begin_stream_ex(PROMPT, GREEDY, extras=Extras(banned_strings=("bad",)))
    assert subject.stream_ex().suppressed == "bad"
    assert subject._cache.length == len(PROMPT) - 1
    assert subject.stream_ex().text == "good"


RULES = [
    Sampling(temperature=1.0, top_p=1.0, seed=3, repetition_penalty=1.4, presence_penalty=0.5),
    Sampling(temperature=1.0, top_p=1.0, seed=4, dry_multiplier=2.0, dry_allowed_length=1, dry_breakers=()),
    Sampling(temperature=1.0, top_p=1.0, seed=5, mirostat_tau=2.0, mirostat_eta=0.5),
]


class Few(FakeModel):
    """Says a to d, each about as likely."""

    def logits(self, tokens: list[int]) -> np.ndarray:
        logits = super().logits(tokens) / 3
        logits[:97] = logits[101:] = -np.inf
        return logits


@pytest.mark.parametrize("settings", RULES)
def test_after_a_rewind_all_goes_on_as_if_the_tokens_had_never_been(settings: Sampling) -> None:
    """Sampler, cache and constraint: the same as a reply in which the bans were known beforehand, token by token."""
    subject, rule = generator(Few()), compile_regex(table(), "[a-d]*")
    extras = Extras(banned_strings=("aa", "bcd", "dd"), constraint=rule, return_logits=True)
    subject.begin_stream_ex(PROMPT, settings, extras=extras, max_new_tokens=40)
    bans: dict[int, set[int]] = {}
    rewinds, details = 0, []
    while not (result := subject.stream_ex()).eos:
        details += result.details
        if result.suppressed:
            rewinds += 1
            at = len(subject.tokens)
            bans = {place: ids for place, ids in bans.items() if place <= at} | {
                at: bans.get(at, set()) | {ord(result.suppressed[0])}
            }
    details += result.details
    assert rewinds > 2
    straight = generator(Few())
    straight.begin_stream_ex(PROMPT, settings, extras=Extras(constraint=rule, return_logits=True), max_new_tokens=40)
    expected = [straight.stream_ex(banned=bans.get(len(straight.tokens), ())) for _ in range(40)]
    assert subject.tokens == straight.tokens
    for mine, theirs in zip(details, [detail for result in expected for detail in result.details], strict=True):
        assert mine.logits is not None
        assert theirs.logits is not None
        assert (mine.logits == theirs.logits).all()


@given(st.lists(st.text("abcdABé", min_size=1, max_size=3), min_size=1, max_size=4), st.integers(0, 20))
def test_no_banned_string_is_ever_shown(banned: list[str], seed: int) -> None:
    subject = generator(Few())
    subject.begin_stream_ex(PROMPT, Sampling(seed=seed), extras=Extras(banned_strings=tuple(banned)), max_new_tokens=30)
    letters, lowered = {"a", "b", "c", "d"}, [text.lower() for text in banned]
    results, fault = [], ""
    try:
        results.extend(stream(subject))
    except ChatError as error:
        fault = str(error)
    if fault:
        assert "no token is left to draw" in fault
        assert letters <= {text[0] for text in lowered}  # each was banned where a string would begin
        return
    assert not letters <= set(lowered)
    shown, tokens = "".join(result.text for result in results), [token for r in results for token in r.tokens]
    assert not any(text.lower() in shown for text in banned)
    assert bytes(tokens).decode() == shown
    assert subject.tokens == [*PROMPT, *tokens]


def test_a_banned_string_that_the_constraint_insists_on_is_an_error() -> None:
    rule = compile_regex(table(), "yes")
    with pytest.raises(ChatError, match="no token may come next"):
        reply(generator(), Extras(constraint=rule, banned_strings=("es",)))


def test_a_stop_string_may_begin_within_what_a_ban_holds() -> None:
    subject = generator(saying("one bad end", 3))
    subject.set_stop_conditions(["ba"])
    text, tokens, last = reply(subject, Extras(banned_strings=("bad",)), GREEDY)
    assert (text, tokens, last.stop_reason) == ("one ", list(b"one "), "stop_string")


def test_banned_characters_of_several_tokens_are_taken_back_whole() -> None:
    subject = generator(saying("né!", 3))
    text, tokens, _ = reply(subject, Extras(banned_strings=("É",)), GREEDY, max_new_tokens=4)
    assert "é" not in text
    assert tokens[1] != 0xC3


@pytest.mark.parametrize("bad", [("",), "abc", (None,)])
def test_what_is_no_list_of_texts_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="no list of texts"):
        generator().begin_stream_ex(PROMPT, GREEDY, extras=Extras(banned_strings=bad))


# Tokens that may not come next


def test_a_token_banned_for_a_step_is_not_drawn_in_that_step() -> None:
    subject = generator(saying("aaaa", 3))
    subject.begin_stream_ex(PROMPT, GREEDY)
    assert subject.stream_ex().text == "a"
    assert subject.stream_ex(banned=[97, -1, 10**6]).text != "a"
    assert subject.stream_ex().text == "a"
