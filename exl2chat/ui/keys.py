"""The one table of keys: bindings, the line of hints and the help page come from it."""

from dataclasses import dataclass

from textual.binding import Binding, BindingType


@dataclass(frozen=True, slots=True)
class Key:
    """What a key does. One without an `action` belongs to the prompt, where the text area asks for it first."""

    label: str
    does: str
    hint: str = ""
    keys: str = ""
    action: str = ""


KEYS = (
    Key("Enter", "send", "send"),
    Key(
        "Ctrl+J",
        "new line; also Shift+Enter where the terminal tells it apart, and a backslash before Enter",
        "newline",
    ),
    Key(
        "Esc",
        "take back what was queued last; else stop the reply and keep its text; cancel a load; close a panel",
        "stop",
        "escape",
        "stop",
    ),
    Key("/", "begin a command; Tab takes the marked completion", "commands"),
    Key("F1", "this page", "help", "f1", "help"),
    Key("Ctrl+D", "quit, when the prompt is empty", "quit"),
    Key("F3", "open a saved chat", "sessions", "f3", "command('open')"),
    Key("F4", "choose the colours", "themes", "f4", "command('theme')"),
    Key("F6", "counts and speeds", "", "f6", "command('stats')"),
    Key("Ctrl+N", "new chat", "new chat", "ctrl+n", "command('new')"),
    Key("Ctrl+C", "copy what is selected; else as Esc; else clear the prompt; twice: quit", "", "ctrl+c", "interrupt"),
    Key("Ctrl+P", "search the commands"),
    Key("↑ ↓", "what was sent before, from the first or last row of the prompt"),
    Key("PgUp PgDn", "scroll, while typing too"),
    Key("Ctrl+Home", "go to the first message"),
    Key("End", "go to the last row and follow; Ctrl+End from anywhere in the prompt"),
)
HINTS = tuple(f"{key.label} {key.hint}" for key in KEYS if key.hint)


def bindings() -> list[BindingType]:
    """The app's bindings. Ctrl+C comes before the text area's own."""
    return [
        Binding(key.keys, key.action, key.does, show=False, priority=key.keys == "ctrl+c") for key in KEYS if key.action
    ]


def keys_page() -> str:
    """All keys as Markdown."""
    return "\n".join(["| key | what it does |", "|---|---|", *(f"| {key.label} | {key.does} |" for key in KEYS)])
