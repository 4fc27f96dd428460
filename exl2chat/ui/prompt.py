"""Where the user types: several lines, history, completion, pastes of any size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from rich.text import Text
from textual import events, on
from textual.binding import Binding
from textual.message import Message
from textual.widgets import TextArea
from textual.widgets.text_area import Edit, EditResult

from exl2chat.chat.completion import Completion
from exl2chat.safetext import scrub_controls
from exl2chat.ui.completion import CompletionList
from exl2chat.ui.safety import drawn, hold, release

PASTE_CHARACTERS, PASTE_LINES = 2000, 20
NEWLINE_KEYS = ("ctrl+j", "shift+enter", "shift+\r")


class Recall(Protocol):
    """Earlier messages, oldest first (`exl2chat.chat.history.History`)."""

    entries: list[str]

    def add(self, text: str) -> None: ...


class Prompt(TextArea):
    """Posts what the user sends. A long paste shows as a token in double brackets and is put back when it is sent.

    Other invisible characters show as stand-ins, likewise until the text is sent; control characters are never sent.
    `replaces` is the message that the text is to replace, if it is an edit; a text that is erased ends the edit.
    """

    BINDINGS: ClassVar = [
        Binding("pageup", "app.page(-1)", show=False),
        Binding("pagedown", "app.page(1)", show=False),
        Binding("ctrl+home", "app.home", show=False),
        Binding("ctrl+end", "app.follow", show=False),
        Binding("end", "end", show=False),
        Binding("ctrl+d", "leave", show=False),
        Binding("f6", "app.command('stats')", show=False),  # the text area would select the line
    ]

    @dataclass
    class Submitted(Message):
        """The user sent `text`, in place of the message `replaces` if it is an edit."""

        text: str
        replaces: str | None

    class EditEnded(Message):
        """The text that was to replace a message was erased."""

    class Left(Message):
        """The user asked to leave."""

    def __init__(
        self, history: Recall, completions: CompletionList, complete: Callable[[str], Sequence[Completion]]
    ) -> None:
        super().__init__(soft_wrap=True, tab_behavior="focus", highlight_cursor_line=False, compact=True)
        self._history = history
        self._completions = completions
        self._completions_of = complete
        self._recalled = 0  # how many steps back in the history; 0 is the draft
        self._draft = ""
        self._pastes: dict[str, str] = {}
        self._was_empty = True
        self.replaces: str | None = None

    @property
    def full_text(self) -> str:
        """What would be sent: pastes in place of their tokens, invisible characters in place of their stand-ins."""
        text = release(self.text)
        for token, paste in self._pastes.items():
            text = text.replace(token, paste)
        return text

    def _folded(self, text: str) -> str:
        """`text`, which was sent from here, as it looked before that: with tokens in place of long pastes."""
        for token, paste in self._pastes.items():
            text = text.replace(paste, token)
        return text

    def put(self, text: str) -> None:
        """Replace the text (it can be undone); the cursor goes to its end."""
        self.replace(text, self.document.start, self.document.end)
        self.move_cursor(self.document.end)
        self._recalled = 0

    def give(self, text: str, replaces: str | None) -> None:
        """Put `text`, which is to replace the message `replaces` if there is one, before what is typed."""
        text = self._folded(text)
        if self.text:
            self.insert(text + "\n", self.document.start)
        else:
            self.put(text)
        self.replaces = replaces

    def edit(self, edit: Edit) -> EditResult:
        """Change the text: whatever is typed, pasted or put does, at once. Undoing does not come through here."""
        edit.text = hold(scrub_controls(edit.text))
        result = super().edit(edit)
        self._end_edit()
        return result

    @on(TextArea.Changed)
    def _end_edit(self) -> None:
        """End the edit as soon as its text is erased; one of an empty message begins without any."""
        erased, self._was_empty = not self.text and not self._was_empty, not self.text
        if erased and self.replaces:
            self.replaces = None
            self.post_message(self.EditEnded())

    def get_line(self, line_index: int) -> Text:
        """The line as it is drawn."""
        line = super().get_line(line_index)
        line.plain = drawn(line.plain)
        return line

    async def _on_key(self, event: events.Key) -> None:
        if self._handles(event.key):
            event.stop()
            event.prevent_default()
            return
        await super()._on_key(event)

    def _handles(self, key: str) -> bool:
        """Whether the key did something here that the text area knows nothing of."""
        self._offer()  # a burst of keys is here before the list was made anew
        if self._completions.is_open and self._complete(key):
            return True
        if key == "enter":
            self._enter()
        elif key in NEWLINE_KEYS:
            self.insert("\n")
        elif key == "up" and self._on_first_row:
            self._recall(1)
        elif key == "down" and self._on_last_row:
            self._recall(-1)
        else:
            return key == "tab"
        return True

    @on(TextArea.Changed)
    def _offer(self) -> None:
        """Offer the completions of the text, unless that was done already."""
        line = self.text
        if line != self._completions.made_for:
            at_end = self.cursor_location == self.document.end
            self._completions.offer(line, self._completions_of(line) if at_end else ())

    def _complete(self, key: str) -> bool:
        if key in ("up", "down"):
            self._completions.step(-1 if key == "up" else 1)
        elif key == "escape":
            self._completions.close()
        elif key == "tab" or (key == "enter" and self._is_half_a_word):
            self.put(self._completions.chosen)
        else:
            return False
        return True

    @property
    def _is_half_a_word(self) -> bool:
        return not self.text.endswith(" ") and not self._completions.says(self.text)

    def _enter(self) -> None:
        """Send; after a backslash, begin a new line instead."""
        row, column = self.cursor_location
        if column and self.document.get_line(row)[column - 1] == "\\":
            self.replace("\n", (row, column - 1), (row, column))
            return
        text = self.full_text
        if text.strip():
            self._history.add(text)
            replaces, self.replaces = self.replaces, None
            self.put("")
            self.post_message(self.Submitted(text, replaces))

    @property
    def _on_first_row(self) -> bool:
        return self.wrapped_document.location_to_offset(self.cursor_location).y == 0

    @property
    def _on_last_row(self) -> bool:
        return self.wrapped_document.location_to_offset(self.cursor_location).y == self.wrapped_document.height - 1

    def _recall(self, steps: int) -> None:
        """Go back in the history or forward again; the draft waits at its front."""
        position = min(max(self._recalled + steps, 0), len(self._history.entries))
        if position == self._recalled:
            return
        if self._recalled == 0:
            self._draft = self.text
        self.put(self._folded(self._history.entries[-position]) if position else self._draft)
        self._recalled = position

    async def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        text = scrub_controls(event.text)
        lines = text.count("\n") + (not text.endswith("\n"))
        if len(text) > PASTE_CHARACTERS or lines > PASTE_LINES:
            token = f"⟦paste {len(self._pastes) + 1}: {lines} line{'s' * (lines != 1)}, {len(text)} characters⟧"
            self._pastes[token] = text
            text = token
        self.insert(text)

    async def action_end(self) -> None:
        if self.cursor_at_end_of_line:
            await self.run_action("app.follow")
        else:
            self.action_cursor_line_end()

    def action_leave(self) -> None:
        if self.text:
            self.action_delete_right()
        else:
            self.post_message(self.Left())
