"""`exl2chat sessions`: the saved chats, the one changed last first."""

import argparse
import sys
from datetime import datetime

from exl2chat.chat.session import list_sessions, unreadable_sessions
from exl2chat.errors import ChatError
from exl2chat.paths import Paths
from exl2chat.safetext import scrub_line
from exl2chat.settings import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `exl2chat sessions`."""
    parser.add_argument("query", nargs="?", default="", help="only chats with this in the title", metavar="TEXT")


def main(args: argparse.Namespace, _settings: Settings, paths: Paths) -> int:
    """Print a header and one line per chat: id for `--resume`, when it changed, number of messages, title. Files that
    cannot be read are told on the standard error.

    ChatError when there are chats, but none with the words in its title.
    """
    saved, unreadable = list_sessions(paths), unreadable_sessions(paths)
    for path, reason in unreadable.items():
        print(f"exl2chat: {scrub_line(str(path))} cannot be read: {scrub_line(reason)}", file=sys.stderr)
    if not saved:
        if not unreadable:
            print("no chat is saved yet", file=sys.stderr)
        return 0
    found = [each for each in saved if args.query.casefold() in each.title.casefold()]
    if not found:
        raise ChatError(f"no saved chat has '{args.query}' in its title", "`exl2chat sessions` lists them all")
    width = max(len(scrub_line(each.id)) for each in found)
    print(f"{'id':{width}}  {'changed':16}  messages  title")
    for each in found:
        when = datetime.fromtimestamp(each.updated).strftime("%Y-%m-%d %H:%M")
        print(f"{scrub_line(each.id):{width}}  {when}  {each.messages:8}  {scrub_line(each.title)}")
    return 0
