"""The message tree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exl2chat.chat.events import Message
from exl2chat.chat.tree import Head, Tree
from exl2chat.errors import SessionError

from .strategies import steps


def chat(*turns: str) -> list[Message | Head]:
    """Messages in a row: "u1" is the user's, "a1" the assistant's."""
    parents = [None, *turns]
    roles = {"u": "user", "a": "assistant"}
    return [Message(id, parent, roles[id[0]], id) for id, parent in zip(turns, parents, strict=False)]


def ids(tree: Tree) -> list[str]:
    return [message.id for message in tree.path]


@given(steps(), st.data())
def test_one_step_at_a_time_or_all_at_once(drawn: list[Message | Head], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(drawn)))
    assert Tree().replay(drawn[:cut]).replay(drawn[cut:]) == Tree().replay(drawn)


@given(steps())
def test_nothing_is_ever_erased_and_the_head_is_the_last_step(drawn: list[Message | Head]) -> None:
    tree = Tree().replay(drawn)
    assert list(tree.messages.values()) == [step for step in drawn if isinstance(step, Message)]
    assert tree.head == drawn[-1].id
    assert sum(map(len, tree.children.values())) == len(tree.messages)


@given(steps())
def test_what_is_chosen_leads_to_the_head(drawn: list[Message | Head]) -> None:
    tree = Tree().replay(drawn)
    at = None
    for message in tree.path:
        assert tree.chosen[at] == message.id
        at = message.id
    assert at == tree.head


@given(steps())
def test_redo_is_the_inverse_of_undo(drawn: list[Message | Head]) -> None:
    tree = Tree().replay(drawn)
    leaf = tree.move(tree.leaf(tree.head))
    undone = leaf.move(leaf.before_exchange())
    if undone.head != leaf.head:
        assert undone.move(undone.after_exchange()).head == leaf.head


def test_a_branch_is_left_and_found_again_where_one_was() -> None:
    tree = Tree().replay([*chat("u1", "a1", "u2", "a2"), Message("b1", "u1", "assistant", "other")])
    assert ids(tree) == ["u1", "b1"]
    assert [message.id for message in tree.siblings("b1")] == ["a1", "b1"]
    assert tree.leaf("a1") == "a2"
    assert ids(tree.move(tree.leaf("a1"))) == ["u1", "a1", "u2", "a2"]


def test_undo_to_the_very_beginning() -> None:
    tree = Tree().replay(chat("u1", "a1", "u2", "a2"))
    once = tree.move(tree.before_exchange())
    twice = once.move(once.before_exchange())
    assert (ids(once), ids(twice)) == (["u1", "a1"], [])
    assert twice.before_exchange() is None
    assert ids(twice.move(twice.after_exchange())) == ["u1", "a1"]


@pytest.mark.parametrize(
    "step", [Message("u1", None, "user", "again"), Message("x", "nobody", "user", ""), Head("nobody")]
)
def test_what_does_not_fit_is_refused(step: Message | Head) -> None:
    with pytest.raises(SessionError):
        Tree().replay([*chat("u1"), step])


def test_ten_thousand_messages_load_in_linear_time() -> None:
    """The walk that marks the path stops at the previous head: without that this would take fifty million steps."""
    tree = Tree().replay(chat(*(f"{'ua'[n % 2]}{n}" for n in range(10_000))))
    assert len(tree.path) == 10_000
