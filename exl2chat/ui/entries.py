"""Messages as entries of the transcript: names, numbers and remarks in words."""

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from exl2chat.chat.events import Message
from exl2chat.chat.session import SessionSummary
from exl2chat.chat.tree import Tree
from exl2chat.link.protocol import Stats
from exl2chat.safetext import scrub_line
from exl2chat.ui.panels import Choice
from exl2chat.ui.section import Entry, Level

REMARKS: Mapping[str, tuple[str, Level]] = {
    "stopped": ("■ stopped · /continue goes on, /retry starts over", "muted"),
    "max_tokens": ("… the token limit was reached · /continue goes on", "warning"),
    "context": ("… the context is full · /new starts afresh", "warning"),
    "error": ("✗ the reply failed · /retry tries again", "error"),
    "crash": ("✗ cut off here · /continue goes on, /retry starts over", "error"),
}


def entry_of(message: Message, tree: Tree) -> Entry:
    """What the transcript says of a message that is on disk."""
    siblings = tree.siblings(message.id)
    place = f"‹{siblings.index(message) + 1}/{len(siblings)}›" if len(siblings) > 1 else ""
    remark, level = REMARKS.get(message.stop or "", ("", "muted"))
    if message.role == "assistant":
        notes = (place, speed(message.stats))
    else:
        notes = (place, clock(message.created))
    return Entry(
        message.id, message.role, speaker(message.role, message.model), "  ".join(filter(None, notes)), remark, level
    )


def speaker(role: str, model: str) -> str:
    """The name above a message."""
    if role == "assistant":
        return scrub_line(model) or "Assistant"
    return "You" if role == "user" else "System"


def speed(stats: Stats | None) -> str:
    """Tokens and tokens per second of a reply, where known."""
    if stats is None or not stats.reply_tokens:
        return ""
    rate = f" · {stats.tokens_per_second:.0f} tok/s" if stats.tokens_per_second else ""
    return f"{stats.reply_tokens} tok{rate}"


def clock(created: str) -> str:
    """Hours and minutes, local, of an ISO 8601 time; empty if it is none."""
    try:
        return datetime.fromisoformat(created).astimezone().strftime("%H:%M")
    except ValueError:
        return ""


def choice_of(path: Path, found: SessionSummary | str) -> Choice:
    """A session file in a list: its title, when it changed, local, and how long it is; or why it cannot be opened."""
    if isinstance(found, str):
        return Choice(str(path), path.name, f"cannot be read: {found}", disabled=True)
    changed = datetime.fromtimestamp(found.updated).strftime("%Y-%m-%d %H:%M")
    return Choice(str(path), found.title, f"{changed} · {found.messages} message{'s' * (found.messages != 1)}")
