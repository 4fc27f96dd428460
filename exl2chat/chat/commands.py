"""The one table of actions: slash commands, completion, help pages and key bindings come from it.

A word the table does not have is reported with its nearest neighbour: `parse` returns it as `Unknown`, which nothing
ever sends to a model.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal

from exl2chat.chat import actions
from exl2chat.chat.events import ShowPage
from exl2chat.chat.grammar import COMMAND, ESCAPED
from exl2chat.errors import UsageError

if TYPE_CHECKING:
    from exl2chat.chat.controller import Controller

When = Literal["always", "idle", "message", "reply"]
Completes = Literal["nothing", "command", "setting", "model", "session", "theme", "export", "branch", "file"]


@dataclass(frozen=True, slots=True)
class Command:
    """One action. `when` is the state it needs; one that `needs_model` waits in the queue until there is one."""

    name: str
    syntax: str
    summary: str
    run: Callable[["Controller", str], Awaitable[None]]
    when: When = "always"
    completes: Completes = "nothing"
    aliases: tuple[str, ...] = ()
    needs_model: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """The line is a message for the model."""

    text: str


@dataclass(frozen=True, slots=True)
class Invocation:
    """The line is a command with its argument."""

    command: Command
    argument: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """The line looks like a command that the table does not have."""

    word: str


async def _help(controller: "Controller", argument: str) -> None:
    name = argument.strip().removeprefix("/")
    if not name:
        controller.emit(ShowPage("Commands", help_page()))
    elif name in BY_NAME:
        controller.emit(ShowPage("/" + BY_NAME[name].name, command_page(BY_NAME[name])))
    else:
        raise unknown(name)


COMMANDS: tuple[Command, ...] = (
    Command("help", "[command]", "show the commands, or one of them", _help, completes="command"),
    Command("retry", "[#n]", "answer again, beside the reply there is", actions.retry, "message", needs_model=True),
    Command("continue", "", "go on where the last reply ends", actions.go_on, "reply", needs_model=True),
    Command("edit", "[#n]", "change a message; sent, it starts a branch; erased, nothing", actions.edit, "message"),
    Command("undo", "[k]", "step back before the last k questions; nothing is erased", actions.undo, "message"),
    Command("redo", "[k]", "step forward again", actions.redo, "idle"),
    Command("branch", "[next|prev|k] [#n]", "show another version of a message", actions.branch, "message", "branch"),
    Command("stop", "", "take back a queued message, stop the reply and keep its text, or cancel a load", actions.stop),
    Command("new", "[title]", "start a new session", actions.new, "idle"),
    Command("open", "[id or title]", "open a saved session", actions.open_session, "idle", "session", ("resume",)),
    Command("rename", "<title>", "give the session another title", actions.rename),
    Command("fork", "", "go on in a copy of this session", actions.fork, "message"),
    Command("delete", "", "move this session to the trash and start a new one", actions.delete, "message"),
    Command("export", "[md|json|txt] [path]", "write the conversation to a file", actions.export, "message", "export"),
    Command("model", "[name]", "show the model, or load another", actions.model, completes="model"),
    Command("system", "[text|off]", "show or change the system prompt", actions.system),
    Command("set", "[name [value|default]]", "show or change a setting", actions.set_value, completes="setting"),
    Command("seed", "[n|random]", "make replies repeatable, or not", actions.seed),
    Command("json", "[schema|file|off]", "replies are JSON of this schema", actions.json_form, completes="file"),
    Command("regex", "[expression|off]", "replies are what this expression matches", actions.regex_form),
    Command(
        "grammar",
        "[grammar|file|off]",
        "replies follow this grammar (Lark or GBNF)",
        actions.grammar_form,
        completes="file",
    ),
    Command("lora", "[folder[:scale],...|off]", "show or change the LoRAs that replies use", actions.lora),
    Command("stats", "", "counts and speeds of the replies shown", actions.stats),
    Command("theme", "[name]", "choose the colours", actions.theme, completes="theme"),
    Command("quit", "", "leave; everything is saved, queued messages too", actions.leave, aliases=("exit", "q")),
)
BY_NAME: Mapping[str, Command] = {word: row for row in COMMANDS for word in (row.name, *row.aliases)}


def parse(line: str) -> Text | Invocation | Unknown:
    """What `line` asks for. Exactly one of the three: a command is never also a message."""
    match = COMMAND.match(line)
    if not match:
        return Text(line[1:] if ESCAPED.match(line) else line)
    command = BY_NAME.get(match[1].lower())
    return Invocation(command, line[match.end() :].strip()) if command else Unknown(match[1])


async def obey(action: Invocation | Unknown, controller: "Controller") -> None:
    """Do it. UsageError for an unknown command or one that the state of the chat does not allow."""
    if isinstance(action, Unknown):
        raise unknown(action.word)
    command = action.command
    if action.argument == "--help":
        controller.emit(ShowPage("/" + command.name, command_page(command)))
        return
    if action.argument and not command.syntax:
        raise UsageError(f"/{command.name} takes nothing after it, not '{action.argument:.40}'", usage(command))
    if refusal := why_not(command, controller):
        raise UsageError(f"/{command.name}: {refusal}")
    if command.needs_model and controller.phase in ("loading", "down"):
        await controller.enqueue(f"/{command.name} {action.argument}".rstrip())
    else:
        await command.run(controller, action.argument)


def why_not(command: Command, controller: "Controller") -> str:
    """Why `command` cannot run in the present state; empty when it can."""
    if command.when != "always" and controller.busy:
        return "a reply is on its way: stop it first"
    if command.when == "message" and not controller.path:
        undone = controller.session.tree.messages
        return "everything is undone: `/redo` steps forward again" if undone else "there is no message yet"
    if command.when == "reply" and not (controller.path and controller.path[-1].role == "assistant"):
        return "the last message is not a reply"
    return ""


def unknown(word: str) -> UsageError:
    """The error for a command there is not, with the nearest that there is."""
    near = get_close_matches(word, BY_NAME, n=1, cutoff=0.5)
    return UsageError(f"there is no command /{word}", f"did you mean /{near[0]}?" if near else "`/help` lists them")


def help_page() -> str:
    """All commands as Markdown."""
    rows = [f"| `{usage(row).replace('|', chr(92) + '|')}` | {row.summary} |" for row in COMMANDS]
    literal = "To send a message that begins with a command's name, put a space or a second slash before it."
    return "\n".join(
        ["| command | what it does |", "|---|---|", *rows, "", "`#n` is the n-th message on show.", literal]
    )


def command_page(command: Command) -> str:
    """One command as Markdown."""
    lines = [f"`{usage(command)}`", "", command.summary.capitalize() + "."]
    if command.aliases:
        lines += ["", "Also: " + ", ".join(f"`/{alias}`" for alias in command.aliases)]
    return "\n".join(lines)


def usage(command: Command) -> str:
    """The command with its arguments."""
    return f"/{command.name} {command.syntax}".rstrip()
