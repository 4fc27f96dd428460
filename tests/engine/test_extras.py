"""What a reply may be asked for besides its text: constraints, healing, and how tokens were drawn."""

from collections.abc import Collection
from typing import Self

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exl2chat.engine.compile_grammar import compile_json_schema, compile_regex
from exl2chat.engine.constraints import AllOf
from exl2chat.engine.filters import FilterConstraint
from exl2chat.engine.generators.streaming import Extras
from exl2chat.engine.replies.jobs import Choice
from exl2chat.engine.sampler import Sampler
from exl2chat.engine.token_table import TokenTable
from exl2chat.errors import ChatError, UsageError
from exl2chat.settings import Sampling
from tests.engine.fake_model import END, OTHER_END, VOCABULARY, FakeCache, FakeModel, FakeTokenizer, saying
from tests.engine.streams import GREEDY, PROMPT, generator, reply, stream, table
from tests.engine.tiny_models import Anything

# Constraints


@pytest.mark.parametrize("seed", range(5))
def test_a_constrained_reply_is_what_was_asked_for_and_ends_there(seed: int) -> None:
    settings = Sampling(temperature=1.5, top_p=1.0, seed=seed)
    text, tokens, last = reply(generator(), Extras(constraint=compile_regex(table(), "[a-f]{3}-[0-9]{2}")), settings)
    assert len(text) == 6
    assert set(text[:3]) <= set("abcdef")
    assert text[3] == "-"
    assert text[4:].isdecimal()
    assert (tokens, last.stop_reason, last.reply_tokens) == (list(text.encode()), "eos", 6)


def test_what_a_model_wants_to_say_is_said_as_far_as_the_constraint_allows_it() -> None:
    model = saying('{"n": 12}', 3)
    schema = (
        '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": false}'
    )
    text, _, last = reply(generator(model), Extras(constraint=compile_json_schema(table(), schema)), GREEDY)
    assert (text, last.stop_reason) == ('{"n": 12}', "eos")


def test_where_the_text_may_end_the_model_decides_and_may_be_made_to() -> None:
    model = FakeModel(lambda tokens: END if len(tokens) == 8 else ord("a"))
    rule = compile_regex(table(), "a+")
    assert reply(generator(model), Extras(constraint=rule), GREEDY)[0] == "aaaaa"
    assert reply(generator(model), Extras(constraint=rule, prefer_end=True), GREEDY)[0] == "a"


def test_a_preferred_end_waits_for_the_healed_token() -> None:
    extras = Extras(constraint=FilterConstraint(table(), Anything()), prefer_end=True, token_healing=True)
    text, tokens, last = reply(generator(saying("CC", 2)), extras, GREEDY)
    assert (text, tokens, last.stop_reason) == ("", [ord("C")], "eos")


def test_a_constraint_begins_anew_with_every_reply() -> None:
    subject, rule = generator(), compile_regex(table(), "[xy]z")
    first = reply(subject, Extras(constraint=rule))
    assert reply(subject, Extras(constraint=rule))[:2] == first[:2]


def test_a_constraint_of_nothing_ends_at_once_and_one_that_cannot_be_met_is_an_error() -> None:
    text, tokens, last = reply(generator(saying("a", 3)), Extras(constraint=compile_regex(table(), "")))
    assert (text, tokens, last.stop_reason) == ("", [], "eos")
    impossible = AllOf([compile_regex(table(), "a"), compile_regex(table(), "b")])
    with pytest.raises(ChatError, match="no token satisfies all filters"):
        reply(generator(), Extras(constraint=impossible))


def test_a_limit_cuts_a_constrained_reply_and_says_so() -> None:
    text, _, last = reply(generator(), Extras(constraint=compile_regex(table(), "[ab]{9}")), max_new_tokens=4)
    assert (len(text), last.stop_reason) == (4, "max_tokens")


def test_stop_ids_that_are_no_tokens_disturb_no_constraint() -> None:
    subject = generator(saying("aa", 3))
    subject.set_stop_conditions([END, -1, 10**6])
    rule = compile_regex(subject.token_table(), "a+")
    assert reply(subject, Extras(constraint=rule), GREEDY)[0] == "aa"
    assert reply(subject, Extras(constraint=rule, prefer_end=True), GREEDY)[0] == "a"


def test_the_table_of_tokens_is_made_once_for_the_stop_ids_in_force() -> None:
    subject = generator()
    first = subject.token_table()
    assert subject.token_table() is first
    subject.set_stop_conditions([OTHER_END])
    assert subject.token_table().end_ids.tolist() == [OTHER_END]


