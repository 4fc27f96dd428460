"""The reference's filters, by themselves and as constraints of the generators."""

from collections.abc import Callable

import pytest
import torch

from exl2chat.engine.filters import FilterConstraint
from exl2chat.exllamav2 import ExLlamaV2Tokenizer
from exl2chat.exllamav2.generator.filters import ExLlamaV2Filter, ExLlamaV2PrefixFilter, ExLlamaV2SelectFilter


def texts(rule: ExLlamaV2Filter, tokenizer: ExLlamaV2Tokenizer, prefix: str = "") -> set[str]:
    """Every text that a filter lets be written in up to one token a character, up to its end."""
    pieces = tokenizer.get_id_to_piece_list()
    found: set[str] = set()

    def walk(state: ExLlamaV2Filter, written: str) -> None:
        passed, ends = state.next()
        assert passed is not None
        assert set(ends) <= set(passed)
        for token in passed:
            if token in ends:
                found.add(written + pieces[token])
            elif pieces[token] and "\ufffd" not in pieces[token]:
                following = state.clone()
                following.feed(torch.tensor([[token]]))
                walk(following, written + pieces[token])

    rule.begin(prefix)
    walk(rule, "")
    return found


def test_select_lets_pass_its_options_and_ends_them(tokenizer: ExLlamaV2Tokenizer) -> None:
    assert texts(ExLlamaV2SelectFilter(None, tokenizer, ["yes", " no", "maybe"]), tokenizer) == {"yes", " no", "maybe"}


def test_of_options_that_begin_alike_select_ends_with_the_shorter(tokenizer: ExLlamaV2Tokenizer) -> None:
    assert texts(ExLlamaV2SelectFilter(None, tokenizer, ["no one", "no", "not"]), tokenizer) == {"no"}
    assert texts(ExLlamaV2SelectFilter(None, tokenizer, ["aB", "Abc"], case_insensitive=True), tokenizer) == {
        "ab", "aB", "Ab", "AB",
    }  # fmt: skip


def test_select_goes_on_from_what_a_healed_token_said(tokenizer: ExLlamaV2Tokenizer) -> None:
    rule = ExLlamaV2SelectFilter(None, tokenizer, ["ay", "ight"])
    assert texts(rule, tokenizer, "d") == {"day", "dight"}


@pytest.mark.parametrize("prefixes", ["Sure: ", ["Sure: ", "Sure: yes", "Ok"]])
def test_prefix_asks_for_its_text_and_then_for_nothing(
    prefixes: str | list[str], tokenizer: ExLlamaV2Tokenizer
) -> None:
    rule = ExLlamaV2PrefixFilter(None, tokenizer, prefixes)
    tokens = tokenizer.native.encode_following("Sure: ")
    assert len(tokens) > 1
    for token in tokens:
        passed, ends = rule.next()
        assert passed is not None
        assert token in passed
        assert tokenizer.eos_token_id not in passed
        assert not ends
        rule.feed(torch.tensor([[token]]))
    for token in tokens:
        assert rule.next() == (None, set())
        rule.feed(torch.tensor([[token]]))
    rule.begin("")
    assert rule.next()[0] is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda t: ExLlamaV2SelectFilter(None, t, ["one two", "one three"]),
        lambda t: ExLlamaV2PrefixFilter(None, t, "one t"),
    ],
)
def test_filters_are_constraints_that_can_be_taken_back(
    make: Callable[[ExLlamaV2Tokenizer], ExLlamaV2Filter], tokenizer: ExLlamaV2Tokenizer
) -> None:
    constraint = FilterConstraint(tokenizer.token_table, make(tokenizer))
    constraint.begin()
    masks = [constraint.mask()]
    tokens = tokenizer.native.encode_following("one two")
    for token in tokens:
        constraint.advance(token)
        masks += [constraint.mask()] if not constraint.finished else []
    for count in range(len(tokens)):
        constraint.rollback(1)
        assert (constraint.mask() == masks[len(tokens) - 1 - count]).all()


class Digits(ExLlamaV2Filter):
    """A filter as scripts have them: state in a list, no `clone`."""

    def begin(self, prefix_str: str) -> None:  # noqa: ARG002
        self.seen: list[int] = []

    def feed(self, token: torch.Tensor) -> None:
        self.seen.append(int(token[0][0]))

    def next(self) -> tuple[list[int], list[int]]:
        digits = [self.tokenizer.single_id(digit) for digit in "0123456789"]
        return digits, digits if len(self.seen) == 2 else []


def test_a_filter_of_the_user_needs_no_clone_of_its_own(tokenizer: ExLlamaV2Tokenizer) -> None:
    rule = Digits(None, tokenizer)
    rule.begin("")
    clone = rule.clone()
    clone.feed(torch.tensor([[1]]))
    assert (rule.seen, clone.seen) == ([], [1])
    assert (clone.tokenizer, type(clone)) == (tokenizer, Digits)
    constraint = FilterConstraint(tokenizer.token_table, rule)
    constraint.begin()
    for _ in range(3):
        assert not constraint.finished
        constraint.advance(constraint.mask().argmax())
    assert constraint.finished


def test_a_filter_without_next_says_so() -> None:
    rule = ExLlamaV2Filter(None, None)
    rule.begin("")
    rule.feed(torch.tensor([[1]]))
    for call in (rule.next, rule.prepare_logit_mask, lambda: rule.mask_logits(torch.zeros(1, 1, 4))):
        with pytest.raises(NotImplementedError, match="ExLlamaV2Filter has no"):
            call()
    assert not rule.can_mask_logits()
    assert not rule.use_background_worker()
