"""Requests down, events up: the records that cross the wall between a front end and an engine.

Frames on a pipe are a 4-byte little-endian length and that many bytes of msgpack. Text in these records is raw model or
user text: whoever shows it scrubs it (`exl2chat.safetext`).
"""

from collections.abc import AsyncIterator
from typing import Any, Literal, Protocol

import msgspec

from exl2chat.settings import Sampling

StopReason = Literal["eos", "stop_string", "max_tokens", "context", "stopped", "error", "crash"]
Speculate = Literal["auto", "draft", "ngram", "off"]
Role = Literal["system", "user", "assistant"]


class Record(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of everything on the wire: immutable, tagged with its class name."""


class Turn(msgspec.Struct, frozen=True):
    """One message of the conversation as the model is to see it."""

    role: Role
    text: str


class Form(msgspec.Struct, frozen=True):
    """What a reply must be: JSON of a schema, the match of a regular expression, or a sentence of a grammar.

    Grammars are in the Lark of llguidance, or in GBNF. `source` is the file that `text` is from, if it is from one.
    """

    kind: Literal["json", "regex", "grammar"]
    text: str
    source: str = ""


class LoraUse(msgspec.Struct, frozen=True):
    """A LoRA in the folder `path`, and how much of it: 1 as it was trained."""

    path: str
    scale: float = 1.0


# Requests


class Load(Record, frozen=True):
    """Load a model: a folder, a hub reference or `smollm2`, in place of the one that is loaded. `draft_model` names one
    that guesses ahead for it; `speculate` says whether it does, or n-grams do, or what pays ("auto").

    Where it cannot be found or fails its checks, Failed is followed by Ready of the model there was, with 0 seconds.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    context: int | None = None
    cache: str = "fp16"
    draft_model: str | None = None
    speculate: Speculate = "auto"


class Generate(Record, frozen=True):
    """Answer `turns`. If the last turn is the assistant's, its text is continued, not answered.

    With a `form` the reply is that and nothing else. Failed where that cannot be followed to the letter.
    `loras` change the model for this reply. Each is read when it is first used and kept until the next Load.
    """

    id: str
    turns: tuple[Turn, ...]
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    form: Form | None = None
    loras: tuple[LoraUse, ...] = ()


class Stop(Record, frozen=True):
    """Stop the reply `id` within one token; what was generated stays. The empty id stops the load, which then fails."""

    id: str


class Shutdown(Record, frozen=True):
    """Leave. The worker exits with status 0."""


Request = Load | Generate | Stop | Shutdown


# Events


class ModelInfo(msgspec.Struct, frozen=True):
    """What was loaded. `sampling` holds the fields of `Sampling` that its generation_config.json states."""

    name: str
    path: str
    architecture: str
    quantization: str
    context: int
    vocab_size: int
    device: str
    dtype: str
    weight_bytes: int
    cache_bytes: int
    sampling: dict[str, Any] = {}
    cache: str = "fp16"


class Loading(Record, frozen=True):
    """Progress of a load. `unit` is "B" for bytes, a plural such as "layers", or ""; total 0 means unknown."""

    stage: str
    done: int = 0
    total: int = 0
    unit: str = ""


class Ready(Record, frozen=True):
    """The model answers from now on. `note` is what the user should know of how it was loaded; it may be empty."""

    model: ModelInfo
    seconds: float
    note: str = ""


class Prefill(Record, frozen=True):
    """`done` of `total` prompt tokens are in the cache, `cached` of them from earlier turns."""

    id: str
    done: int
    total: int
    cached: int


class Chunk(Record, frozen=True):
    """A piece of the reply. Pieces concatenate to the reply; `tokens` is the number generated so far."""

    id: str
    text: str
    tokens: int


class Stats(msgspec.Struct, frozen=True):
    """Counts and seconds of one reply. `first_token_s` counts from the request; `decode_s` from the first token.

    Of the tokens `drafted` ahead, `accepted` came true, which divided the model's time per token by `speed_up`.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    reply_tokens: int = 0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    seed: int = 0
    drafted: int = 0
    accepted: int = 0
    speed_up: float = 1.0

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first over the time they took; 0 when there is none."""
        return (self.reply_tokens - 1) / self.decode_s if self.decode_s > 0 and self.reply_tokens > 1 else 0.0


class Finished(Record, frozen=True):
    """The reply is complete, for `reason`."""

    id: str
    reason: StopReason
    stats: Stats


class Failed(Record, frozen=True):
    """A request failed. `id` is empty when it was a load. `status` is the exit code of `exl2chat.errors`."""

    id: str
    message: str
    remedy: str = ""
    status: int = 1


class Died(Record, frozen=True):
    """The engine process is gone. Sent by the supervisor, never by a worker.

    The next request starts a new one, which holds no model: send Load again before Generate.
    """

    detail: str


Event = Loading | Ready | Prefill | Chunk | Finished | Failed | Died


class Engine(Protocol):
    """What a front end holds: `local.LocalEngine`, `in_process.InProcessEngine` or `scripted.ScriptedEngine`."""

    async def send(self, request: Request) -> None:
        """Queue a request; starts the worker if none is alive. Never waits for an answer."""

    def events(self) -> AsyncIterator[Event]:
        """Everything the engine says, in order, until `close`. One consumer."""

    async def close(self) -> None:
        """Stop the worker. `events` ends."""
