"""From the logits of a position to its token: what may stand there, the sampler, hooks, and the way back."""

import secrets
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from exl2chat.engine.replies.jobs import Choice, Job
from exl2chat.engine.replies.language import Language
from exl2chat.engine.sampler import Sampler, draw
from exl2chat.errors import ChatError, UsageError
from exl2chat.settings import Sampling

Logits = NDArray[np.float32]
Mask = NDArray[np.bool_]

# What kernels/sample.cu knows of `Sampling`. With any other field set the host samples.
ON_DEVICE = frozenset(
    (
        "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "frequency_penalty",
        "presence_penalty", "penalty_range", "penalty_decay",
    )
)  # fmt: skip


_UNSET = {name: value for name, value in msgspec.structs.asdict(Sampling()).items() if name not in ON_DEVICE}


def known_to_device(settings: Sampling) -> bool:
    """Whether nothing is set that only the host can do."""
    return all(getattr(settings, name) == value for name, value in _UNSET.items())


class _Before(NamedTuple):
    """What a token changed: mirostat's limit as it was, and whether the constraint was told of the token."""

    limit: float | None
    told: bool


class Chooser:
    """Chooses the tokens of one reply, in order, as its job asks. `tokens`: the prompt, then the reply.

    Each token is drawn here, by `draw`, or by a device where it is `on_device`; then it is added. A draw depends on the
    logits, on seed and position, and on what the tokens before say to the sampler and to the constraint; so those can
    be taken back, and the sampler made anew. Only mirostat's limits have to be remembered.
    """

    def __init__(self, job: Job, prompt: Sequence[int], language: Language, healed: int | None = None) -> None:
        """`healed` was taken off the end of `prompt`. The job's constraint begins, and is this reply's own."""
        self._job, self._language, self._healed = job, language, healed
        self.seed, self.sampling = job.sampling.seed or 0, job.sampling
        if job.sampling.seed is None:
            self.seed = secrets.randbits(32)
            self.sampling = msgspec.structs.replace(job.sampling, seed=self.seed)
        self.tokens, self._start = list(prompt), len(prompt)
        self._before: list[_Before] = []
        self._sampler: Sampler | None = None
        self._limit = job.sampling.mirostat_mu  # of the sampler to be made
        self._blocked: dict[int, set[int]] = {}  # by position
        self._mask: Mask | None = None
        self._prepared = False
        self._choice: Choice | None = None
        tells = job.logits or job.probabilities or job.top_tokens > 0
        # whether a device may draw the reply: all of its tokens but those of which some may not come
        self.plain = (
            job.constraint is None
            and job.guidance is None
            and not job.hooks
            and not tells
            and known_to_device(job.sampling)
        )
        if job.constraint is not None:
            job.constraint.begin(job.continuing or healed is not None, healed)

    @property
    def count(self) -> int:
        """Tokens of the reply."""
        return len(self.tokens) - self._start

    @property
    def reply(self) -> list[int]:
        return self.tokens[self._start :]

    @property
    def constrained(self) -> bool:
        return self._job.constraint is not None

    @property
    def finished(self) -> bool:
        """The constraint is satisfied and nothing may follow."""
        return self._job.constraint is not None and self._job.constraint.finished

    @property
    def on_device(self) -> bool:
        """Whether the next token depends on nothing but logits and settings that kernels/sample.cu knows: drawn there,
        with `sampling`, it is the same."""
        return self.plain and self._free

    @property
    def _free(self) -> bool:
        """Whether every token may come next."""
        job = self._job
        early = self.count < job.min_new_tokens and bool(job.stops.ids)
        healing = self._healed is not None and self.count == 0
        return job.constraint is None and not early and not healing and len(self.tokens) not in self._blocked

    def prepare(self) -> None:
        """Find out which tokens may come next, perhaps while their logits are being computed. ChatError for none."""
        if not self._prepared:
            self._mask = None if self._free else self._allowed()
            self._prepared = True

    def _allowed(self) -> Mask:
        job, language = self._job, self._language
        allowed = np.ones(language.size, np.bool_)
        if job.constraint is not None:
            allowed = _fitted(job.constraint.mask(), language.size)
        if self._healed is not None and self.count == 0:
            allowed &= language.healer.continuations(self._healed)
        if job.constraint is not None and job.prefer_end and job.constraint.accepting:
            ends = allowed & language.is_one_of(job.stops.ids | language.end_ids)
            allowed = ends if ends.any() else allowed
        if self.count < job.min_new_tokens:
            later = allowed & ~language.is_one_of(job.stops.ids)
            allowed = later if later.any() else allowed  # where nothing but the end is possible, it is the end
        allowed &= ~language.is_one_of(self._blocked.get(len(self.tokens), ()))
        if not allowed.any():
            raise ChatError(
                "no token may come next: what is banned, healed and asked for excludes every one", "ask for less"
            )
        return allowed

    def draw(self, rows: Logits) -> int:
        """The next token, given the logits [V] of each prompt, which are left as they are. ChatError where there is
        none. Nothing is changed by it until the token is added."""
        job, position = self._job, len(self.tokens)
        rows = rows[:, : self._language.size]
        logits = rows[0] if job.guidance is None else guided(rows[0], rows[1], job.guidance)
        self.prepare()
        masked: Logits = logits if self._mask is None else np.where(self._mask, logits, np.float32(-np.inf))
        candidates = self._remembering().candidates(masked, position)
        choice = Choice(draw(candidates, self.seed, position), candidates, logits)
        for hook in job.hooks:
            hook(choice)
        if not 0 <= choice.token < self._language.size:
            raise UsageError(f"a hook chose {choice.token}", f"ids are 0 to {self._language.size - 1}")
        if choice.token in self._blocked.get(position, ()):  # again and again, where it spells a banned string
            raise UsageError(f"a hook chose {choice.token}, which is banned at this place", "have it choose another")
        self._choice = choice
        return choice.token

    def guess(self, logits: Logits, position: int) -> int:
        """A token drawn from the `logits` [V] of a draft model. Nobody is told of it, and masks do not matter to it."""
        return self._remembering().sample(logits, position)

    def forced(self) -> list[int]:
        """Tokens that probably come next, as the constraint leaves hardly anything else: drafts."""
        return [] if self._job.constraint is None else self._job.constraint.forced()

    def add(self, token: int) -> Choice | None:
        """`token`, drawn here or by a device, becomes part of the reply; how it was drawn here. ChatError, and nothing
        is changed, where a hook chose what the constraint does not allow."""
        choice, self._choice = self._choice, None
        told = self._job.constraint is not None and token not in self._job.stops.ids and (not choice or choice.fed)
        if self._job.constraint is not None and told:
            self._job.constraint.advance(token)
        self._before.append(_Before(self._sampler.surprise_limit if self._sampler else self._limit, told))
        if self._sampler is not None:
            self._sampler.observe(token)
        self.tokens.append(token)
        self._prepared = False
        return choice

    def ban(self, tokens: Collection[int]) -> None:
        """Never choose `tokens` at the next position, until tokens before it are taken back."""
        self._blocked.setdefault(len(self.tokens), set()).update(tokens)
        self._prepared = False

    def rewind(self, count: int) -> None:
        """Take back the last `count` tokens. The first of them is not drawn again at its place."""
        first = self.tokens[-count]
        self.forget(count)
        self.ban((first,))

    def forget(self, count: int) -> None:
        """As it was before the last `count` tokens, at least 1, were added."""
        undone = self._before[-count:]
        del self._before[-count:], self.tokens[-count:]
        if self._job.constraint is not None:
            self._job.constraint.rollback(sum(before.told for before in undone))
        self._blocked = {position: ids for position, ids in self._blocked.items() if position <= len(self.tokens)}
        self._sampler, self._limit, self._prepared = None, undone[0].limit, False

    def _remembering(self) -> Sampler:
        """The sampler, which remembers all of `tokens`."""
        if self._sampler is None:
            settings = msgspec.structs.replace(self.sampling, mirostat_mu=self._limit)
            self._sampler = Sampler(settings, self.tokens, self._language.vocabulary)
        return self._sampler


def guided(wanted: Logits, unwanted: Logits, scale: float) -> Logits:
    """Classifier-free guidance: scale times the log-probabilities of one prompt, 1 - scale times those of the other."""
    first, second = log_softmax(wanted), log_softmax(unwanted)
    return (scale * first + (1 - scale) * second).astype(np.float32)


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def _fitted(mask: Mask, size: int) -> Mask:
    """A constraint's mask for `size` tokens."""
    return mask[:size] if len(mask) >= size else np.pad(mask, (0, size - len(mask)))
