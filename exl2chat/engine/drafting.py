"""Guesses of what comes next. A wrong one costs time and nothing else: every token is drawn from the model's own logits
(`engine.speculation`)."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Literal, Protocol

import torch

from exl2chat.engine.cache import KVCache
from exl2chat.engine.device_steps import RESULTS, DeviceSteps, Steps, runs_on_device
from exl2chat.engine.embeddings import FIRST_ID
from exl2chat.engine.replies.choosing import Chooser, known_to_device
from exl2chat.engine.step_logits import StepLogits
from exl2chat.engine.transformer import Transformer, prefill_chunk
from exl2chat.errors import ChatError, UsageError
from exl2chat.model.tokenizer import Tokenizer
from exl2chat.settings import Sampling

SHORTEST = 3  # tokens that must have been there before: one or two are followed by anything
LONGEST = 32
RECENT = 8  # occurrences that are compared


Speculate = Literal["auto", "draft", "ngram", "off"]


class Drafter(Protocol):
    """Proposes tokens of one reply after another."""

    @property
    def is_model(self) -> bool:
        """Whether it is one, whose ideas take the device some work."""

    def begin(self, chooser: Chooser) -> bool:
        """A reply begins, whose tokens `chooser` chooses. Whether there may be ideas for it."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens that may follow `tokens`, the whole sequence; none where there is no idea."""


class SuffixDrafter:
    """What followed the longest earlier occurrence of the sequence's end (prompt lookup), the latest of equals.

    Needs no training. After 8192 tokens a miss takes 2 us, a match with RECENT long passages 50.
    """

    is_model = False

    def __init__(self, known: Sequence[int] = ()) -> None:
        """Drafts may come from `known` too, a text that stands before every sequence."""
        self._known = tuple(known)
        self._tokens: list[int] = []
        self._latest: dict[int, int] = {}  # by the hash of SHORTEST tokens, where they end
        self._earlier: list[int] = []  # by token: where those that end with it ended before, 0 for nowhere
        self._add(self._known)

    def begin(self, chooser: Chooser) -> bool:  # noqa: ARG002
        return True

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        self._follow(tokens)
        earlier = self._earlier[-1:]
        if not earlier or not earlier[0]:
            return []
        while len(earlier) < RECENT and (end := self._earlier[earlier[-1] - 1]):
            earlier.append(end)
        start = max(earlier, key=lambda end: (self._matching(end), end))
        drafts: list[int] = []
        for at in range(start, start + count):  # a passage that reaches the end goes on with its own repetition
            token = self._tokens[at] if at < len(self._tokens) else drafts[at - len(self._tokens)]
            if token >= FIRST_ID:  # nobody draws an embedding
                break
            drafts.append(token)
        return drafts

    def _follow(self, tokens: Sequence[int]) -> None:
        """Take in what was added. Where the end of what is known is not there any more, forget all that is not."""
        known = len(self._tokens) - len(self._known)
        recent = min(known, LONGEST)
        if len(tokens) < known or list(tokens[known - recent : known]) != self._tokens[len(self._tokens) - recent :]:
            known = common_prefix(self._tokens[len(self._known) :], list(tokens))
            self._forget(len(self._tokens) - len(self._known) - known)
        self._add(tokens[known:])

    def _forget(self, count: int) -> None:
        for _ in range(count):
            self._latest[hash(tuple(self._tokens[-SHORTEST:]))] = self._earlier.pop()
            self._tokens.pop()

    def _add(self, tokens: Sequence[int]) -> None:
        """Numbers alone are kept: the garbage collector looks at every list that there is, and at no number."""
        for token in tokens:
            self._tokens.append(token)
            end, key = len(self._tokens), hash(tuple(self._tokens[-SHORTEST:]))
            self._earlier.append(self._latest.get(key, 0))
            self._latest[key] = end

    def _matching(self, end: int) -> int:
        """How many tokens before `end` are those at the end of the sequence, LONGEST at most."""
        own, length = self._tokens, SHORTEST
        while length < min(LONGEST, end) and own[end - 1 - length] == own[-1 - length]:
            length += 1
        return length


