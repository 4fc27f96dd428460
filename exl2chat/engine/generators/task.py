"""One job on its way: which tokens it may draw, and what its tokens mean as text. No tensors, no cache."""

import copy
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from exl2chat.engine.generators.jobs import Choice, EndReason, Job, Token
from exl2chat.engine.generators.language import Language
from exl2chat.engine.sampler import Sampler, draw
from exl2chat.engine.stopping import Strings
from exl2chat.errors import ChatError, UsageError
from exl2chat.model.detokenizer import Detokenizer, Piece

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class End:
    """Why a reply is complete, and what of it is withheld."""

    reason: EndReason
    token: int | None = None
    string: str | None = None
    withheld_text: str = ""
    withheld: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class Advance:
    """What a drawn token led to. `rewound`: so many tokens, the drawn one among them, are taken back."""

    text: str = ""
    tokens: tuple[Token, ...] = ()
    suppressed: tuple[Token, ...] = ()
    rewound: int = 0
    end: End | None = None


@dataclass(frozen=True, slots=True)
class _Pending:
    """A token whose text may become part of a stop string or of a banned one. `sampler`: as it was before the token."""

    token: Token
    sampler: Sampler | None


class Task:
    """Draws the reply of `job` from the logits that it is given, one token at a time: `draw`, then `advance`."""

    def __init__(self, job: Job, language: Language) -> None:
        self.job = job
        self._language = language
        self._stops, self._banned = Strings(job.stops.strings), Strings(job.banned, any_case=True)
        self._healed = _healed(job, language) if job.heal else None
        self.prompts = tuple(prompt[:-1] if self._healed is not None else prompt for prompt in job.prompts)
        self.reply: list[int] = []
        self._sampler = Sampler(job.sampling, self.prompts[0], language.vocabulary)
        self._detokenizer = self._new_detokenizer()
        self._pending: list[_Pending] = []
        self._blocked: dict[int, set[int]] = {}  # by position in the reply
        self._drawn: tuple[Token, bool] | None = None
        self._fed: list[bool] = []
        self._said: list[str] = []
        self._constraint = None if job.constraint is None else job.constraint.clone()  # others may have it too
        if self._constraint is not None:
            self._constraint.begin(continuing=True, healed=self._healed)

    @property
    def seed(self) -> int:
        return self._sampler.seed

    @property
    def text(self) -> str:
        """All that was said."""
        return "".join(self._said)

    def draw(self, rows: Logits) -> int:
        """The next token, given the logits [V] of each prompt. ChatError where there is none; then, and until
        `advance`, nothing is changed."""
        job, position = self.job, len(self.prompts[0]) + len(self.reply)
        rows = rows[:, : self._language.size]
        logits = rows[0] if job.guidance is None else guided(rows[0], rows[1], job.guidance)
        allowed = self._allowed()
        masked: Logits = logits if allowed is None else np.where(allowed, logits, np.float32(-np.inf))
        candidates = self._sampler.candidates(masked, position)
        choice = Choice(draw(candidates, self._sampler.seed, position), candidates, logits)
        for hook in job.hooks:
            hook(choice)
        if not 0 <= choice.token < self._language.size:
            raise UsageError(f"a hook chose {choice.token}", f"ids are 0 to {self._language.size - 1}")
        self._drawn = _described(choice, job), choice.fed
        return choice.token

    def _allowed(self) -> NDArray[np.bool_] | None:
        """Which tokens may come next, [V]; None for all. ChatError for none."""
        job, size, at = self.job, self._language.size, len(self.reply)
        healing = self._healed is not None and at == 0
        early = at < job.min_new_tokens and job.stops.ids
        if self._constraint is None and not healing and not early and at not in self._blocked:
            return None
        allowed = np.ones(size, np.bool_)
        if self._constraint is not None:
            allowed = _fitted(self._constraint.mask(), size)
        if healing and self._healed is not None:
            allowed = allowed & self._language.healer.continuations(self._healed)
        if self._constraint is not None:
            ends = allowed & self._language.is_one_of(job.stops.ids | self._language.end_ids)
            if job.prefer_end and self._constraint.accepting and ends.any():
                allowed = ends
        later = allowed & ~self._language.is_one_of(job.stops.ids) if early else allowed
        allowed = later if later.any() else allowed  # where nothing but the end is possible, it is the end
        allowed = allowed & ~self._language.is_one_of(self._blocked.get(at, ()))
        if not allowed.any():
            raise ChatError("every token is forbidden here", "ban less, or ask for less")
        return allowed

    def advance(self) -> Advance:
        """The drawn token becomes part of the reply."""
        if self._drawn is None:
            raise RuntimeError("no token was drawn")
        (token, fed), self._drawn = self._drawn, None
        self.reply.append(token.id)
        self._fed.append(fed)
        if token.id in self.job.stops.ids:
            return self._finish(End("stop_token", token=token.id))
        text = self._detokenizer.push(token.id)
        token = Token(token.id, text, token.probability, token.top, token.logits)
        self._pending.append(_Pending(token, None))
        if (at := self._banned_at()) is not None:
            return self._take_back(at)
        held = self._holds_banned() or (bool(self._banned) and not text)  # nor the first bytes of a character
        if held:
            self._pending[-1] = _Pending(token, copy.deepcopy(self._sampler))
        self._sampler.observe(token.id)
        if self._constraint is not None and fed:
            self._constraint.advance(token.id)
        return self._emit(held)

    def _emit(self, held: bool) -> Advance:
        joined = self._joined()
        if (match := self._stops.find(joined)) is not None:
            return self._stop(match.string, joined[: match.start])
        if self._constraint is not None and self._constraint.finished:
            return self._finish(End("end_filter", token=self.reply[-1]))
        if len(self.reply) == self.job.max_new_tokens:
            return self._finish(End("max_new_tokens"))
        return Advance() if held or self._stops.partial(joined) else self._release()

    def _release(self, more: str = "", end: End | None = None) -> Advance:
        """Everything that is pending, and `more`."""
        text, tokens = self._joined() + more, tuple(pending.token for pending in self._pending)
        self._pending = []
        self._said.append(text)
        return Advance(text, tokens, end=end)

    def _finish(self, end: End) -> Advance:
        return self._release(self._detokenizer.flush(), end)

    def _stop(self, found: str, text: str) -> Advance:
        """A stop string is complete: what is in front of it is said, tokens that have a part of it are not."""
        ends = accumulate(len(pending.token.text) for pending in self._pending)
        whole = sum(end <= len(text) for end in ends)
        tokens = [pending.token for pending in self._pending]
        withheld_text = self._joined()[len(text) :]
        self._pending = []
        self._said.append(text)
        end = End("stop_string", None, found, withheld_text, tuple(tokens[whole:]))
        return Advance(text, tuple(tokens[:whole]), end=end)

    def _joined(self) -> str:
        return "".join(pending.token.text for pending in self._pending)

    def _banned_at(self) -> int | None:
        """Which pending token begins a banned string that is complete before any stop string is."""
        joined = self._joined()
        match, stop = self._banned.find(joined), self._stops.find(joined)
        if match is None or (stop is not None and stop[:2] <= match[:2]):
            return None
        pieces = [pending.token.text for pending in self._pending]
        at = next(n for n, end in enumerate(accumulate(map(len, pieces))) if end > match.start)
        while at and not pieces[at - 1]:
            at -= 1  # the first bytes of the same character
        return at

    def _holds_banned(self) -> bool:
        """Whether the pending text may end with the beginning of a banned string."""
        return self._banned.partial(self._joined()) > 0

    def _take_back(self, at: int) -> Advance:
        """Forget pending tokens from `at` on, the first of which is not drawn again at its place."""
        taken = self._pending[at:]
        suppressed = tuple(pending.token for pending in taken)
        place = len(self.reply) - len(taken)
        if self._constraint is not None:
            self._constraint.rollback(sum(self._fed[place:-1]))  # of the last one it was not told
        if (sampler := taken[0].sampler) is not None:
            self._sampler = sampler
        del self._pending[at:], self.reply[place:], self._fed[place:]
        self._blocked = {where: ids for where, ids in self._blocked.items() if where <= place}
        self._blocked.setdefault(place, set()).add(suppressed[0].id)
        self._detokenizer = self._new_detokenizer()
        for token in self.reply:
            self._detokenizer.push(token)
        return Advance(suppressed=suppressed, rewound=len(suppressed))

    def _new_detokenizer(self) -> Detokenizer:
        """Of a reply that goes on from the prompt: less the healed token's text, which is the prompt's."""
        if self._healed is None:
            return self._language.tokenizer.detokenizer(self.job.special, continuing=True)
        cut = len(self._language.healer.text(self._healed).encode())
        first = True

        def piece(token: int) -> Piece | None:
            nonlocal first
            text = self._language.piece(token, self.job.special)
            if first and text is not None:
                text = Piece(text.rest[cut:], text.rest[cut:])
            first = False
            return text

        return Detokenizer(piece, continuing=True)


