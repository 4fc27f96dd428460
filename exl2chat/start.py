"""`exl2chat` without a command: the chat itself."""

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING

from exl2chat.errors import SessionError, UsageError
from exl2chat.paths import Paths
from exl2chat.safetext import scrub_line
from exl2chat.settings import Settings, terminal_only_prints

if TYPE_CHECKING:
    from exl2chat.chat.controller import Controller
    from exl2chat.chat.events import ChatEvent
    from exl2chat.chat.session import Session

PIPED = "leave it out: what is piped in is one message, and with --resume the next of that chat"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the chat."""
    parser.add_argument(
        "--resume",
        nargs="?",
        const="last",
        metavar="ID",
        help="go on with the last chat, or with the one that has this id, title or file (`exl2chat sessions`)",
    )
    parser.add_argument("--plain", action="store_true", help="line by line, for terminals that only print (TERM=dumb)")


def main(args: argparse.Namespace, settings: Settings, paths: Paths) -> int:
    """Chat on the terminal; where there is none, answer what comes in as `exl2chat run` does.

    UsageError for `--plain` without somebody to type the lines.
    """
    from exl2chat.chat.session import Session

    if args.plain and not sys.stdin.isatty():
        raise UsageError("--plain reads what is typed, and the standard input is no terminal", PIPED)
    if not (sys.stdin.isatty() and (sys.stdout.isatty() or args.plain)):
        from exl2chat import run

        session = _writable(args.resume, paths) if args.resume else Session.in_memory()
        once = argparse.Namespace(engine=args.engine, prompt=None, json=False, stats=False)
        return ended(session, run.answer_in(session, once, settings, paths))
    from exl2chat.chat.controller import Controller
    from exl2chat.link.choose import choose_engine

    session = Session.open(args.resume, paths) if args.resume else Session.create(paths)
    controller = Controller(choose_engine(args.engine, paths), settings, paths, session)
    if args.plain or terminal_only_prints():
        from exl2chat import plain

        status = asyncio.run(plain.chat(controller))
        return ended(controller.session, status)
    from exl2chat.ui.app import run_app

    _complete_models(controller, paths)
    status = run_app(controller, paths)
    return ended(controller.session, status)


def _writable(which: str, paths: Paths) -> "Session":
    """The saved session, to which a piped message can be added. SessionError where it cannot."""
    from exl2chat.chat.session import Session

    session = Session.open(which, paths)
    if session.read_only:
        refusal = f"nothing can be added to '{session.title}': {session.obstacle}"
        raise SessionError(f"{refusal}; send it again when that is over, or without --resume")
    return session


def ended(session: "Session", status: int) -> int:
    """The exit status of a chat that ended with `status`: not 0, and a line on the standard error, if any of it is
    lost because it could not be saved."""
    if session.fault is None:
        return status
    print(scrub_line(f"exl2chat: the last messages of '{session.title}' are lost: {session.fault}"), file=sys.stderr)
    return status or 1


def _complete_models(controller: "Controller", paths: Paths) -> None:
    """Let `/model` complete the models that are here. Looking for them takes a while: it waits until one is loaded."""
    from exl2chat.chat.events import ModelReady

    def look() -> None:
        from exl2chat.model.hub import local_models

        controller.models = tuple(name for name, _ in local_models(paths))

    def hear(event: "ChatEvent") -> None:
        if isinstance(event, ModelReady):
            asyncio.get_running_loop().run_in_executor(None, look)

    controller.subscribe(hear)