class ModelDrafter:
    """A smaller model of the same vocabulary. It draws as the reply does, with the same settings and noise for the
    same token at the same position: where both models agree about a distribution, they draw the same token."""

    is_model = True

    def __init__(self, model: Transformer, cache: KVCache, size: int) -> None:
        """Drafts of the first `size` ids, which `model` has. The cache is this drafter's own."""
        self._model, self._cache, self._size = model, cache, size
        self._logits = StepLogits(model, cache, size)
        self._steps: Steps | None = DeviceSteps(model, cache, size) if runs_on_device(model, size) else None
        self._held: list[int] = []  # the tokens in the cache
        self._chooser: Chooser | None = None

    def begin(self, chooser: Chooser) -> bool:
        self._chooser = chooser
        return True

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        sequence, self._held = list(tokens), self._shared(tokens)
        count = min(count, self._cache.capacity + 1 - len(sequence))
        if count < 1 or self._chooser is None:
            return []
        self._read(sequence)
        if self._steps is not None and known_to_device(self._chooser.sampling) and sequence[-1] < self._size:
            self._draw_there(self._steps, sequence, min(count, RESULTS), self._chooser.sampling)
        else:
            self._draw_here(sequence, count, self._chooser)
        self._held = sequence[: self._cache.length]
        return sequence[len(tokens) :]

    def _draw_here(self, sequence: list[int], count: int, chooser: Chooser) -> None:
        """Append drafts that the host draws, from logits that are brought to it one by one."""
        try:
            for _ in range(count):
                self._logits.queue(sequence)
                sequence.append(chooser.guess(self._logits.take(), len(sequence)))
        except ChatError:  # its logits are no numbers: the drafts end here
            pass

    def _draw_there(self, steps: Steps, sequence: list[int], count: int, sampling: Sampling) -> None:
        """Append drafts that the device draws, each from the one before. The host waits for them all at once."""
        length = len(sequence)
        steps.start(sequence, sampling)
        drawn = [take()[0] for take in [steps.queue() for _ in range(count)]]
        sequence += takewhile(lambda token: token >= 0, drawn)
        self._cache.length = min(length + count - 1, len(sequence))

    def _shared(self, tokens: Sequence[int]) -> list[int]:
        """Cut the cache to what it shares with `tokens`, and say what that is. Nothing where others have used it."""
        known = self._held if self._cache.length == len(self._held) else []
        self._cache.truncate(common_prefix(known, tokens))
        return known[: self._cache.length]

    def _read(self, sequence: list[int]) -> None:
        """Bring all but the last token into the cache, a chunk at a time."""
        chunk = prefill_chunk(self._model.device)
        while (missing := sequence[self._cache.length : -1][:chunk]) and len(missing) > 1:
            self._model.forward(self._model.inputs(missing), self._cache, last_only=True)


class ForcedDrafter:
    """What a constraint leaves no choice about.

    A JSON schema takes 5 us to find that there is a choice, and up to 0.1 ms to spell what there is none about.
    """

    is_model = False

    def __init__(self) -> None:
        self._chooser: Chooser | None = None

    def begin(self, chooser: Chooser) -> bool:
        self._chooser = chooser
        return chooser.constrained

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:  # noqa: ARG002
        return self._chooser.forced()[:count] if self._chooser else []


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike: by halves, as slices compare faster (28 us of 8192, not 494)."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def choose_drafters(
    speculate: Speculate,
    model: Transformer,
    draft: Transformer | None,
    draft_cache: KVCache | None,
    size: int,
    known: Sequence[int] = (),
) -> tuple[Drafter, ...]:
    """What drafts for one reply at a time: what a constraint forces, and before all others; then see `choose_drafts`,
    and n-grams by default where the device draws. N-grams may be those of `known` too."""
    kind = choose_drafts(speculate, model, draft, size)
    drafters: list[Drafter] = []
    if speculate != "off" and repays_drafts(model.device, model.dtype):
        drafters.append(ForcedDrafter())
    if kind == "draft" and draft is not None and draft_cache is not None:
        drafters.append(ModelDrafter(draft, draft_cache, size))
    elif kind == "ngram" or (speculate == "auto" and runs_on_device(model, size)):
        drafters.append(SuffixDrafter(known))
    return tuple(drafters)


def choose_drafts(
    speculate: Speculate, model: Transformer, draft: Transformer | None, size: int
) -> Literal["draft", "ngram"] | None:
    """What drafts for `model`, which draws from `size` ids. "auto" is the draft model where there is one, or n-grams on
    a CPU, and nothing where that does not pay (`repays_drafts`). UsageError where the draft model lacks some of the
    ids."""
    if draft is None:
        if speculate == "draft":
            raise UsageError("there is no draft model to speculate with", "name one with --draft-model")
        free = speculate == "auto" and model.device.type == "cpu" and repays_drafts(model.device, model.dtype)
        return "ngram" if speculate == "ngram" or free else None
    if draft.config.vocab_size < size:
        raise UsageError(
            f"the draft model has {draft.config.vocab_size} tokens and the model {size}",
            "use a draft model of the same family, with the same tokenizer",
        )
    if takes_draft_model(speculate, model.device, model.dtype):
        return "draft"
    return "ngram" if speculate == "ngram" else None


def takes_draft_model(speculate: Speculate, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a draft model that is there is used for a model that runs so."""
    return speculate == "draft" or (speculate == "auto" and repays_drafts(device, dtype))


def rounds_alike(model: Transformer) -> bool:
    """Whether drafts beside it leave the rounding of a row to what it is without them: on a GPU not with LoRAs."""
    return not model.adapters or model.device.type == "cpu"


def repays_drafts(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a step of several tokens takes little longer than one of one: on a GPU, and on a CPU in float32
    (benchmarks/NOTES.md). In half precision it does not on a CPU, and rounds in another way: replies would part."""
    return device.type == "cuda" or dtype == torch.float32


def check_draft_tokenizer(draft: Tokenizer, tokenizer: Tokenizer, name: str) -> None:
    """UsageError naming the first id that means another token to the draft model called `name`."""
    for token in range(tokenizer.vocab_size):
        ours, theirs = tokenizer.token_of(token), draft.token_of(token)
        if ours and ours != theirs:
            raise UsageError(
                f"the draft model {name} has another vocabulary: its token {token} is {theirs!r:.40}, not {ours!r:.40}",
                "use a draft model of the same family, with the same tokenizer",
            )
