"""What slides over the chat: pages to read and lists to choose from. Escape closes each of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from exl2chat.safetext import scrub_line
from exl2chat.ui.look import Look
from exl2chat.ui.section import Entry
from exl2chat.ui.transcript import Transcript


class Page(ModalScreen[None]):
    """Markdown to read."""

    BINDINGS: ClassVar = [
        Binding("escape,q,f1,enter", "dismiss", "close"),
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
        Binding("home", "home", show=False),
        Binding("end", "end", show=False),
    ]

    def __init__(self, title: str, markdown: str, look: Look) -> None:
        super().__init__()
        self._entry = Entry("page", "system", scrub_line(title))
        self._markdown = markdown
        self._look = look

    def compose(self) -> ComposeResult:
        with Vertical(classes="panel"):
            yield Transcript(self._look)
            yield Static("Esc closes · ↑ ↓ PgUp PgDn scroll", classes="panel-hint")

    def on_mount(self) -> None:
        self._view.show([(self._entry, self._markdown)])
        self.call_after_refresh(self._view.home)

    @property
    def _view(self) -> Transcript:
        return self.query_one(Transcript)

    def action_move(self, rows: int) -> None:
        self._view.move(rows)

    def action_page(self, pages: int) -> None:
        self._view.page(pages)

    def action_home(self) -> None:
        self._view.home()

    def action_end(self) -> None:
        self._view.follow()


@dataclass(frozen=True, slots=True)
class Choice:
    """A line of a list: what choosing it returns, what it says, what stands beside it. A disabled one only informs."""

    id: str
    label: str
    detail: str = ""
    disabled: bool = False


class Picker(ModalScreen[str | None]):
    """A list filtered by what is typed. Returns the id of the chosen line, None on escape."""

    BINDINGS: ClassVar = [
        Binding("escape", "dismiss", "close"),
        Binding("up", "step(-1)", show=False, priority=True),
        Binding("down", "step(1)", show=False, priority=True),
        Binding("pageup", "step(-10)", show=False, priority=True),
        Binding("pagedown", "step(10)", show=False, priority=True),
    ]

    def __init__(
        self,
        title: str,
        choices: Sequence[Choice],
        query: str = "",
        marked: str = "",
        preview: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__()
        self._title = title
        self._choices = choices
        self._query = query
        self._marked = marked
        self._preview = preview
        self._rows: list[int] = []  # of those shown, the ones that can be chosen
        self._options = OptionList(compact=True)

    def compose(self) -> ComposeResult:
        with Vertical(classes="panel"):
            yield Static(Text(self._title, "bold"))
            yield Input(scrub_line(self._query), placeholder="type to filter", compact=True)
            yield self._options
            yield Static("Enter chooses · ↑ ↓ move · Esc closes", classes="panel-hint")

    def on_mount(self) -> None:
        self._options.can_focus = False
        self._filter(self._query)

    @on(Input.Changed)
    def _on_query(self, event: Input.Changed) -> None:
        self._filter(event.value)

    @on(Input.Submitted)
    def _on_chosen(self) -> None:
        self._options.action_select()

    @on(OptionList.OptionSelected)
    def _on_option_chosen(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)

    @on(OptionList.OptionHighlighted)
    def _on_option_marked(self, event: OptionList.OptionHighlighted) -> None:
        if self._preview and event.option_id:
            self._preview(event.option_id)

    def action_step(self, rows: int) -> None:
        if self._rows:
            at = self._rows.index(self._options.highlighted or 0) + rows
            self._options.highlighted = self._rows[min(max(at, 0), len(self._rows) - 1)]

    def _filter(self, query: str) -> None:
        words = query.casefold().split()
        shown = [c for c in self._choices if all(word in f"{c.label} {c.detail}".casefold() for word in words)]
        self._rows = [number for number, choice in enumerate(shown) if not choice.disabled]
        options = self._options
        options.clear_options()
        rows = [Option(_line(choice), choice.id, choice.disabled) for choice in shown]
        options.add_options(rows or [Option("no match", disabled=True)])
        if self._rows:
            at = [number for number in self._rows if shown[number].id == self._marked]
            options.highlighted = at[0] if at else self._rows[0]


def _line(choice: Choice) -> Text:
    return Text.assemble(scrub_line(choice.label), "  ", (scrub_line(choice.detail), "dim"))
