"""What a dynamic generator is asked for, and what it answers: jobs and their results."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from exl2chat.engine.constraints import Constraint
from exl2chat.engine.embeddings import InputEmbeddings
from exl2chat.engine.samplers.candidates import Candidates
from exl2chat.engine.stopping import StopConditions
from exl2chat.errors import UsageError
from exl2chat.settings import Sampling

EndReason = Literal["stop_token", "stop_string", "max_new_tokens", "end_filter", "context", "stopped"]


@dataclass(slots=True)
class Choice:
    """What a hook sees of one draw: it may change `token`, or `fed`, whether the job's constraint is told of it.

    candidates: what was drawn from. logits: those of the model, float32 [V], not to be changed.
    """

    token: int
    candidates: Candidates
    logits: NDArray[np.float32]
    fed: bool = True


@dataclass(frozen=True, slots=True)
class Job:
    """A reply to be written.

    prompts: the ids of one text; or of two with `guidance` g, whose log-probabilities are added as g times the first
    and 1 - g times the second. `sampling.seed` None draws a seed, which `Final` tells.
    min_new_tokens: no stop id is drawn before. heal: the prompt's last token is taken off, and the first of the reply
    begins with its text, unless it is the only one, hidden, or no whole characters. banned: texts that the reply will
    not contain, in whatever case. constraint: several jobs may have the same, each works on a copy. prefer_end: the
    reply ends as soon as the constraint allows it to. special: special tokens are part of the text. continuing: the
    prompt ends in the middle of a text, so that the space before the first word is text too.
    top_tokens, probabilities, logits: what each token's result shall tell beside the token. embeddings: those whose ids
    are in the prompts.
    """

    prompts: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    sampling: Sampling
    stops: StopConditions = field(default_factory=StopConditions)
    min_new_tokens: int = 0
    guidance: float | None = None
    heal: bool = False
    banned: Collection[str] = ()
    constraint: Constraint | None = None
    prefer_end: bool = False
    special: bool = False
    top_tokens: int = 0
    probabilities: bool = False
    logits: bool = False
    hooks: tuple[Callable[[Choice], None], ...] = ()
    continuing: bool = True
    embeddings: tuple[InputEmbeddings, ...] = ()

    def __post_init__(self) -> None:
        if len(self.prompts) != (1 if self.guidance is None else 2):
            raise UsageError(f"a job of {len(self.prompts)} prompts", "give one, or two and a guidance scale")


@dataclass(frozen=True, slots=True)
class Started:
    """The job no longer waits."""

    serial: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """`done` of `total` tokens of the job's prompts are computed, or were cached."""

    serial: int
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a reply, the text it completed, and what the job wants to know of its draw: its probability among the
    candidates, the likeliest candidates with theirs, best first, and the logits of the model float32 [V]."""

    id: int
    text: str
    probability: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    logits: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Final:
    """How a job ended. text: all of the reply. `token` or `string` is what ended it; `withheld` tokens are those of
    which a stop string has a part. new_tokens counts a stop id too. Seconds spent waiting, reading and writing. Of
    the tokens `drafted`, those `accepted` became part of the reply."""

    reason: EndReason
    text: str
    seed: int
    new_tokens: int
    prompt_tokens: int
    cached_tokens: int
    waited: float
    read: float
    wrote: float
    token: int | None = None
    string: str | None = None
    withheld_text: str = ""
    withheld: tuple[Token, ...] = ()
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Streamed:
    """What a token added to a reply; "" while a character, a stop string or a banned string may be forming.

    `suppressed` tokens spelled a banned string and were taken back.
    """

    serial: int
    text: str = ""
    tokens: tuple[Token, ...] = ()
    suppressed: tuple[Token, ...] = ()
    final: Final | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The job alone cannot go on after `text`: its constraint leaves no token, a hook raised something, or its logits
    are not numbers."""

    serial: int
    error: Exception
    text: str = ""


Result = Started | Prefilled | Streamed | Failed


@dataclass(slots=True)
class Times:
    """When a job was enqueued, started, and first drew a token, by a clock that never goes back."""

    enqueued: float
    started: float = 0.0
    drew: float = 0.0
