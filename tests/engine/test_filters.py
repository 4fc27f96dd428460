"""Filters that users write, and several constraints at once."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from exl2chat.engine.compile_grammar import compile_choice, compile_regex
from exl2chat.engine.constraints import AllOf, Constraint
from exl2chat.engine.filters import FilterConstraint
from exl2chat.errors import ChatError
from tests.engine.constrained import reply, spelled, table, text_of

KIND = "byte_level"
TABLE = table(KIND)
ENDS = set(TABLE.end_ids.tolist())


class Balanced:
    """Lets a reply be brackets that close, at most `deepest` deep; the bracket that closes the first completes it."""

    def __init__(self, deepest: int) -> None:
        self.deepest = deepest
        self.history: list[int] = []
        self.prefix: str | None = None
        self.asked = 0

    def clone(self) -> "Balanced":
        copy = Balanced(self.deepest)
        copy.history, copy.prefix = list(self.history), self.prefix
        return copy

    def begin(self, prefix_str: str) -> None:
        self.history, self.prefix = [], prefix_str

    def feed(self, token: torch.Tensor) -> None:
        assert token.shape == (1, 1)
        self.history.append(int(token[0][0]))

    @property
    def depth(self) -> int:
        return sum(1 if token == OPEN else -1 for token in self.history)

    def next(self) -> tuple[list[int] | None, set[int]]:
        self.asked += 1
        allowed = [OPEN] * (self.depth < self.deepest) + [CLOSE] * (self.depth > 0)
        return [*allowed, -5, 10**6], {CLOSE} if self.depth == 1 else set()


class Masking(Balanced):
    """The same by masked logits."""

    def can_mask_logits(self) -> bool:
        return True

    def prepare_logit_mask(self) -> bool:
        return True

    def mask_logits(self, logits: torch.Tensor) -> torch.Tensor:
        allowed, _ = Balanced.next(self)
        masked = torch.full_like(logits, -torch.inf)
        inside = [token for token in allowed or [] if 0 <= token < TABLE.size]
        masked[inside] = logits[inside]
        return masked

    def next(self) -> Any:
        raise AssertionError("a filter that masks logits is asked for ids")


class Anything:
    def clone(self) -> "Anything":
        return self

    def begin(self, prefix_str: str) -> None: ...
    def feed(self, token: torch.Tensor) -> None: ...
    def next(self) -> tuple[None, set[int]]:
        return None, set()


[OPEN], [CLOSE] = spelled(KIND, "["), spelled(KIND, "]")


def allowed(constraint: Constraint) -> list[int]:
    return np.flatnonzero(constraint.mask()).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_a_reply_is_what_the_filter_lets_pass(seed: int) -> None:
    constraint = FilterConstraint(TABLE, Balanced(3))
    constraint.begin()
    text = text_of(KIND, reply(constraint, seed, ENDS))
    while "[]" in text:
        assert text.startswith("[")
        text = text.replace("[]", "")
    assert text == ""


def test_the_token_that_completes_finishes_the_reply() -> None:
    constraint = FilterConstraint(TABLE, Balanced(3))
    constraint.begin()
    for token in (OPEN, OPEN, CLOSE):
        constraint.advance(token)
        assert not constraint.finished
    constraint.advance(CLOSE)
    assert constraint.finished
    assert constraint.accepting
    with pytest.raises(ChatError):
        constraint.advance(OPEN)


@pytest.mark.parametrize("rule", [Balanced, Masking])
def test_taking_back_and_cloning_feed_the_filter_again(rule: type[Balanced]) -> None:
    constraint, choose, tokens = FilterConstraint(TABLE, rule(4)), random.Random(1), list[int]()
    constraint.begin()
    for _ in range(80):
        if not constraint.finished and choose.random() < 0.6:
            tokens.append(choose.choice(allowed(constraint)))
            constraint.advance(tokens[-1])
        else:
            count = choose.randint(0, len(tokens))
            constraint.rollback(count)
            del tokens[len(tokens) - count :]
        fresh = FilterConstraint(TABLE, rule(4))
        fresh.begin()
        for token in tokens:
            fresh.advance(token)
        for other in (fresh, constraint.clone()):
            assert (other.finished, other.accepting) == (constraint.finished, constraint.accepting)
            assert other.finished or allowed(other) == allowed(constraint)
    with pytest.raises(ValueError, match="of"):
        constraint.rollback(len(tokens) + 1)


def test_a_filter_is_asked_once_for_a_position() -> None:
    rule = Balanced(3)
    constraint = FilterConstraint(TABLE, rule)
    constraint.begin()
    constraint.mask()[:] = False
    assert allowed(constraint) == [OPEN]
    assert not constraint.accepting
    constraint.advance(OPEN)
    assert rule.asked == 1


def test_a_token_that_does_not_pass_is_refused_and_not_fed() -> None:
    rule = Balanced(3)
    constraint = FilterConstraint(TABLE, rule)
    constraint.begin()
    with pytest.raises(ChatError, match="not what the filter asks for"):
        constraint.advance(CLOSE)
    assert rule.history == []


def test_a_filter_hears_what_a_healed_token_said() -> None:
    rule = Balanced(3)
    FilterConstraint(TABLE, rule).begin(healed=OPEN)
    assert rule.prefix == "["
    FilterConstraint(TABLE, rule).begin()
    assert rule.prefix == ""


def test_a_filter_that_lets_everything_pass_lets_the_reply_end() -> None:
    constraint = FilterConstraint(TABLE, Anything())
    constraint.begin()
    assert constraint.mask().all()
    assert constraint.accepting
    assert not constraint.finished


def test_a_filter_that_excludes_everything_is_an_error() -> None:
    constraint = FilterConstraint(TABLE, Balanced(0))
    constraint.begin()
    with pytest.raises(ChatError, match="excludes every token"):
        constraint.mask()


def test_several_constraints_hold_together() -> None:
    both = AllOf([compile_regex(TABLE, "[a-e]+"), compile_choice(TABLE, ["bead", "beta", "deed", "b"])])
    texts = set()
    for seed in range(40):
        both.begin()
        texts.add(text_of(KIND, reply(both, seed, ENDS)))
    assert texts == {"bead", "deed", "b"}


def test_a_token_that_one_of_several_refuses_is_fed_to_none() -> None:
    first, second = compile_regex(TABLE, "[a-z]+"), compile_regex(TABLE, "[ab]+")
    both = AllOf([first, second])
    both.begin()
    before = allowed(first)
    with pytest.raises(ChatError):
        both.advance(*spelled(KIND, "c"))
    assert allowed(first) == before


def test_several_constraints_are_taken_back_and_cloned_together() -> None:
    both = AllOf([compile_regex(TABLE, "[ab]+"), compile_regex(TABLE, "ab|ba")])
    both.begin()
    start = allowed(both)
    clone = both.clone()
    for token in spelled(KIND, "a") + spelled(KIND, "b"):
        both.advance(token)
    assert both.finished
    assert allowed(clone) == start
    both.rollback(2)
    assert allowed(both) == start


def test_what_one_of_several_forces_is_forced() -> None:
    both = AllOf([compile_regex(TABLE, "[a-zA-Z ]+"), compile_choice(TABLE, ["The capital of France is Paris"])])
    both.begin()
    assert len(both.forced()) > 3


def test_constraints_that_exclude_each_other_are_an_error() -> None:
    both = AllOf([compile_regex(TABLE, "a"), compile_regex(TABLE, "b")])
    both.begin()
    with pytest.raises(ChatError, match="no token satisfies all"):
        both.mask()
