"""The conversation on show as a file for others: Markdown, OpenAI messages, plain text."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from exl2chat.chat.events import Message
from exl2chat.chat.reply import turns_of
from exl2chat.errors import ChatError, UsageError
from exl2chat.paths import open_private

NAMES = {"user": "You", "assistant": "Assistant", "system": "System"}


def as_markdown(title: str, path: Sequence[Message], system: str | None) -> str:
    """A heading per message; the text as it was written."""
    parts = [f"# {title}"] if title else []
    parts += [f"## System\n\n{system}"] if system else []
    parts += [f"## {_speaker(message)}\n\n{message.text}" for message in path]
    return "\n\n".join(parts) + "\n"


def as_text(title: str, path: Sequence[Message], system: str | None) -> str:
    """Who said it, a colon, and the text."""
    parts = [title] if title else []
    parts += [f"System: {system}"] if system else []
    parts += [f"{_speaker(message)}: {message.text}" for message in path]
    return "\n\n".join(parts) + "\n"


def as_json(_: str, path: Sequence[Message], system: str | None) -> str:
    """`{"messages": [{"role": …, "content": …}]}` as the OpenAI chat API takes it, the system prompt first."""
    messages = [{"role": turn.role, "content": turn.text} for turn in turns_of(path, system)]
    return msgspec.json.format(msgspec.json.encode({"messages": messages}), indent=2).decode() + "\n"


@dataclass(frozen=True, slots=True)
class Format:
    """A way to write a conversation down."""

    help: str
    build: Callable[[str, Sequence[Message], str | None], str]


FORMATS: Mapping[str, Format] = {
    "md": Format("Markdown", as_markdown),
    "json": Format("messages as the OpenAI chat API takes them", as_json),
    "txt": Format("plain text", as_text),
}


def write_export(path: Path, form: str, title: str, messages: Sequence[Message], system: str | None) -> None:
    """Write `messages` to the new private file `path`. UsageError if it exists, ChatError if it cannot be written."""
    text = FORMATS[form].build(title, messages, system)
    try:
        handle = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with open(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path}: there is such a file already", "name another: /export md notes.md") from None
    except OSError as fault:
        raise ChatError(f"{path}: {fault.strerror}", "choose another place") from None


def _speaker(message: Message) -> str:
    return message.model or NAMES[message.role]
