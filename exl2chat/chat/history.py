"""What the user sent before, for the prompt's up and down keys: a private JSONL file, the newest last."""

import os
from pathlib import Path

import msgspec

from exl2chat.errors import ChatError
from exl2chat.paths import open_private, private_folder

LIMIT = 1000
LONGEST = 20_000  # characters; a longer paste is not worth recalling


class History:
    """The lines sent, oldest first. A file that cannot be read or written leaves a history of this run only."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.entries: list[str] = _read(file)[-LIMIT:] if file else []

    def add(self, text: str) -> None:
        """Remember `text`, unless it repeats the last one, begins with a space or is very long."""
        if not text.strip() or text[0] == " " or len(text) > LONGEST or self.entries[-1:] == [text]:
            return
        self.entries.append(text)
        del self.entries[:-LIMIT]
        if self._file:
            _append(self._file, text)


def _read(file: Path) -> list[str]:
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError:
        return []
    entries = []
    for line in lines:
        try:
            entries.append(msgspec.json.decode(line, type=str))
        except (msgspec.DecodeError, UnicodeDecodeError):  # empty, torn or foreign
            continue
    return entries


def _append(file: Path, text: str) -> None:
    try:
        private_folder(file.parent)
        handle = open_private(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(handle, msgspec.json.encode(text.encode("utf-8", "replace").decode()) + b"\n")
        finally:
            os.close(handle)
    except (OSError, ChatError):
        return
