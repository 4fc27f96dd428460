"""The reply that is on its way, and what the model is to read before it."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from exl2chat.chat.events import Message
from exl2chat.chat.session import now
from exl2chat.link.protocol import Form, Generate, LoraUse, ModelInfo, Prefill, Stats, StopReason, Turn
from exl2chat.settings import Sampling, Settings


@dataclass
class Reply:
    """What has come of a reply so far. It begins with `start`; `drafted` characters of `text` are written down."""

    id: str
    parent: str | None
    start: str
    seed: int
    model: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    drafted: int = 0
    text: str = ""
    _first_at: float = 0.0
    _first_tokens: int = 0

    def __post_init__(self) -> None:
        self.text = self.start

    def begin(self, event: Prefill) -> None:
        """Part of the prompt was read."""
        self.prompt_tokens, self.cached_tokens = event.total, event.cached

    def take(self, text: str, tokens: int) -> None:
        """More text came; `tokens` is the number generated so far."""
        if not self._first_at:
            self._first_at, self._first_tokens = time.monotonic(), tokens
        self.text += text
        self.tokens = tokens

    def undrafted(self) -> str:
        """The text that came since the last call."""
        fresh, self.drafted = self.text[self.drafted :], len(self.text)
        return fresh

    @property
    def adds_nothing(self) -> bool:
        return self.text == self.start

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first chunk over the time since it; 0 before there are any."""
        elapsed = time.monotonic() - self._first_at
        return (self.tokens - self._first_tokens) / elapsed if self._first_at and elapsed > 0 else 0.0

    def message(self, stop: StopReason, stats: Stats | None = None) -> Message:
        """The reply as a message of the tree. Its statistics always name the seed that reproduces it."""
        known = stats or Stats(self.prompt_tokens, self.cached_tokens, self.tokens)
        return Message(
            id=self.id,
            parent=self.parent,
            role="assistant",
            text=self.text,
            created=now(),
            stop=stop,
            stats=msgspec.structs.replace(known, seed=self.seed),
            model=self.model,
        )


def context_filled(path: Sequence[Message], model: ModelInfo | None) -> int | None:
    """Tokens that `path` up to its last reply takes of the context of `model`; None where another model wrote that
    reply or it was cut off uncounted."""
    reply = next((message for message in reversed(path) if message.role == "assistant"), None)
    if reply is None:
        return 0
    if not (model and model.name == reply.model and reply.stats and reply.stats.prompt_tokens):
        return None
    return reply.stats.prompt_tokens + reply.stats.reply_tokens


def request(
    id: str, path: Sequence[Message], start: str, sampling: Sampling, settings: Settings, form: Form | None
) -> Generate:
    """The request for a reply to `path` that begins with `start`, or else is of the `form`."""
    said: list[Message | Turn] = [*path]
    if start:
        said.append(Turn("assistant", start))
    loras = loras_of(settings["lora"])
    return Generate(id, turns_of(said, settings["system"]), sampling, settings["max_tokens"], form=form, loras=loras)


def loras_of(text: str | None) -> tuple[LoraUse, ...]:
    """The LoRAs that the setting `lora` lists: FOLDER or FOLDER:SCALE, with commas between them."""
    folders = (part.strip() for part in (text or "").split(","))
    return tuple(_lora_of(folder) for folder in folders if folder)


def whole_paths(text: str) -> str:
    """The setting `lora` with the whole path of every folder."""
    return ",".join(f"{lora.path}:{lora.scale}" for lora in loras_of(text))


def require_loras(text: str) -> None:
    """ModelError where one of the LoRAs that `text` lists is none. The engine says whether it fits the model."""
    from exl2chat.model.lora import check_lora  # it takes time to import, and few chats use one

    for lora in loras_of(text):
        check_lora(Path(lora.path))


def _lora_of(text: str) -> LoraUse:
    folder, colon, scale = text.rpartition(":")
    try:
        return LoraUse(_absolute(folder), float(scale)) if colon else LoraUse(_absolute(scale))
    except ValueError:  # the colon is part of the name
        return LoraUse(_absolute(text))


def _absolute(folder: str) -> str:
    return os.path.abspath(os.path.expanduser(folder))


def turns_of(said: Sequence[Message | Turn], system: str | None) -> tuple[Turn, ...]:
    """What was said as the model is to see it.

    Neighbours of one role (a reply failed in between) become one turn: many chat templates insist on alternation.
    """
    turns = [Turn("system", system)] if system else []
    for each in said:
        if turns and turns[-1].role == each.role:
            turns[-1] = Turn(each.role, turns[-1].text + "\n\n" + each.text)
        else:
            turns.append(Turn(each.role, each.text))
    return tuple(turns)
