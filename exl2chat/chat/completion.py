"""What a half-typed command could become."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from exl2chat.chat.commands import BY_NAME, COMMANDS, Command, usage
from exl2chat.chat.export import FORMATS
from exl2chat.chat.session import saved_sessions
from exl2chat.paths import Paths, theme_files
from exl2chat.settings import BY_NAME as SETTINGS
from exl2chat.settings import OPTIONS

LIMIT = 50  # sessions looked at and words offered: completion runs on every key
Words = Iterable[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Completion:
    """`text` takes the place of everything before the cursor; `display` and `help` are what a list shows."""

    text: str
    display: str
    help: str = ""


def complete(line: str, models: Sequence[str], paths: Paths) -> list[Completion]:
    """The completions of `line`, the text before the cursor; none when it is not the beginning of a command.

    `models` are the names of those that are here.
    """
    if not line.startswith("/") or "\n" in line:
        return []
    name, space, typed = line[1:].partition(" ")
    if not space:
        rows = {row.name: row for row in COMMANDS}
        found = _matching(name, "/", ((row.name, row.summary) for row in COMMANDS))
        return [Completion(c.text + " ", usage(rows[c.display]), c.help) for c in found]
    command = BY_NAME.get(name)
    if command is None:
        return []
    first, space, second = typed.partition(" ")
    match command.completes:
        case "session":
            return _sessions(typed, f"/{name} ", paths)
        case "file":
            return [
                *_matching(typed, f"/{name} ", [("off", "replies may be anything again")]),
                *_files(typed, f"/{name} "),
            ]
        case "model":
            return _matching(typed, f"/{name} ", ((word, "") for word in models))
        case "theme":
            return _matching(typed, f"/{name} ", ((word, "") for word in theme_files(paths)))
        case "setting" if space:
            return _matching(second, f"/{name} {first} ", _values(first))
        case "export" if space:
            return _files(second, f"/{name} {first} ")
        case _ if not space:
            return _matching(first, f"/{name} ", _words(command))
    return []


def _words(command: Command) -> Words:
    """The fixed words that may come first after `command`, with help."""
    match command.completes:
        case "command":
            return ((row.name, row.summary) for row in COMMANDS)
        case "setting":
            return ((row.name, row.help) for row in OPTIONS)
        case "branch":
            return (("next", "the version after this one"), ("prev", "the version before this one"))
        case "export":
            return ((name, form.help) for name, form in FORMATS.items())
    return ()


def _values(name: str) -> Words:
    """What the setting `name` may be set to, where that is a list."""
    row = SETTINGS.get(name.replace("-", "_"))
    if row is None:
        return ()
    return (*((word, "") for word in row.choices), ("default", "take back what /set said"))


def _sessions(typed: str, kept: str, paths: Paths) -> list[Completion]:
    """The latest sessions with `typed` in their title."""
    needle = typed.casefold()
    return [
        Completion(kept + each.id, each.title, f"{each.messages} message{'s' * (each.messages != 1)}")
        for each in islice(saved_sessions(paths), LIMIT)
        if needle in each.title.casefold() or each.id.startswith(needle)
    ]


def _files(typed: str, kept: str) -> list[Completion]:
    """Files and folders whose path begins with `typed`."""
    folder, slash, name = typed.rpartition("/")
    try:
        found = sorted(Path(os.path.expanduser(folder + slash or ".")).iterdir())
    except (OSError, ValueError):
        return []
    shown = (entry.name + "/" * os.path.isdir(entry) for entry in found if entry.name.startswith(name))
    return [Completion(kept + folder + slash + each, each) for each in shown][:LIMIT]


def _matching(typed: str, kept: str, words: Words) -> list[Completion]:
    """The words that begin with what is typed, then those that contain it; upper and lower case are one."""
    needle = typed.casefold()
    found = [Completion(kept + word, word, help) for word, help in words if needle in word.casefold()]
    return sorted(found, key=lambda each: not each.display.casefold().startswith(needle))[:LIMIT]
