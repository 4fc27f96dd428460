"""One reply on its way, for every generator: from logits, or from tokens that a device drew, to text, to what is held
back or taken back, and to the end. No tensors, no cache."""

from dataclasses import dataclass

import numpy as np

from exl2chat.engine.replies.choosing import Chooser, log_softmax
from exl2chat.engine.replies.jobs import Choice, EndReason, Job, Token
from exl2chat.engine.replies.language import Language
from exl2chat.engine.stopping import Gate, Passed
from exl2chat.errors import UsageError
from exl2chat.model.detokenizer import Detokenizer

NOTHING = Passed()


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
    """What a token led to. `rewound`: so many tokens, it among them, are taken back."""

    text: str = ""
    tokens: tuple[Token, ...] = ()
    suppressed: tuple[Token, ...] = ()
    rewound: int = 0
    end: End | None = None


class Task:
    """Writes the reply of `job`, one token at a time: `chooser.draw`, or a draw on a device, and then `push`."""

    def __init__(self, job: Job, language: Language, longest: int | None = None) -> None:
        """The sequence gets `longest` tokens at most. The job's constraint is this task's own."""
        self.job, self._language, self._longest = job, language, longest
        self._gate = Gate(job.stops.strings, job.banned)
        healed = _healed(job, language) if job.heal else None
        self._healed = "" if healed is None else language.healer.text(healed)
        self.prompts = tuple(prompt[:-1] if self._healed else prompt for prompt in job.prompts)
        self.chooser = Chooser(job, self.prompts[0], language, healed)
        self._detokenizer = self._new_detokenizer()
        self._held: list[Token] = []
        self._owed = NOTHING  # of what passed, but for an interrupt
        self._said: list[str] = []
        self.end: End | None = None  # of the reply, once it is complete

    @property
    def text(self) -> str:
        """All that was said."""
        return "".join(self._said)

    def push(self, token: int) -> Advance:
        """`token` becomes part of the reply. If this is broken off, by an interrupt, say, nothing has changed, unless
        tokens were to be taken back: then they may have been."""
        count, held, said = len(self.chooser.tokens), list(self._held), len(self._said)
        try:
            return self._push(token)
        except BaseException:
            self._undo(count, held, said)
            raise

    def _push(self, token: int) -> Advance:
        choice = self.chooser.add(token)
        if token in self.job.stops.ids:
            return self.finish(End("stop_token", token=token))
        text = self._text_of(token, self.chooser.count)
        self._held.append(Token(token, text) if choice is None else _described(choice, text, self.job))
        passed = self._gate.push(text)
        if self._gate.banned is not None:
            return self._take_back(self._gate.banned.tokens)
        if self._gate.found is not None:
            withheld = tuple(self._held[self._owed.tokens + passed.tokens :])
            return self._release(passed, End("stop_string", None, self._gate.found, self._gate.flush(), withheld))
        if self.chooser.finished:
            return self.finish(End("end_filter", token=token), passed)
        if self.chooser.count == self.job.max_new_tokens:
            return self.finish(End("max_new_tokens"), passed)
        if len(self.chooser.tokens) == self._longest:
            return self.finish(End("context"), passed)
        return self._release(passed)

    def finish(self, end: End, passed: Passed = NOTHING) -> Advance:
        """The end of the reply: what passed and whatever was held back."""
        text = passed.text + self._gate.flush() + self._detokenizer.flush()
        return self._release(Passed(text, len(self._held)), end)

    def _release(self, passed: Passed, end: End | None = None) -> Advance:
        text, count = self._owed.text + passed.text, self._owed.tokens + passed.tokens
        tokens, self._held = tuple(self._held[:count]), self._held[count:]
        self._said.append(text)
        self._owed, self.end = NOTHING, end
        return Advance(text, tokens, end=end)

    def _undo(self, count: int, held: list[Token], said: int) -> None:
        """Back to when the chooser had `count` tokens, of which `held` were not told, after `said` texts."""
        added = len(self.chooser.tokens) - count
        if added > 0:
            self.chooser.forget(added)
        self._held, self.end = held[: len(held) + min(added, 0)], None
        del self._said[said:]
        self._gate = Gate(self.job.stops.strings, self.job.banned)
        self._detokenizer = self._new_detokenizer()
        reply = self.chooser.reply
        passed = [self._gate.push(self._text_of(token, number)) for number, token in enumerate(reply, 1)]
        text, tokens = "".join(each.text for each in passed), sum(each.tokens for each in passed)
        self._owed = Passed(text[len(self.text) :], tokens - (len(reply) - len(self._held)))

    def _text_of(self, token: int, number: int) -> str:
        """The characters that a token of the reply completes, the first being number 1. Those of the healed token are
        the prompt's."""
        text = self._detokenizer.push(token)
        return text.removeprefix(self._healed) if number == 1 else text

    def _take_back(self, count: int) -> Advance:
        """Go back to where a banned string began, and have another token begin there."""
        suppressed = tuple(self._held[-count:])
        self.chooser.rewind(count)
        del self._held[-count:]
        self._detokenizer = self._new_detokenizer()
        for token in self.chooser.reply:
            self._detokenizer.push(token)
        return Advance(suppressed=suppressed, rewound=count)

    def _new_detokenizer(self) -> Detokenizer:
        return self._language.tokenizer.detokenizer(self.job.special, self.job.continuing or self._healed != "")


def _healed(job: Job, language: Language) -> int | None:
    """The last token of the prompts, if it can be healed: there is text in it, and tokens before."""
    last = {prompt[-1] for prompt in job.prompts if prompt}
    if len(last) > 1:
        raise UsageError("prompts that end in different tokens cannot be healed", "give them the same end")
    if any(len(prompt) < 2 for prompt in job.prompts):
        return None
    token = last.pop()
    return token if language.healer.text(token) else None


def _described(choice: Choice, text: str, job: Job) -> Token:
    """The chosen token with what the job wants to know of it."""
    logits = choice.logits.copy() if job.logits else None
    if not job.probabilities and not job.top_tokens:
        return Token(choice.token, text, logits=logits)
    probabilities, ids = np.exp(log_softmax(choice.candidates.logits)), choice.candidates.ids
    best = np.argsort(-probabilities, kind="stable")[: job.top_tokens]
    top = tuple(zip(ids[best].tolist(), probabilities[best].tolist(), strict=True))
    probability = float(probabilities[ids == choice.token].sum())
    return Token(choice.token, text, probability if job.probabilities else None, top, logits)
