"""One reply at a time, token by token, over a cache that is kept from turn to turn."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from exl2chat.engine.cache import KVCache
from exl2chat.engine.decoders import MOST_DRAFTS, Decoder, Decoders
from exl2chat.engine.drafting import Speculate, choose_drafter
from exl2chat.engine.samplers.vocabulary import Vocabulary
from exl2chat.engine.speculation import Speculated
from exl2chat.engine.stopping import StopConditions, StopReason, StopStrings
from exl2chat.engine.transformer import Transformer, prefill_chunk
from exl2chat.errors import ChatError, ContextError, UsageError
from exl2chat.model.detokenizer import Detokenizer
from exl2chat.model.tokenizer import Tokenizer
from exl2chat.settings import Sampling

OnPrefill = Callable[[int, int, int], None]
Abort = Callable[[], bool]


class StreamResult(msgspec.Struct, frozen=True):
    """What one step added to the reply.

    `text` may be "" while a character or a stop string is forming; `tokens` are withheld while text is. A stop id and
    the tokens of a stop string are in no result. `reply_tokens` counts everything generated so far.
    """

    text: str
    tokens: tuple[int, ...]
    reply_tokens: int
    stop_reason: StopReason | None = None

    @property
    def eos(self) -> bool:
        """The reply is complete."""
        return self.stop_reason is not None


class StreamStart(msgspec.Struct, frozen=True):
    """How a reply began: the prompt's length, how much of it was in the cache, and the seed that reproduces it."""

    prompt_tokens: int
    cached_tokens: int
    seed: int


@dataclass(slots=True)
class _Reply:
    """The reply being written."""

    decoder: Decoder
    detokenizer: Detokenizer
    stop_ids: frozenset[int]
    stops: StopStrings
    limit: int | None
    abort: Abort
    held: list[int] = field(default_factory=list)
    count: int = 0
    reason: StopReason | None = None

    def release(self) -> tuple[int, ...]:
        """The held tokens, held no longer."""
        tokens, self.held = tuple(self.held), []
        return tokens


