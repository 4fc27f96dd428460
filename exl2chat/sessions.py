"""`exl2chat sessions`: the saved chats, the one changed last first."""

import argparse
from datetime import datetime

from exl2chat.chat.session import list_sessions
from exl2chat.paths import Paths
from exl2chat.safetext import scrub_line
from exl2chat.settings import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `exl2chat sessions`."""
    parser.add_argument("query", nargs="?", default="", help="only chats with this in the title", metavar="TEXT")


def main(args: argparse.Namespace, _settings: Settings, paths: Paths) -> int:
    """Print one line per chat: id for `--resume`, when it changed, number of messages, title."""
    for saved in list_sessions(paths):
        if args.query.casefold() in saved.title.casefold():
            when = datetime.fromtimestamp(saved.updated).strftime("%Y-%m-%d %H:%M")
            print(f"{scrub_line(saved.id)}  {when}  {saved.messages:5}  {scrub_line(saved.title)}")
    return 0
