"""What the controller tells whoever shows the chat. Text in here is raw: scrub it before a terminal sees it."""

from typing import Literal

import msgspec

from exl2chat.link.protocol import ModelInfo, Role, Stats, StopReason

Phase = Literal["loading", "ready", "prefill", "streaming", "down"]


class Message(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="k", tag="msg"):
    """One message of the tree. `parent` is None for the first; siblings share a parent. Times are ISO 8601 UTC.

    The tag makes it a record of a session file as it stands (`exl2chat.chat.store`).
    """

    id: str
    parent: str | None
    role: Role
    text: str
    created: str = ""
    stop: StopReason | None = None
    stats: Stats | None = None
    model: str = ""


class ChatEvent(msgspec.Struct, frozen=True):
    """Base of everything a controller emits."""


class LoadProgress(ChatEvent, frozen=True):
    """The model is being fetched, converted or loaded. `total` 0 means unknown."""

    stage: str
    done: int
    total: int
    unit: str


class ModelReady(ChatEvent, frozen=True):
    """The model answers from now on."""

    model: ModelInfo
    seconds: float


class ModelDown(ChatEvent, frozen=True):
    """The engine died or could not load. The chat goes on; the next message starts it again."""

    message: str
    remedy: str = ""
    status: int = 1


class MessageAdded(ChatEvent, frozen=True):
    """A user message was appended to the path and is on disk."""

    message: Message


class ReplyStarted(ChatEvent, frozen=True):
    """A reply `id` is on its way; `text` is what it starts with (when an earlier one is continued)."""

    id: str
    text: str = ""


class PrefillProgress(ChatEvent, frozen=True):
    """`done` of `total` prompt tokens are read, `cached` of them were there from earlier turns."""

    id: str
    done: int
    total: int
    cached: int


class ReplyText(ChatEvent, frozen=True):
    """More text of the reply; `tokens` is the number generated so far."""

    id: str
    text: str
    tokens: int


class ReplyFinished(ChatEvent, frozen=True):
    """The reply is complete and on disk; `message.stop` says why it ended."""

    message: Message


class PathChanged(ChatEvent, frozen=True):
    """The path of messages on show is another one (undo, edit, retry, new, open): read `controller.path` again."""


class SessionChanged(ChatEvent, frozen=True):
    """Another session file, or another title, or it became read-only."""


class SettingChanged(ChatEvent, frozen=True):
    """A setting has a new value."""

    name: str


class Notice(ChatEvent, frozen=True):
    """One line for the user, shown for a while. `status` is the exit code a command line leaves with (0: none)."""

    text: str
    level: Literal["information", "warning", "error"] = "information"
    status: int = 0


class ShowPage(ChatEvent, frozen=True):
    """A page of Markdown to show over the chat: help, statistics, settings."""

    title: str
    markdown: str


class FillPrompt(ChatEvent, frozen=True):
    """Put `text` into the prompt for the user to change. `replaces` is the message that sending it will branch from."""

    text: str
    replaces: str | None = None


class ChooseSession(ChatEvent, frozen=True):
    """Let the user pick one of the saved sessions; `query` filters the list."""

    query: str = ""


class ChooseTheme(ChatEvent, frozen=True):
    """Let the user pick a theme with live preview."""


class QuitRequested(ChatEvent, frozen=True):
    """The user asked to leave."""