class Vowels:
    """A filter as users write them: three vowels."""

    def __init__(self) -> None:
        self.count = 0
        self.prefix = "never"

    def clone(self) -> Self:
        return type(self)()

    def begin(self, prefix_str: str) -> None:
        self.count, self.prefix = 0, prefix_str

    def feed(self, token: torch.Tensor) -> None:
        assert chr(int(token[0, 0])) in "aeiou"
        self.count += 1

    def next(self) -> tuple[Collection[int], Collection[int]]:
        return sorted(b"aeiou"), sorted(b"aeiou") if self.count == 2 else []


def test_a_filter_of_the_user_ends_the_reply_with_its_last_token() -> None:
    rule = Vowels()
    text, tokens, last = reply(generator(), Extras(constraint=FilterConstraint(table(), rule)))
    assert (len(text), tokens, last.stop_reason, rule.prefix) == (3, list(text.encode()), "eos", "")
    assert set(text) <= set("aeiou")


def test_two_constraints_hold_at_once() -> None:
    both = AllOf([FilterConstraint(table(), Vowels()), compile_regex(table(), "[a-f]+")])
    assert set(reply(generator(), Extras(constraint=both))[0]) <= set("ae")


# Token healing

WORDS = (" quick", " quicker", "er", "qu", "quick")


def test_a_healed_token_gives_way_to_one_that_says_more_and_only_that_is_text() -> None:
    names = FakeTokenizer(words=WORDS)
    quick, quicker = names.id_of(" quick"), names.id_of(" quicker")
    model = FakeModel(lambda tokens: quicker if tokens[-1] == 65 else ord("!"))
    subject = generator(model, WORDS)
    start = subject.begin_stream_ex([65, quick], GREEDY, max_new_tokens=3, extras=Extras(token_healing=True))
    assert start.prompt_tokens == 1
    results = list(stream(subject))
    assert [(result.text, result.tokens) for result in results] == [("er", (quicker,)), ("!", (33,)), ("!", (33,))]
    assert subject.tokens == [65, quicker, 33, 33]


def test_only_the_first_token_repeats_what_was_healed() -> None:
    names = FakeTokenizer(words=WORDS)
    quick, begun = names.id_of("quick"), names.id_of("qu")
    model = FakeModel(lambda tokens: quick if tokens[-1] == 65 else begun)
    text, *_ = reply(generator(model, WORDS), Extras(token_healing=True), GREEDY, [65, begun], max_new_tokens=2)
    assert text == "ickqu"


@given(st.integers(0, 50))
def test_a_healed_reply_continues_the_text_of_the_prompt(seed: int) -> None:
    names = FakeTokenizer(words=WORDS)
    settings = Sampling(temperature=2.0, top_p=1.0, seed=seed)
    text, tokens, _ = reply(
        generator(words=WORDS), Extras(token_healing=True), settings, [65, names.id_of("qu")], max_new_tokens=5
    )
    whole = names.detokenizer(continuing=True)
    assert "qu" + text == "".join(map(whole.push, tokens)) + whole.flush()
    assert tokens[0] in (names.id_of("qu"), names.id_of("quick"))


@pytest.mark.parametrize("prompt", [[65], [65, END], [65, 0xC3]])
def test_what_cannot_be_healed_is_left_as_it_is(prompt: list[int]) -> None:
    """A prompt of one token, a hidden token, a part of a character."""
    healed = reply(generator(), Extras(token_healing=True), prompt=prompt)
    assert healed[:2] == reply(generator(), Extras(), prompt=prompt)[:2]


def test_a_constraint_applies_to_what_a_healed_token_adds() -> None:
    names = FakeTokenizer(words=WORDS)
    rule = compile_regex(table(WORDS), "er!")
    text, tokens, last = reply(
        generator(words=WORDS), Extras(token_healing=True, constraint=rule), prompt=[65, names.id_of(" quick")]
    )
    assert (text, last.stop_reason) == ("er!", "eos")
    whole = names.detokenizer(continuing=True)
    assert "".join(map(whole.push, tokens)) == " quicker!"


@pytest.mark.parametrize("size", [END + 1, VOCABULARY + 9])
def test_a_constraint_may_know_of_more_or_fewer_tokens_than_the_model(size: int) -> None:
    known = TokenTable(FakeTokenizer(), size, {END})  # type: ignore[arg-type]
    healed = Extras(token_healing=True, constraint=compile_regex(known, "!{3}"))
    assert reply(generator(), healed)[0] == "!!!"
    assert reply(generator(), Extras(constraint=compile_regex(known, "!{3}")))[0] == "!!!"


