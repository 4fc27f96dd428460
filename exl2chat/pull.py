"""`exl2chat pull`: get a model before the first chat, and list those that are here."""

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from exl2chat.model import hub, smollm2
from exl2chat.paths import Paths
from exl2chat.safetext import scrub_line
from exl2chat.settings import Settings

MEGABYTE = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `pull`."""
    parser.add_argument(
        "reference",
        nargs="?",
        default=smollm2.NAME,
        help="org/name, org/name@revision, org/name:4.0bpw or smollm2, which is the default",
    )
    parser.add_argument("--list", action="store_true", help="list the models that are here, and fetch nothing")


def main(args: argparse.Namespace, _settings: Settings, paths: Paths) -> int:
    """Fetch the model, a bar on stderr, and print its folder on stdout; or print the list. ModelError on failure."""
    if args.list:
        for name, folder in hub.local_models(paths):
            print(f"{name}\t{_size(folder) / MEGABYTE:.0f} MB\t{folder}")
        return 0
    print(pull(args.reference, paths, Console(stderr=True)))
    return 0


def pull(reference: str, paths: Paths, console: Console) -> Path:
    """The folder of `reference`; progress is drawn on `console`. ModelError when it cannot be had."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        task = bars.add_task("", total=None, amount="")

        def show(stage: str, done: int = 0, total: int = 0, unit: str = "") -> None:
            bars.update(
                task,
                description=scrub_line(stage),
                completed=done,
                total=total or None,
                amount=_amount(done, total, unit),
            )

        return hub.resolve(reference, paths, show)


def _amount(done: int, total: int, unit: str) -> str:
    if not total:
        return ""
    if unit == "B":
        return f"{done / MEGABYTE:.1f} of {total / MEGABYTE:.1f} MB"
    return f"{done} of {total} {unit}"


def _size(folder: Path) -> int:
    """Bytes of all files of a model folder."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
