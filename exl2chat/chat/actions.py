"""What the commands do. Each takes the controller and the text after the command's name."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from exl2chat.chat import pages
from exl2chat.chat.events import (
    ChooseSession,
    ChooseTheme,
    FillPrompt,
    Message,
    Notice,
    QuitRequested,
    SessionChanged,
    ShowPage,
)
from exl2chat.chat.export import FORMATS, write_export
from exl2chat.chat.forms import MEANING, Kind, form_of
from exl2chat.chat.grammar import literal
from exl2chat.chat.reply import require_loras
from exl2chat.chat.session import Session, find_session, session_files, slug
from exl2chat.chat.tree import Tree
from exl2chat.errors import SessionError, UsageError
from exl2chat.safetext import scrub_line
from exl2chat.settings import Value, option, require_theme

if TYPE_CHECKING:
    from exl2chat.chat.controller import Controller


async def retry(controller: "Controller", argument: str) -> None:
    """Reply once more to the message, or to what the message replied to."""
    message = chosen(controller.path, argument, "user")
    await controller.reply_to(message.id if message.role == "user" else message.parent)


async def go_on(controller: "Controller", _: str) -> None:
    """Continue the last reply; the longer one becomes its sibling."""
    last = controller.path[-1]
    await controller.reply_to(last.parent, last.text)


async def edit(controller: "Controller", argument: str) -> None:
    """Put a message into the prompt; what is sent then becomes its sibling."""
    message = chosen(controller.path, argument, "user")
    controller.emit(FillPrompt(literal(message.text), message.id))


async def undo(controller: "Controller", argument: str) -> None:
    """Move the head before the last question, k times."""
    controller.move_head(moved(controller.session.tree, Tree.before_exchange, count(argument)).head)


async def redo(controller: "Controller", argument: str) -> None:
    """Move the head after the next reply, k times."""
    tree = moved(controller.session.tree, Tree.after_exchange, count(argument))
    if tree.head == controller.session.tree.head:
        raise UsageError("/redo: nothing was undone here", "`/branch` shows other versions")
    controller.move_head(tree.head)


async def branch(controller: "Controller", argument: str) -> None:
    """Show a sibling of the message, by default of the last one that has any, with what follows it."""
    words = argument.split()
    number = next((word for word in words if word.startswith("#")), "")
    step = " ".join(word for word in words if word != number) or "next"
    tree = controller.session.tree
    if number:
        message = chosen(controller.path, number, "user")
    else:
        forks = [message for message in controller.path if len(tree.siblings(message.id)) > 1]
        if not forks:
            raise UsageError("/branch: every message here has one version", "`/retry` or `/edit` makes another")
        message = forks[-1]
    versions = tree.siblings(message.id)
    if step in ("next", "prev"):
        to = (versions.index(message) + (1 if step == "next" else -1)) % len(versions)
    elif 1 <= whole(step) <= len(versions):
        to = whole(step) - 1
    else:
        raise UsageError(f"/branch: '{step:.40}' is not next, prev or 1 to {len(versions)}")
    controller.move_head(tree.leaf(versions[to].id))


async def stop(controller: "Controller", _: str) -> None:
    await controller.stop()


async def new(controller: "Controller", argument: str) -> None:
    """Start a session kept where this one is kept; the settings stay as they are."""
    await controller.change_session(Session(controller.session.folder, argument))


async def open_session(controller: "Controller", argument: str) -> None:
    """Open the session called so; let the user choose where only parts of titles are. SessionError where none is."""
    if not argument:
        controller.emit(ChooseSession())
        return
    try:
        path = find_session(argument, controller.paths)
    except SessionError:
        files = session_files(controller.paths)
        names = (path.name if isinstance(found, str) else found.title for path, found in files)
        if not any(argument.casefold() in name.casefold() for name in names):
            raise
        controller.emit(ChooseSession(argument))
        return
    if os.path.realpath(path) != os.path.realpath(controller.session.file or ""):
        await controller.change_session(Session.open(path, controller.paths))


async def rename(controller: "Controller", argument: str) -> None:
    if not argument:
        raise UsageError("/rename: which title?", "/rename quantum cats")
    controller.require_writable()
    controller.session.rename(" ".join(argument.split()))
    controller.emit(SessionChanged())


async def fork(controller: "Controller", _: str) -> None:
    await controller.change_session(controller.session.fork())
    controller.emit(Notice("this is a copy now; it is saved with its next message"))


async def delete(controller: "Controller", _: str) -> None:
    """Move the file to the trash beside it and start a new session."""
    session = controller.session
    controller.require_writable()
    where = session.discard()
    await controller.change_session(Session(session.folder))
    controller.emit(Notice(f"moved to {scrub_line(str(where))}" if where else "forgotten"))


async def export(controller: "Controller", argument: str) -> None:
    """Write the path on show to a file: the format is a word, or the ending of the file's name."""
    first, _, rest = argument.partition(" ")
    form, name = (first, rest.strip()) if first in FORMATS else ("", argument)
    if name and not form and not set("./") & set(name):
        raise UsageError(
            f"/export: there is no format '{name:.40}'", f"{', '.join(FORMATS)}; a file without an ending is ./name"
        )
    path = Path(os.path.expanduser(name)) if name else None
    form = form or (path.suffix[1:] if path and path.suffix[1:] in FORMATS else "md")
    session = controller.session
    path = path or Path(f"{slug(session.title) or session.id}.{form}")
    write_export(path, form, session.title, controller.path, controller.settings["system"])
    controller.emit(Notice(f"written to {scrub_line(str(path.absolute()))}"))