def test_a_filter_is_told_what_was_healed() -> None:
    rule = Vowels()
    reply(generator(), Extras(token_healing=True, constraint=FilterConstraint(table(), rule)), prompt=[65, ord("e")])
    assert rule.prefix == "e"


# Hooks


def test_a_hook_sees_each_draw_and_may_change_it() -> None:
    def shout(choice: Choice) -> None:
        if choice.token == ord("b"):
            choice.token = ord("B")

    text, tokens, _ = reply(generator(saying("abcb", 3)), Extras(hooks=(shout,)), GREEDY)
    assert (text, tokens) == ("aBcB", list(b"aBcB"))


# How tokens were drawn


def test_probabilities_and_top_tokens_are_those_of_what_the_settings_leave() -> None:
    model = FakeModel()
    settings = Sampling(temperature=0.7, top_k=4, top_p=1.0, seed=2)
    subject = generator(model)
    subject.begin_stream_ex(PROMPT, settings, max_new_tokens=6, extras=Extras(return_top_tokens=6))
    for result in stream(subject):
        position = len(subject.tokens) - 1
        logits = model.logits(subject.tokens[:-1])
        left = Sampler(settings, PROMPT).candidates(logits, position)
        weights = np.exp(left.logits.astype(np.float64))
        expected = dict(zip(left.ids.tolist(), (weights / weights.sum()).tolist(), strict=True))
        (details,) = result.details
        assert [id for id, _ in details.top] == sorted(expected, key=lambda id: -expected[id])
        assert dict(details.top) == pytest.approx(expected, rel=1e-5)
        assert details.probability == pytest.approx(expected[subject.tokens[-1]], rel=1e-5)
        assert details.logits is None


def test_logits_are_those_of_the_model_whatever_was_masked_and_stay_as_they_are() -> None:
    """exllamav2's sampler works in place: its logits come back with penalties and masks in them."""
    model = FakeModel()
    subject = generator(model)
    settings = Sampling(temperature=0.5, seed=1, repetition_penalty=1.5)
    extras = Extras(return_logits=True, constraint=compile_regex(table(), "[a-c]{5}"), banned_strings=("ab",))
    subject.begin_stream_ex(PROMPT, settings, extras=extras)
    details = [detail for result in stream(subject) for detail in result.details]
    assert len(details) == 5
    for count, detail in enumerate(details):
        assert detail.logits is not None
        assert (detail.logits == model.logits(subject.tokens[: len(PROMPT) + count])).all()


def test_logits_outlive_the_memory_they_came_in() -> None:
    """As on a GPU, whose logits all come through one buffer."""

    class Reusing(FakeModel):
        buffer = torch.empty(1, VOCABULARY)

        def forward(self, tokens: torch.Tensor, cache: FakeCache, last_only: bool = False) -> torch.Tensor:
            return self.buffer.copy_(super().forward(tokens, cache, last_only))

    subject = generator(Reusing())
    subject.begin_stream_ex(PROMPT, GREEDY, extras=Extras(return_logits=True))
    first, _ = (subject.stream_ex().details[0].logits for _ in range(2))
    assert first is not None
    assert (first == FakeModel().logits(PROMPT)).all()


def test_details_are_withheld_with_their_tokens_and_come_with_none_too_few() -> None:
    subject = generator(saying("a\nUser b", 3))
    subject.set_stop_conditions([END, "\nUser:"])
    subject.begin_stream_ex(PROMPT, GREEDY, extras=Extras(return_probabilities=True))
    results = list(stream(subject))
    assert [len(result.details) for result in results] == [len(result.tokens) for result in results]
    assert sum(len(result.tokens) for result in results) == 8
    assert all(detail.probability == 1 for result in results for detail in result.details)


def test_without_being_asked_nothing_is_told() -> None:
    assert reply(generator(), Extras())[2].details == ()
    with pytest.raises(UsageError, match="return_top_tokens"):
        Extras(return_top_tokens=-1)


# The vocabulary


def test_the_sampler_knows_the_tokenizers_vocabulary() -> None:
    """With its sequence breakers: a passage may be repeated after a full stop, unless the settings name no breakers."""
    model, prompt = FakeModel(lambda tokens: list(b"b.")[len(tokens) % 2]), list(b"b.b.b.")
    asked = Sampling(temperature=0, dry_multiplier=100.0)
    assert reply(generator(model), Extras(), asked, prompt, max_new_tokens=1)[0] == "b"
    free = Sampling(temperature=0, dry_multiplier=100.0, dry_breakers=())
    assert reply(generator(model), Extras(), free, prompt, max_new_tokens=1)[0] != "b"
