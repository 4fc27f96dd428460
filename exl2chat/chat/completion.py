"""What a half-typed command could become."""

from collections.abc import Iterable
from dataclasses import dataclass

from exl2chat.chat.commands import BY_NAME, COMMANDS, Command, usage
from exl2chat.chat.export import FORMATS
from exl2chat.chat.session import list_sessions
from exl2chat.paths import Paths
from exl2chat.settings import BY_NAME as SETTINGS
from exl2chat.settings import OPTIONS

LIMIT = 50


@dataclass(frozen=True, slots=True)
class Completion:
    """`text` takes the place of everything before the cursor; `display` and `help` are what a list shows."""

    text: str
    display: str
    help: str = ""


@dataclass(frozen=True, slots=True)
class Names:
    """Words that only the front end knows."""

    models: tuple[str, ...] = ()
    themes: tuple[str, ...] = ()


def complete(line: str, names: Names, paths: Paths) -> list[Completion]:
    """The completions of `line`, the text before the cursor; none when it is not the beginning of a command."""
    if not line.startswith("/") or "\n" in line:
        return []
    word, space, typed = line.partition(" ")
    if not space:
        return _matching(word[1:], "/", ((row.name, usage(row), row.summary) for row in COMMANDS), end=" ")
    command = BY_NAME.get(word[1:])
    if command is None:
        return []
    before, _, last = typed.rpartition(" ")
    kept = f"{word} {before} " if before else f"{word} "
    match command.completes:
        case "setting" if before:
            return _matching(last, kept, _values(before))
        case "setting":
            return _matching(last, kept, ((row.name, row.name, row.help) for row in OPTIONS), end=" ")
        case "session":
            saved = list_sessions(paths)
            return _matching(typed, f"{word} ", ((s.id, s.title, f"{s.messages} messages") for s in saved))
        case "model" | "theme":
            words = names.models if command.completes == "model" else names.themes
            return _matching(typed, f"{word} ", ((name, name, "") for name in words))
        case _ if not before:
            return _matching(last, kept, _words(command))
    return []


def _words(command: Command) -> Iterable[tuple[str, str, str]]:
    """The fixed words that may come first after `command`, with help."""
    match command.completes:
        case "command":
            return ((row.name, row.name, row.summary) for row in COMMANDS)
        case "branch":
            return (("next", "next", "the version after this one"), ("prev", "prev", "the version before this one"))
        case "export":
            return ((name, name, build.__doc__ or "") for name, build in FORMATS.items())
    return ()


def _values(name: str) -> Iterable[tuple[str, str, str]]:
    """What the setting `name` may be set to, where that is a list."""
    row = SETTINGS.get(name.strip().replace("-", "_"))
    if row is None:
        return ()
    words = ("on", "off") if row.kind is bool else row.choices
    return (*((word, word, "") for word in words), ("default", "default", "take back what /set said"))


def _matching(typed: str, kept: str, candidates: Iterable[tuple[str, str, str]], end: str = "") -> list[Completion]:
    """Candidates (word, display, help) whose word or display begins with, else contains, what is typed."""
    needle = typed.casefold()
    first, later = [], []
    for word, display, help in candidates:
        shown = display.casefold()
        if word.casefold().startswith(needle) or shown.startswith(needle):
            first.append(Completion(kept + word + end, display, help))
        elif needle in shown:
            later.append(Completion(kept + word + end, display, help))
    return (first + later)[:LIMIT]
