"""The list of completions above the prompt. It never has the focus: the prompt moves it."""

from collections.abc import Sequence

from rich.text import Text
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from exl2chat.chat.completion import Completion
from exl2chat.safetext import scrub_line


class CompletionList(OptionList, can_focus=False):
    """Hidden while it has nothing to offer. `made_for` is the text of the prompt that it completes."""

    def __init__(self) -> None:
        super().__init__(compact=True)
        self._offered: Sequence[Completion] = ()
        self.made_for = ""
        self.display = False

    @property
    def is_open(self) -> bool:
        """Whether there is something to choose from."""
        return bool(self.display)

    @property
    def chosen(self) -> str:
        """The text that the marked completion makes of the prompt."""
        return self._offered[self.highlighted or 0].text

    def offer(self, line: str, completions: Sequence[Completion]) -> None:
        """Show these, the completions of `line`."""
        self.made_for = line
        if [c.text for c in completions] == [c.text for c in self._offered] and self.is_open:
            return
        self._offered = completions
        self.clear_options()
        wide = min(36, max((len(c.display) for c in completions), default=0))
        self.add_options(Option(_line(completion, wide)) for completion in completions)
        self.display = bool(completions)
        if completions:
            self.highlighted = 0

    def close(self) -> None:
        """Hide until the text changes."""
        self.display = False

    def step(self, rows: int) -> None:
        """Mark another one."""
        self.highlighted = ((self.highlighted or 0) + rows) % len(self._offered)

    def says(self, text: str) -> bool:
        """Whether one of them is `text` as it stands."""
        return any(completion.text.strip() == text.strip() for completion in self._offered)


def _line(completion: Completion, wide: int) -> Text:
    name = scrub_line(completion.display)
    return Text.assemble(name[:wide].ljust(wide + 2), (scrub_line(completion.help), "dim"))
