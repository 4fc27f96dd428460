"""`exl2chat paths`: where everything is."""

import argparse

from exl2chat.paths import Paths
from exl2chat.safetext import scrub_line
from exl2chat.settings import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No flags of its own."""


def main(_args: argparse.Namespace, _settings: Settings, paths: Paths) -> int:
    """Print one `name  path` line per place."""
    places = {
        "settings": paths.config_file,
        "themes": paths.themes,
        "chats": paths.sessions,
        "trash": paths.trash,
        "history": paths.history,
        "models": paths.models,
        "kernels": paths.kernels,
        "log": paths.log,
    }
    for name, path in places.items():
        print(f"{name:10}{scrub_line(str(path))}")
    return 0
