"""From the logits of one position to its token: what may stand there, the sampler, and the way back."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from exl2chat.engine.constraints import Constraint
from exl2chat.engine.sampler import Sampler, draw
from exl2chat.engine.samplers.candidates import Candidates
from exl2chat.engine.samplers.vocabulary import Vocabulary
from exl2chat.errors import ChatError
from exl2chat.settings import Sampling


@dataclass(frozen=True, slots=True)
class Limits:
    """What a reply may be. `constraint` has begun. `preferred` ids are taken as soon as the constraint allows one.

    first: which tokens the reply may begin with, bool [V]; None: any.
    """

    constraint: Constraint | None = None
    preferred: frozenset[int] = frozenset()
    first: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw: the token, what it was drawn from, and the logits [V] float32 as the model computed them.

    The logits may be overwritten by the next step.
    """

    token: int
    candidates: Candidates
    logits: NDArray[np.float32]


class Chooser:
    """Chooses the tokens of one reply, in order. It knows of each position only what the tokens before it say.

    A step is `choose(logits, position)`, or `prepare(position)` first, while the logits are still being computed.
    """

    def __init__(
        self, settings: Sampling, tokens: Sequence[int], vocabulary: Vocabulary | None, limits: Limits | None = None
    ) -> None:
        """`tokens`: the prompt. A seed is drawn where the settings have none."""
        self._limits = limits or Limits()
        self._vocabulary = vocabulary
        self._sampler = Sampler(settings, tokens, vocabulary)
        self._settings = msgspec.structs.replace(settings, seed=self._sampler.seed)
        self._start = len(tokens)
        self._surprises: list[float] = []  # mirostat's limit before every token
        self._banned: dict[int, set[int]] = {}  # by position
        self._mask: NDArray[np.bool_] | None = None
        self.last: Draw | None = None

    @property
    def seed(self) -> int:
        return self._sampler.seed

    @property
    def finished(self) -> bool:
        """The constraint is satisfied and nothing may follow."""
        return self._limits.constraint is not None and self._limits.constraint.finished

    def prepare(self, position: int) -> None:
        """Find out what the constraint allows at `position`. ChatError where it is nothing."""
        mask = self._limits.constraint.mask() if self._limits.constraint else None
        first = self._limits.first if position == self._start else None
        if mask is None:
            self._mask = first
            return
        if first is not None:
            mask = mask[: len(first)] & first[: len(mask)]
        ends = [token for token in self._limits.preferred if 0 <= token < len(mask) and mask[token]]
        if ends:
            mask[:] = False
            mask[ends] = True
        self._mask = mask

    def choose(self, logits: NDArray[np.float32], position: int) -> int:
        """The token at `position`, of which the sampler and the constraint are told. `logits` are left as they are.

        ChatError when the logits are not numbers or no token may stand here.
        """
        if self._mask is None:
            self.prepare(position)
        candidates = self._sampler.candidates(self._masked(logits, position), position)
        token = draw(candidates, self.seed, position)
        self._surprises.append(self._sampler.surprise_limit)
        self._sampler.observe(token)
        if self._limits.constraint:
            self._limits.constraint.advance(token)
        self._mask = None
        self.last = Draw(token, candidates, logits)
        return token

    def guess(self, logits: NDArray[np.float32], position: int) -> int:
        """The token drawn from the `logits` of a draft model, of which nobody is told. Masks do not matter to it."""
        return self._sampler.sample(logits, position)

    def _masked(self, logits: NDArray[np.float32], position: int) -> NDArray[np.float32]:
        banned = self._banned.get(position)
        if self._mask is None and not banned:
            return logits
        allowed = np.full(len(logits), self._mask is None)
        if self._mask is not None:
            known = self._mask[: len(logits)]
            allowed[: len(known)] = known
        if banned:
            allowed[[token for token in banned if 0 <= token < len(logits)]] = False
        if not allowed.any():
            raise ChatError(
                "no token may come next: what is banned, healed and asked for excludes every one", "ask for less"
            )
        return np.where(allowed, logits, np.float32(-np.inf))

    def ban(self, position: int, tokens: Collection[int]) -> None:
        """Never choose `tokens` at `position`."""
        self._banned.setdefault(position, set()).update(tokens)

    def rewind(self, tokens: Sequence[int], count: int) -> None:
        """Take back the last `count` tokens, so that `tokens` are the sequence. What was banned up to here remains."""
        self._banned = {position: ids for position, ids in self._banned.items() if position <= len(tokens)}
        if self._limits.constraint:
            self._limits.constraint.rollback(count)
        settings = msgspec.structs.replace(self._settings, mirostat_mu=self._surprises[-count])
        del self._surprises[-count:]
        self._sampler = Sampler(settings, tokens, self._vocabulary)
        self._mask = None


class TokenDetails(msgspec.Struct, frozen=True):
    """How a token was drawn: its probability and those of the likeliest, as the settings left them, and the logits.

    top: pairs of id and probability, the likeliest first, fewer where fewer could be drawn. logits: float32 [V] as the
    model computed them, None unless asked for.
    """

    probability: float
    top: tuple[tuple[int, float], ...] = ()
    logits: NDArray[np.float32] | None = None


def describe(drawn: Draw, top: int, logits: bool) -> TokenDetails:
    """The details of a draw with the `top` likeliest tokens."""
    ids, weights = drawn.candidates.ids, np.exp(drawn.candidates.logits - drawn.candidates.logits.max())
    probabilities = weights / weights.sum(dtype=np.float64)
    best = np.argsort(-probabilities, kind="stable")[:top]
    return TokenDetails(
        float(probabilities[ids == drawn.token][0]),
        tuple(zip(ids[best].tolist(), probabilities[best].tolist(), strict=True)),
        drawn.logits.copy() if logits else None,
    )