class StreamingGenerator:
    """Drives one model over one cache, which holds the first `cache.length` of `tokens`, the sequence so far.

    Only the last token of a sequence is ever missing from the cache, except after an abort or an error; whatever is
    missing is computed before the next token is drawn, so a stream can be dropped at any step and the next one finds
    every token that was computed.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        tokenizer: Tokenizer,
        draft_model: Transformer | None = None,
        draft_cache: KVCache | None = None,
        num_speculative_tokens: int = MOST_DRAFTS,
        speculate: Speculate = "auto",
    ) -> None:
        """Up to `num_speculative_tokens` are drafted at a time, as `speculate` says (`drafting.choose_drafter`). The
        draft model's cache, by default one as long as `cache`, is used by nobody else. UsageError for a draft model
        with fewer tokens than `model`."""
        self._model, self._cache, self._tokenizer = model, cache, tokenizer
        self._vocabulary = _known_ids(tokenizer, model.config.vocab_size)
        if num_speculative_tokens < 1:
            raise UsageError(f"num_speculative_tokens is {num_speculative_tokens}", "it is at least 1")
        if draft_model is not None and draft_cache is None:
            draft_cache = draft_model.new_cache(cache.capacity)
        drafter = choose_drafter(speculate, model, draft_model, draft_cache, self._vocabulary)
        self._decoders = Decoders(
            model, cache, Vocabulary(tokenizer), self._vocabulary, drafter, num_speculative_tokens
        )
        self._conditions = StopConditions(tokenizer.eos_ids)
        self._reply: _Reply | None = None
        self._filled = 0
        self.tokens: list[int] = []

    @property
    def speculated(self) -> Speculated:
        """What drafts did for the last reply so far."""
        return self._decoders.speculated

    def set_stop_conditions(self, conditions: Collection[int | str]) -> None:
        """Token ids and strings that end a reply, from the next `begin_stream_ex` on. Before: the tokenizer's EOS ids.

        StopConditionError, a ValueError, on anything else.
        """
        self._conditions = StopConditions.of(conditions)

    def begin_stream_ex(
        self,
        input_ids: Sequence[int] | torch.Tensor,
        settings: Sampling,
        *,
        max_new_tokens: int | None = None,
        abort: Abort = lambda: False,
        on_prefill: OnPrefill | None = None,
        decode_special_tokens: bool = False,
        continuing: bool = False,
    ) -> StreamStart:
        """Read the prompt: all but its last token go into the cache, less the longest prefix that is there already.

        input_ids: [n] or [1, n]. settings.seed None draws a seed, reported in the result. `abort` is asked before
        every chunk and every token; once it is true the prompt is read no further and `stream_ex` reports "stopped".
        on_prefill(done, total, cached) follows every chunk. `continuing`: the prompt ends in the middle of a text, so
        that the space before the first word is text too. ContextError when the prompt leaves no room for a token.
        """
        self._reply = None
        ids = self._checked(input_ids)
        if max_new_tokens is not None and max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is {max_new_tokens}", "it is at least 1")
        cached = self._reuse(ids)
        longest = min(self._cache.capacity, len(ids) + (max_new_tokens or self._cache.capacity))
        reply = _Reply(
            self._decoders.choose(settings, ids, longest),
            self._tokenizer.detokenizer(decode_special_tokens, continuing),
            self._conditions.ids,
            StopStrings(self._conditions.strings),
            max_new_tokens,
            abort,
        )
        self._prefill(reply.abort, cached, on_prefill)
        self._reply = reply
        return StreamStart(len(ids), cached, reply.decoder.seed)

    def stream_ex(self) -> StreamResult:
        """Generate one token. A result with a stop reason completes the reply; further calls repeat the reason."""
        reply = self._reply
        if reply is None:
            raise ChatError("no reply was begun", "call begin_stream_ex first")
        if reply.reason is not None:
            return StreamResult("", (), reply.count, reply.reason)
        if reply.abort():
            return self._finish(reply, "stopped")
        try:
            token = reply.decoder.next(self.tokens)
        finally:
            self._filled = self._cache.length
        self.tokens.append(token)
        reply.count += 1
        if token in reply.stop_ids:
            return self._finish(reply, "eos")
        return self._emit(reply, token)

    def _emit(self, reply: _Reply, token: int) -> StreamResult:
        """The result of an ordinary token: its text so far as it is certain, and whether the reply ends here."""
        reply.held.append(token)
        text = reply.stops.push(reply.detokenizer.push(token))
        if reply.stops.found is not None:
            reply.reason = "stop_string"
            return StreamResult(text, (), reply.count, reply.reason)
        if reply.count == reply.limit:
            return self._finish(reply, "max_tokens", text)
        if len(self.tokens) == self._cache.capacity:
            return self._finish(reply, "context", text)
        return StreamResult(text, () if reply.stops.held else reply.release(), reply.count)

    def _finish(self, reply: _Reply, reason: StopReason, text: str = "") -> StreamResult:
        """The last result: `text` and whatever was held back."""
        reply.reason = reason
        text += reply.stops.flush() + reply.detokenizer.flush()
        return StreamResult(text, reply.release(), reply.count, reason)

    def _checked(self, input_ids: Sequence[int] | torch.Tensor) -> list[int]:
        """The prompt as a list; UsageError when it is no prompt, ContextError when it is too long."""
        if isinstance(input_ids, torch.Tensor):
            if input_ids.dim() > 1 and input_ids.shape[0] != 1:
                raise UsageError(f"input_ids has shape {list(input_ids.shape)}", "a stream has one row: [1, n]")
            input_ids = input_ids.reshape(-1).tolist()
        ids = list(input_ids)
        if not ids:
            raise UsageError("the prompt has no tokens", "give at least one")
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            raise UsageError("the prompt has token ids that are no tokens", f"ids are 0 to {self._vocabulary - 1}")
        if (over := len(ids) + 1 - self._cache.capacity) > 0:
            larger = self._cache.capacity < self._model.config.context
            raise ContextError(
                f"the prompt has {len(ids)} tokens, {over} too many for a context of {self._cache.capacity}",
                f"shorten it, start a new conversation{', or load the model with a larger --ctx' * larger}",
            )
        return ids

    def _reuse(self, ids: list[int]) -> int:
        """Make `ids` the sequence and cut the cache to what they share with the last one; that length.

        A cache of another length than this generator left it at was used by somebody else: nothing in it is known.
        """
        known = self.tokens[: self._filled] if self._cache.length == self._filled else []
        pairs = zip(known, ids[:-1], strict=False)
        shorter = min(len(known), len(ids) - 1)
        common = next((n for n, (old, new) in enumerate(pairs) if old != new), shorter)
        self._cache.truncate(common)
        self._filled = common
        self.tokens = ids
        return common

    def _prefill(self, abort: Abort, cached: int, on_prefill: OnPrefill | None) -> None:
        last = len(self.tokens) - 1
        chunk = prefill_chunk(self._model.device)
        while self._cache.length < last and not abort():
            start = self._cache.length
            ids = torch.tensor(self.tokens[start : min(start + chunk, last)], device=self._model.device)
            self._model.forward(ids, self._cache, last_only=True)
            self._filled = self._cache.length
            if on_prefill is not None:
                on_prefill(self._cache.length, len(self.tokens), cached)


def _known_ids(tokenizer: Tokenizer, rows: int) -> int:
    """One more than the last id that is a token. Embedding and head often have more rows, which mean nothing."""
    return next((count for count in range(rows, 0, -1) if tokenizer.token_of(count - 1)), rows)
