"""The command line: one table of commands, each module imported when its command is chosen."""

import argparse
import contextlib
import errno
import importlib
import os
import platform
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import takewhile
from typing import Any, NoReturn

from exl2chat import __version__
from exl2chat.errors import ChatError, UsageError
from exl2chat.paths import Paths, home_folder
from exl2chat.safetext import scrub_line
from exl2chat.settings import OPTIONS, Option, Settings, load_settings, unknown_variables


@dataclass(frozen=True, slots=True)
class Command:
    """A command and the module that has its `add_arguments(parser)` and `main(args, settings, paths) -> int`."""

    name: str
    module: str
    help: str
    groups: tuple[str, ...] = ()  # of the common flags, those that its --help lists
    reads_settings: bool = True


GROUPS = {"model": "the model", "chat": "the reply", "sampling": "how tokens are drawn", "screen": "the screen"}

CHAT = Command("", "exl2chat.start", "chat on the screen", tuple(GROUPS))
COMMANDS = (
    Command("run", "exl2chat.run", "answer one prompt on the standard output", ("model", "chat", "sampling")),
    Command("pull", "exl2chat.pull", "fetch a model, to chat without a network later"),
    Command("bench", "exl2chat.bench", "measure how fast a model answers here", ("model",)),
    Command("doctor", "exl2chat.doctor", "check that what a chat needs is here and works", reads_settings=False),
    Command("sessions", "exl2chat.sessions", "list the saved chats", reads_settings=False),
    Command("paths", "exl2chat.locations", "print where chats, models, settings and logs are", reads_settings=False),
)

EPILOG = """\
examples:
  exl2chat                                     chat with the default model, fetched at the first start
  exl2chat --model org/name:4.0bpw             one of the bits-per-weight branches of a hub repository
  exl2chat --resume                            go on with the last chat
  exl2chat run -p "Why is the sky blue?"       only the answer on the standard output
  exl2chat run -p "Summarise this:" < a.txt    a prompt, and text from the standard input

settings, later wins:
  what the model recommends, config.toml, the saved chat, EXL2CHAT_TEMPERATURE and the like, flags, /set in the chat
  `exl2chat paths` prints where config.toml is.

exit status:
  0 success   1 failure   2 wrong usage   3 the model cannot be loaded   4 the prompt does not fit the context
  6 a saved chat is locked, damaged or not there   130 interrupted; run: 129 by SIGHUP, 143 by SIGTERM
  141 the reader of the output went away
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status. Errors become one line on the standard error."""
    _prepare_streams()
    try:
        args = parser().parse_args(argv, argparse.Namespace(command=CHAT, home=None, engine="local"))
        for line in unknown_variables():
            print("exl2chat: " + scrub_line(line), file=sys.stderr)
        paths = Paths.default(args.home)
        flags = {option.name: getattr(args, option.name) for option in OPTIONS if hasattr(args, option.name)}
        # Where config.toml is can be asked for while it is broken.
        settings = load_settings(flags, paths) if args.command.reads_settings else Settings()
        status: int = importlib.import_module(args.command.module).main(args, settings, paths)
        sys.stdout.flush()
    except ChatError as fault:
        return _complain(fault)
    except KeyboardInterrupt:
        return 130
    except OSError as fault:  # such as a full disk behind the standard output
        reason = _reason(fault)
        # What is still buffered cannot be written either: let the interpreter flush it into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141 if isinstance(fault, BrokenPipeError) else _complain(reason)
    return status


def _complain(fault: ChatError) -> int:
    """Say on the standard error what went wrong and what to do; the exit status."""
    print("exl2chat: " + scrub_line(fault.message), file=sys.stderr)
    if fault.remedy:
        print("  " + scrub_line(fault.remedy), file=sys.stderr)
    return fault.status


def _reason(fault: OSError) -> ChatError:
    """What the system refused, in words. Files are named in what it says; the standard output is not."""
    reason = fault.strerror or str(fault)
    if fault.filename is None and fault.errno == errno.EBADF:
        return ChatError("the standard output is closed", "leave it open: what is asked for goes there")
    if fault.filename is None and fault.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        return ChatError(f"the standard output cannot be written: {reason}", "make room there, or send it elsewhere")
    name = "" if fault.filename is None else f"{fault.filename}: "
    return ChatError(name + reason, "check what is there and its permissions")


