"""The conversation as a tree of messages: an edit or a retry adds a sibling, undo moves the head, nothing is erased.

Every parent precedes its children, so a cycle cannot be written down. Beside the head the tree remembers which child of
each message was last on the path: going back to a branch, or redoing what was undone, returns to where one was.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from exl2chat.chat.events import Message
from exl2chat.errors import SessionError


class Head(msgspec.Struct, frozen=True, tag_field="k", tag="head"):
    """The head moved to message `id`; None is before the first message."""

    id: str | None


@dataclass(frozen=True)
class Tree:
    """Messages in order of arrival, the head, and for each parent the child last on the path."""

    messages: Mapping[str, Message] = field(default_factory=dict)
    chosen: Mapping[str | None, str] = field(default_factory=dict)
    head: str | None = None

    def replay(self, steps: Iterable[Message | Head]) -> "Tree":
        """The tree after `steps`. SessionError for a message known already, an unknown parent or an unknown head."""
        messages, chosen, head = dict(self.messages), dict(self.chosen), self.head
        for step in steps:
            if isinstance(step, Message):
                if step.id in messages:
                    raise SessionError(f"message '{step.id}' exists twice")
                if step.parent is not None and step.parent not in messages:
                    raise SessionError(f"message '{step.id}' answers '{step.parent}', which does not exist")
                messages[step.id] = step
            elif step.id is not None and step.id not in messages:
                raise SessionError(f"there is no message '{step.id}'")
            at, previous, head = step.id, head, step.id
            while at is not None and at != previous:  # what led to the previous head is chosen already
                parent = messages[at].parent
                chosen[parent] = at
                at = parent
        return Tree(messages, chosen, head)

    def add(self, message: Message) -> "Tree":
        """With `message`, which becomes the head."""
        return self.replay([message])

    def move(self, head: str | None) -> "Tree":
        """With another head."""
        return self.replay([Head(head)])

    @cached_property
    def path(self) -> tuple[Message, ...]:
        """The messages from the first to the head."""
        return self.path_to(self.head)

    def path_to(self, id: str | None) -> tuple[Message, ...]:
        """The messages from the first to `id`."""
        path = []
        while id is not None:
            path.append(self.messages[id])
            id = path[-1].parent
        return tuple(reversed(path))

    @cached_property
    def children(self) -> Mapping[str | None, tuple[Message, ...]]:
        """The messages below each parent, oldest first."""
        found: dict[str | None, list[Message]] = {}
        for message in self.messages.values():
            found.setdefault(message.parent, []).append(message)
        return {parent: tuple(below) for parent, below in found.items()}

    def siblings(self, id: str) -> tuple[Message, ...]:
        """The message `id` and its alternatives, oldest first."""
        return self.children[self.messages[id].parent]

    def leaf(self, id: str | None) -> str | None:
        """The end of the branch through `id` that was last on the path."""
        while id in self.chosen:
            id = self.chosen[id]
        return id

    def before_exchange(self) -> str | None:
        """Where undo moves the head: before the last user message of the path."""
        users = [message for message in self.path if message.role == "user"]
        return users[-1].parent if users else self.head

    def after_exchange(self) -> str | None:
        """Where redo moves the head: down the branch it was on, to just before the next user message but one."""
        at, users = self.head, 0
        while at in self.chosen:
            below = self.chosen[at]
            users += self.messages[below].role == "user"
            if users > 1:
                break
            at = below
        return at
