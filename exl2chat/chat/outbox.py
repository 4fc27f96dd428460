"""The lines typed while the model was not free, and how a line becomes a message of the session."""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from exl2chat.chat import commands
from exl2chat.chat.events import FillPrompt, Message
from exl2chat.chat.grammar import literal
from exl2chat.chat.recall import begun
from exl2chat.chat.session import new_id, now
from exl2chat.errors import SessionError

if TYPE_CHECKING:
    from exl2chat.chat.controller import Controller


@dataclass(frozen=True, slots=True)
class Queued:
    """A line that waits; `replaces` is the message it is to branch from."""

    line: str
    replaces: str | None = None


def taken_back_words(key: str, queued: int, replying: bool) -> str:
    """What the user is told when `key`, which stops things, took a queued message back and left `queued` others."""
    then = "takes back the one before" if queued else "stops the reply" if replying else "cancels the load"
    return f"taken back; {key} again {then}"


class Outbox:
    """The queue of one controller."""

    def __init__(self, controller: "Controller") -> None:
        self._controller = controller
        self._queue: deque[Queued] = deque()

    @property
    def lines(self) -> tuple[str, ...]:
        """What waits, the next one first."""
        return tuple(entry.line for entry in self._queue)

    def add(self, line: str, replaces: str | None) -> None:
        """Let `line` wait for its turn."""
        self._queue.append(Queued(line, replaces))

    def return_newest(self) -> None:
        """Put the line added last back into the prompt."""
        self._return(self._queue.pop())

    def return_question(self, question: str | None) -> None:
        """Put a message that does not fit back into the prompt: on the path it would make every later prompt too long.

        It stays in the tree. If it was to replace a message that was answered, that one is shown again.
        """
        tree = self._controller.session.tree
        message = tree.messages.get(question or "")
        if message is None or message.role != "user" or tree.head != message.id:
            return
        answered = [other.id for other in tree.siblings(message.id) if tree.leaf(other.id) != other.id]
        replaces = answered[-1] if answered else None
        self._controller.move_head(tree.leaf(replaces) if replaces else message.parent)
        self._return(Queued(literal(message.text), replaces))

    async def send(self) -> None:
        """Send or obey what waits as long as the model is free."""
        controller = self._controller
        while self._queue and controller.phase == "ready" and not controller.busy:
            entry = self._queue.popleft()
            action = commands.parse(entry.line)
            if not isinstance(action, commands.Text):
                await controller.obey(action)
                continue
            try:
                message = self._save(action.text, entry.replaces)
                if message.role == "user":  # an edited reply is only saved
                    await controller.reply_to(message.id)
            except SessionError as fault:
                self._return(entry)
                controller.report(fault)

    def keep(self) -> None:
        """Save the messages that wait, unanswered, because the chat is about to end. Commands that wait are dropped."""
        while self._queue and not self._controller.session.read_only:
            entry = self._queue.popleft()
            action = commands.parse(entry.line)
            if isinstance(action, commands.Text):
                self._save(action.text, entry.replaces)

    def _save(self, text: str, replaces: str | None) -> Message:
        """Add the message to the session. SessionError when that is read-only."""
        controller, session = self._controller, self._controller.session
        controller.require_writable()
        replaced = session.tree.messages.get(replaces or "")
        parent, role = (replaced.parent, replaced.role) if replaced else (session.tree.head, "user")
        message = Message(new_id(), parent, role, text, now())
        if not session.tree.messages:
            controller.settings = begun(controller.settings)
        controller.remember()
        controller.add_message(message)
        return message

    def _return(self, entry: Queued) -> None:
        self._controller.emit(FillPrompt(entry.line, entry.replaces))