async def model(controller: "Controller", argument: str) -> None:
    if not argument:
        controller.emit(ShowPage("Model", pages.model_page(controller)))
        return
    await controller.change_settings(controller.settings.with_value("/set", "model", argument))
    if controller.phase == "down":  # the same model once more
        await controller.load_model()


async def system(controller: "Controller", argument: str) -> None:
    """Show or change the system prompt; "off" sends none."""
    if not argument:
        controller.emit(ShowPage("System prompt", pages.system_page(controller.settings)))
        return
    value = "" if argument == "off" else argument
    await controller.change_settings(controller.settings.with_value("/set", "system", value))
    off = "no system prompt is sent; the template may have its own"
    controller.emit(Notice("system prompt changed" if value else off))


async def set_value(controller: "Controller", argument: str) -> None:
    """List the settings, show one, or change one; "default" takes back what `/set` said."""
    name, _, text = argument.partition(" ")
    if not name:
        controller.emit(ShowPage("Settings", pages.settings_page(controller.settings)))
        return
    row = option(name)
    if text.strip() == "default":
        await controller.change_settings(controller.settings.without("/set", row.name))
    elif text.strip():
        await _change(controller, row.name, row.parse(text.strip(), "/set"))
        return
    value, origin = controller.settings.lookup(row.name)
    controller.emit(Notice(f"{row.name} is {pages.shown(value)} ({origin}): {row.help}"))


async def seed(controller: "Controller", argument: str) -> None:
    """Show the seed, fix it, or draw a new one for every reply."""
    if argument == "random":
        await _change(controller, "seed", None)
    else:
        await set_value(controller, f"seed {argument}")


async def json_form(controller: "Controller", argument: str) -> None:
    await _shape(controller, "json", argument)


async def regex_form(controller: "Controller", argument: str) -> None:
    await _shape(controller, "regex", argument)


async def grammar_form(controller: "Controller", argument: str) -> None:
    await _shape(controller, "grammar", argument)


async def _shape(controller: "Controller", kind: Kind, argument: str) -> None:
    """Show what the next replies must be, change it, or let them be anything again."""
    if not argument:
        controller.emit(ShowPage("Form of replies", pages.form_page(controller.form)))
        return
    controller.form = None if argument == "off" else form_of(kind, argument)
    controller.remember()
    changed = f"from the next reply on: {MEANING[kind]}; `/{kind} off` ends it"
    controller.emit(Notice(changed if controller.form else "replies may be anything again"))


async def lora(controller: "Controller", argument: str) -> None:
    """Show the LoRAs, choose those of the replies from now on, or go without."""
    if argument == "off":
        await _change(controller, "lora", None)
    else:
        await set_value(controller, f"lora {argument}")


async def stats(controller: "Controller", _: str) -> None:
    controller.emit(ShowPage("Statistics", pages.stats_page(controller.path)))


async def theme(controller: "Controller", argument: str) -> None:
    if not argument:
        controller.emit(ChooseTheme())
    else:
        require_theme(argument, "/theme", controller.paths)
        await controller.change_settings(controller.settings.with_value("/set", "theme", argument))


async def leave(controller: "Controller", _: str) -> None:
    controller.emit(QuitRequested())


async def _change(controller: "Controller", name: str, value: Value) -> None:
    if name == "theme":
        require_theme(value, "/set", controller.paths)
    elif name == "lora":
        require_loras(str(value or ""))
    await controller.change_settings(controller.settings.with_value("/set", name, value))
    controller.emit(Notice(f"{name} is {pages.shown(value)}"))


def chosen(path: tuple[Message, ...], argument: str, role: str) -> Message:
    """The message `#n` of `path`; without a number the last one of `role`. UsageError when there is none."""
    if not argument:
        found = [message for message in path if message.role == role]
        if not found:
            raise UsageError(f"there is no {role} message here")
        return found[-1]
    number = whole(argument.removeprefix("#"))
    if not 1 <= number <= len(path):
        raise UsageError(f"'{argument:.40}' is not a message", f"#1 to #{len(path)} are on show")
    return path[number - 1]


def moved(tree: Tree, step: Callable[[Tree], str | None], times: int) -> Tree:
    """`tree` with its head moved by `step` as many times, or until that moves it no more."""
    for _ in range(times):
        head = step(tree)
        if head == tree.head:
            break
        tree = tree.move(head)
    return tree


def count(argument: str) -> int:
    """How many times: a positive number, 1 when nothing is said."""
    if not argument:
        return 1
    if not whole(argument):
        raise UsageError(f"'{argument:.40}' is not a number of times", "/undo 2")
    return whole(argument)


def whole(text: str) -> int:
    """The number that `text` writes in at most six digits; 0 for any other text."""
    return int(text) if text.isdecimal() and len(text) <= 6 else 0
