"""`exl2chat pull`: get a model before the first chat, and list those that are here."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from exl2chat.model import hub
from exl2chat.paths import Paths
from exl2chat.progress import Progress
from exl2chat.safetext import scrub, scrub_line
from exl2chat.settings import Settings

MEGABYTE = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `pull`."""
    parser.add_argument(
        "reference",
        nargs="?",
        help="org/name, org/name@revision, org/name:4.0bpw or smollm2; without it, what EXL2CHAT_MODEL or the setting "
        "`model` says (default smollm2)",
    )
    parser.add_argument("--list", action="store_true", help="list the models that are here, and fetch nothing")


def main(args: argparse.Namespace, settings: Settings, paths: Paths) -> int:
    """Fetch the model, a bar on stderr, and print its folder on stdout; or print the list. ModelError on failure."""
    if args.list:
        for name, folder in hub.local_models(paths):
            print(scrub(f"{name}\t{_size(folder) / MEGABYTE:.0f} MB\t{folder}"))
        return 0
    wanted = settings["model"] if args.reference is None else args.reference
    with bar(Console(stderr=True)) as progress:
        folder = hub.resolve(wanted, paths, progress)
    print(scrub_line(str(folder)))
    return 0


@contextmanager
def bar(console: Console) -> Iterator[Progress]:
    """A progress bar on `console` if that is a terminal, as the function that moves it; its first call draws it."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"), TimeElapsedColumn())
    bars = Bars(*columns, console=console, disable=not console.is_terminal)
    task = bars.add_task("", total=None, amount="")

    def show(stage: str, done: int = 0, total: int = 0, unit: str = "") -> None:
        bars.start()
        text = escape(scrub_line(stage))
        bars.update(task, description=text, completed=done, total=total or None, amount=_amount(done, total, unit))

    try:
        yield show
    finally:
        bars.stop()


def _amount(done: int, total: int, unit: str) -> str:
    if not total:
        return ""
    if unit == "B":
        return f"{done / MEGABYTE:.1f} of {total / MEGABYTE:.1f} MB"
    return f"{done} of {total} {unit}"


def _size(folder: Path) -> int:
    """Bytes of all files of a model folder."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
