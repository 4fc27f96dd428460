"""`exl2chat` without a command: the chat itself."""

import argparse
import sys

from exl2chat.paths import Paths
from exl2chat.settings import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the chat."""
    parser.add_argument(
        "--resume",
        nargs="?",
        const="last",
        metavar="ID",
        help="go on with the last chat, or with the one that has this id, title or file (`exl2chat sessions`)",
    )


def main(args: argparse.Namespace, settings: Settings, paths: Paths) -> int:
    """Chat on the terminal; where there is none, answer what comes in as `exl2chat run` does."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        from exl2chat import run

        return run.main(argparse.Namespace(engine=args.engine, prompt=None, json=False, stats=False), settings, paths)
    from exl2chat.chat.controller import Controller
    from exl2chat.chat.session import Session
    from exl2chat.link.choose import choose_engine
    from exl2chat.ui.app import run_app

    session = Session.open(args.resume, paths) if args.resume else Session.create(paths)
    return run_app(Controller(choose_engine(args.engine, paths), settings, paths, session), paths)