def _prepare_streams() -> None:
    """UTF-8 whatever the locale, and a stream where the caller closed one: a lost answer is an error, a lost complaint
    is not."""
    for name, access, mode in (
        ("stdin", os.O_RDONLY, "r"),
        ("stdout", os.O_RDONLY, "w"),  # so that writing fails
        ("stderr", os.O_WRONLY, "w"),
    ):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, access), mode))
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace"), (sys.stderr, "backslashreplace")):
        with contextlib.suppress(AttributeError):  # a stream that a test has replaced
            stream.reconfigure(encoding="utf-8", errors=errors)  # type: ignore[union-attr]


class _Parser(argparse.ArgumentParser):
    """A parser that imports its command's module only when it is to parse, and raises instead of exiting."""

    command: Command | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.command:
            importlib.import_module(self.command.module).add_arguments(self)
            self.set_defaults(command=self.command)
            self.command = None
        words = list(sys.argv[1:] if args is None else args)
        self._refuse_unknown_flags(words)
        namespace, extras = super().parse_known_args(words, namespace)
        if extras:
            self.error("unrecognized arguments: " + " ".join(extras))
        return namespace, extras

    def _refuse_unknown_flags(self, words: Sequence[str]) -> None:
        """Name a misspelt flag before argparse takes its value for a command."""
        names = {command.name for command in COMMANDS}
        for word in takewhile(lambda word: word != "--" and word not in names, words):
            if word.startswith("--") and word.partition("=")[0] not in self._option_string_actions:
                self.error(f"unrecognized arguments: {word}")

    def error(self, message: str) -> NoReturn:
        """UsageError with `message` and the nearest flag or command to the word that was not understood."""
        known = [*self._option_string_actions, *(command.name for command in COMMANDS)]
        wrong = re.search(r"unrecognized arguments: ([^\s=]+)|invalid choice: '([^']*)'", message)
        near = get_close_matches(wrong[1] or wrong[2], known, n=1) if wrong else []
        raise UsageError(message, f"did you mean {near[0]}?" if near else f"`{self.prog} --help` lists what there is")


class _Version(argparse.Action):
    """Print the versions that a bug report needs, without importing torch."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        import importlib.metadata  # half of what this module would cost to import

        torch = importlib.metadata.version("torch")
        print(f"exl2chat {__version__}, torch {torch}, Python {platform.python_version()}")
        parser.exit()


class _Joined(argparse.Action):
    """Keep every value of a flag, with commas between them."""

    def __call__(self, _: object, namespace: argparse.Namespace, value: Any, __: object = None) -> None:
        before = getattr(namespace, self.dest, "")
        setattr(namespace, self.dest, f"{before},{value}" if before else value)


def parser() -> _Parser:
    parser = _Parser(
        prog="exl2chat",
        description=f"Chat in the terminal with EXL2 and GPTQ models on this machine. Without a command: {CHAT.help}.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.command = CHAT
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions and leave")
    _add_common(parser, CHAT)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        child = commands.add_parser(
            command.name,
            help=command.help,
            description=command.help,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        child.command = command
        _add_common(child, command)
    return parser


def _add_common(parser: argparse.ArgumentParser, command: Command) -> None:
    """The flags that every command takes. One that is absent leaves no trace, so that a lower layer holds."""
    parser.add_argument(
        "--home",
        default=argparse.SUPPRESS,
        type=home_folder,
        help="keep chats, models, settings and logs under this folder (EXL2CHAT_HOME)",
        metavar="DIR",
    )
    parser.add_argument("--engine", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for group, title in GROUPS.items():
        section = parser.add_argument_group(title)
        for row in OPTIONS:
            if row.group == group:
                shown = {} if group in command.groups and not row.rare else {"help": argparse.SUPPRESS}
                section.add_argument(row.flag, **{**_argument(row), **shown})
    rare = " ".join(row.flag for row in OPTIONS if row.rare and row.group in command.groups)
    if rare:
        lines = textwrap.wrap(rare, 78, break_on_hyphens=False)
        parser.add_argument_group(
            "more of how tokens are drawn (the README explains, and `/set` in the chat)", "\n".join(lines)
        )


def _argument(row: Option) -> dict[str, Any]:
    """The keywords of `add_argument` for one row of the options."""
    if row.kind is bool:
        return {"dest": row.name, "default": argparse.SUPPRESS, "action": argparse.BooleanOptionalAction}
    metavar = "{" + ",".join(row.choices) + "}" if row.choices else {int: "N", float: "X"}.get(row.kind, "TEXT")
    return {
        "dest": row.name,
        "default": argparse.SUPPRESS,
        "type": lambda text: row.parse(text, row.flag),
        "metavar": metavar,
        "action": _Joined if row.repeats else "store",
        "help": row.help if row.default is None else f"{row.help} (default {row.default})",
    }