def guided(wanted: Logits, unwanted: Logits, scale: float) -> Logits:
    """Classifier-free guidance: scale times the log-probabilities of one prompt, 1 - scale times those of the other."""
    first, second = _log_softmax(wanted), _log_softmax(unwanted)
    return (scale * first + (1 - scale) * second).astype(np.float32)


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def _healed(job: Job, language: Language) -> int | None:
    """The last token of the prompts, if it can be healed: there is text in it, and tokens before."""
    last = {prompt[-1] for prompt in job.prompts if prompt}
    if len(last) > 1:
        raise UsageError("prompts that end in different tokens cannot be healed", "give them the same end")
    if any(len(prompt) < 2 for prompt in job.prompts):
        return None
    token = last.pop()
    return token if language.healer.text(token) else None


def _fitted(mask: NDArray[np.bool_], size: int) -> NDArray[np.bool_]:
    """A constraint's mask for `size` tokens."""
    return mask[:size] if len(mask) >= size else np.pad(mask, (0, size - len(mask)))


def _described(choice: Choice, job: Job) -> Token:
    """The chosen token with what the job wants to know of it."""
    logits = choice.logits.copy() if job.logits else None
    if not job.probabilities and not job.top_tokens:
        return Token(choice.token, "", logits=logits)
    probabilities, ids = np.exp(_log_softmax(choice.candidates.logits)), choice.candidates.ids
    best = np.argsort(-probabilities, kind="stable")[: job.top_tokens]
    top = tuple((int(ids[n]), float(probabilities[n])) for n in best)
    probability = float(probabilities[ids == choice.token].sum())
    return Token(choice.token, "", probability if job.probabilities else None, top, logits)
