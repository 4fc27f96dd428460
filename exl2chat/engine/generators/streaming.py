"""One reply at a time, token by token, over a cache that is kept from turn to turn."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch

from exl2chat.engine.cache import KVCache
from exl2chat.engine.choosing import Chooser, Limits, TokenDetails, describe
from exl2chat.engine.constraints import Constraint
from exl2chat.engine.decoders import MOST_DRAFTS, Decoder, Decoders
from exl2chat.engine.drafting import Speculate, choose_drafter, common_prefix
from exl2chat.engine.embeddings import InputEmbeddings, check_prompt
from exl2chat.engine.generators.language import Language
from exl2chat.engine.lora import Scaled, with_adapters
from exl2chat.engine.speculation import Speculated
from exl2chat.engine.stopping import Banned, Gate, Passed, StopConditions, StopReason
from exl2chat.engine.token_table import TokenTable
from exl2chat.engine.transformer import Transformer, prefill_chunk
from exl2chat.errors import ChatError, ContextError, UsageError
from exl2chat.model.detokenizer import Detokenizer
from exl2chat.model.tokenizer import Tokenizer
from exl2chat.settings import Sampling

OnPrefill = Callable[[int, int, int], None]
Abort = Callable[[], bool]


class Extras(msgspec.Struct, frozen=True):
    """What a reply may be asked for besides its text. With any of it the host draws, on a GPU too.

    constraint: what the reply is; it ends as soon as that is complete. prefer_end: end it as soon as the constraint
    allows it. token_healing: the first token takes the place of the prompt's last one, whose text it repeats and goes
    on from, unless that is the only one, hidden, or no whole characters. banned_strings, in any case of their letters,
    do not come to be: tokens are taken back and others drawn. return_probabilities, return_top_tokens (so many) and
    return_logits fill `StreamResult.details`.
    """

    constraint: Constraint | None = None
    prefer_end: bool = False
    token_healing: bool = False
    banned_strings: Collection[str] = ()
    return_probabilities: bool = False
    return_top_tokens: int = 0
    return_logits: bool = False

    def __post_init__(self) -> None:
        if self.return_top_tokens < 0:
            raise UsageError(f"return_top_tokens is {self.return_top_tokens}", "it is at least 0")

    @property
    def wants_details(self) -> bool:
        return self.return_probabilities or self.return_top_tokens > 0 or self.return_logits


PLAIN = Extras()
NOTHING = Passed()


class StreamResult(msgspec.Struct, frozen=True):
    """What one step added to the reply.

    `text` may be "" while a character, a stop string or a banned one is forming; `tokens` are withheld while text is,
    and so are their `details`. A stop id and the tokens of a stop string are in no result. `reply_tokens` counts the
    tokens of the reply so far. suppressed: text that was taken back, as a banned string was in it.
    """

    text: str
    tokens: tuple[int, ...]
    reply_tokens: int
    stop_reason: StopReason | None = None
    suppressed: str = ""
    details: tuple[TokenDetails, ...] = ()

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
    """The reply being written. `start` is where it begins in the sequence, with the text of `healed` again."""

    decoder: Decoder
    new_detokenizer: Callable[[], Detokenizer]
    detokenizer: Detokenizer
    stop_ids: frozenset[int]
    gate: Gate
    limit: int | None
    abort: Abort
    settings: Sampling
    extras: Extras
    start: int
    healed: str
    held: list[tuple[int, TokenDetails | None]] = field(default_factory=list)
    reason: StopReason | None = None

    def text_of(self, token: int, position: int) -> str:
        """The characters that the next token completes."""
        text = self.detokenizer.push(token)
        return text.removeprefix(self.healed) if position == self.start else text

    def result(self, passed: Passed, count: int) -> StreamResult:
        """The result of a step after which the reply has `count` tokens."""
        out, self.held = self.held[: passed.tokens], self.held[passed.tokens :]
        tokens = tuple(token for token, _ in out)
        details = tuple(details for _, details in out if details)
        return StreamResult(passed.text, tokens, count, self.reason, details=details)


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
        if num_speculative_tokens < 1:
            raise UsageError(f"num_speculative_tokens is {num_speculative_tokens}", "it is at least 1")
        self._language = Language(tokenizer, model.config.vocab_size)
        self._size = self._language.size
        if draft_model is not None and draft_cache is None:
            draft_cache = draft_model.new_cache(cache.capacity)
        drafter = choose_drafter(speculate, model, draft_model, draft_cache, self._size)
        self._decoders = Decoders(model, cache, self._language.vocabulary, self._size, drafter, num_speculative_tokens)
        self._conditions = StopConditions(tokenizer.eos_ids)
        self._reply: _Reply | None = None
        self._table: TokenTable | None = None
        self._filled = 0
        self._positions: tuple[int, ...] = ()
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

    def token_table(self) -> TokenTable:
        """The tokens as a constraint sees them. The stop ids in force end a reply."""
        ends = {token for token in self._conditions.ids if 0 <= token < self._size}
        if self._table is None or set(self._table.end_ids.tolist()) != ends:
            self._table = TokenTable(self._tokenizer, self._size, ends)
        return self._table

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
        extras: Extras = PLAIN,
        adapters: Sequence[Scaled] = (),
        embeddings: Sequence[InputEmbeddings] = (),
        positions: Sequence[int] = (),
    ) -> StreamStart:
        """Read the prompt: all but its last token go into the cache, less the longest prefix that is there already.

        input_ids: [n] or [1, n]. settings.seed None draws a seed, reported in the result. `abort` is asked before
        every chunk and every token; once it is true the prompt is read no further and `stream_ex` reports "stopped".
        on_prefill(done, total, cached) follows every chunk. `continuing`: the prompt ends in the middle of a text, so
        that the space before the first word is text too. `adapters`: the LoRAs of this reply; what the cache holds is
        reused only if it was computed with the same. `embeddings`: those whose ids are in the prompt. `positions`:
        those of the tokens from the first on, ascending, where they are not their numbers: RoPE turns by them, and
        attention sees their distances. ContextError when the prompt leaves no room for a token.
        """
        self._reply = None
        ids = self._checked(input_ids, embeddings)
        if max_new_tokens is not None and max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is {max_new_tokens}", "it is at least 1")
        gate = Gate(self._conditions.strings, extras.banned_strings)
        healed = self._take_healed(ids, extras)
        limits = self._limits(extras, healed, continuing)
        self._use(adapters, embeddings)
        cached = self._reuse(ids, positions)
        longest = min(self._cache.capacity, len(ids) + (max_new_tokens or self._cache.capacity))
        decoder = self._decoders.choose(settings, ids, longest, limits)

        def new_detokenizer() -> Detokenizer:
            return self._tokenizer.detokenizer(decode_special_tokens, continuing or healed is not None)

        reply = _Reply(
            decoder,
            new_detokenizer,
            new_detokenizer(),
            self._conditions.ids,
            gate,
            max_new_tokens,
            abort,
            settings,
            extras,
            len(ids),
            "" if healed is None else self._language.healer.text(healed),
        )
        self._prefill(reply.abort, cached, on_prefill)
        self._reply = reply
        return StreamStart(len(ids), cached, decoder.seed)

    def _take_healed(self, ids: list[int], extras: Extras) -> int | None:
        """Take the token that is to be healed off the prompt."""
        heals = extras.token_healing and len(ids) > 1 and self._language.healer.text(ids[-1]) != ""
        return ids.pop() if heals else None

    def _limits(self, extras: Extras, healed: int | None, continuing: bool) -> Limits | None:
        """What limits the reply; None if nothing does and nobody asks what a GPU cannot tell."""
        if extras == PLAIN:
            return None
        if extras.constraint:
            extras.constraint.begin(continuing or healed is not None, healed)
        first = None if healed is None else self._language.healer.continuations(healed)
        return Limits(extras.constraint, self._conditions.ids if extras.prefer_end else frozenset(), first)

    def stream_ex(self, banned: Collection[int] = ()) -> StreamResult:
        """Generate one token, which is none of `banned`. A result with a stop reason completes the reply; further calls
        repeat the reason. No token is added where a banned string came to be: then some are taken back."""
        reply = self._reply
        if reply is None:
            raise ChatError("no reply was begun", "call begin_stream_ex first")
        if reply.reason is not None:
            return reply.result(NOTHING, self._count(reply))
        if reply.abort():
            return self._finish(reply, "stopped")
        if reply.decoder.chooser and reply.decoder.chooser.finished:  # as a grammar of the empty text is from the start
            return self._finish(reply, "eos")
        if banned:
            self._chooser(reply).ban(len(self.tokens), banned)
        self._claim()
        try:
            token = reply.decoder.next(self.tokens)
        finally:
            self._filled = self._cache.length
        self.tokens.append(token)
        if token in reply.stop_ids:
            return self._finish(reply, "eos")
        return self._emit(reply, token)

    def _chooser(self, reply: _Reply) -> Chooser:
        """What chooses the tokens of the reply. Until now a GPU may have drawn them, with the same noise."""
        if reply.decoder.chooser is None:
            settings = msgspec.structs.replace(reply.settings, seed=reply.decoder.seed)
            reply.decoder = self._decoders.choose(settings, self.tokens, self._cache.capacity, Limits())
        chooser = reply.decoder.chooser
        if chooser is None:
            raise TypeError("a decoder on the host has a chooser")
        return chooser

    def _count(self, reply: _Reply) -> int:
        return len(self.tokens) - reply.start

    def _emit(self, reply: _Reply, token: int) -> StreamResult:
        """The result of an ordinary token: its text so far as it is certain, and whether the reply ends here."""
        reply.held.append((token, self._details(reply)))
        passed = reply.gate.push(reply.text_of(token, len(self.tokens) - 1))
        if reply.gate.banned:
            return self._take_back(reply, reply.gate.banned)
        if reply.gate.found is not None:
            reply.reason = "stop_string"
        elif reply.decoder.chooser and reply.decoder.chooser.finished:
            return self._finish(reply, "eos", passed)
        elif self._count(reply) == reply.limit:
            return self._finish(reply, "max_tokens", passed)
        elif len(self.tokens) == self._cache.capacity:
            return self._finish(reply, "context", passed)
        return reply.result(passed, self._count(reply))

    def _details(self, reply: _Reply) -> TokenDetails | None:
        extras = reply.extras
        if not extras.wants_details or (drawn := self._chooser(reply).last) is None:
            return None
        return describe(drawn, extras.return_top_tokens, extras.return_logits)

    def _take_back(self, reply: _Reply, banned: Banned) -> StreamResult:
        """Go back to where a banned string began, and let another token begin there."""
        taken = self.tokens[-banned.tokens :]
        del self.tokens[-banned.tokens :], reply.held[-banned.tokens :]
        self._cache.truncate(len(self.tokens) - 1)
        self._filled = self._cache.length
        chooser = self._chooser(reply)
        chooser.rewind(self.tokens, len(taken))
        chooser.ban(len(self.tokens), taken[:1])
        reply.detokenizer = reply.new_detokenizer()
        for token in self.tokens[reply.start :]:
            reply.detokenizer.push(token)
        return StreamResult("", (), self._count(reply), suppressed=banned.text)

    def _finish(self, reply: _Reply, reason: StopReason, passed: Passed = NOTHING) -> StreamResult:
        """The last result: what passed and whatever was held back."""
        reply.reason = reason
        text = passed.text + reply.gate.flush() + reply.detokenizer.flush()
        return reply.result(Passed(text, len(reply.held)), self._count(reply))

    def _checked(self, input_ids: Sequence[int] | torch.Tensor, embeddings: Sequence[InputEmbeddings]) -> list[int]:
        """The prompt as a list; UsageError when it is no prompt, ContextError when it is too long."""
        if isinstance(input_ids, torch.Tensor):
            if input_ids.dim() > 1 and input_ids.shape[0] != 1:
                raise UsageError(f"input_ids has shape {list(input_ids.shape)}", "a stream has one row: [1, n]")
            input_ids = input_ids.reshape(-1).tolist()
        ids = list(input_ids)
        if not ids:
            raise UsageError("the prompt has no tokens", "give at least one")
        check_prompt(ids, self._size, self._model.config.hidden_size, embeddings)
        if (over := len(ids) + 1 - self._cache.capacity) > 0:
            larger = self._cache.capacity < self._model.config.context
            raise ContextError(
                f"the prompt has {len(ids)} tokens, {over} too many for a context of {self._cache.capacity}",
                f"shorten it, start a new conversation{', or load the model with a larger --ctx' * larger}",
            )
        return ids

    def _use(self, adapters: Sequence[Scaled], embeddings: Sequence[InputEmbeddings]) -> None:
        """Run the model with these from now on. Nothing that was computed with other adapters is known any more."""
        model = with_adapters(self._model, adapters)
        if model is not self._model:
            self._filled = 0
        if model.embedded != tuple(embeddings):
            model = replace(model, embedded=tuple(embeddings))
        self._model = self._decoders.model = model

    def _claim(self) -> None:
        """Take the cache. Nothing in it is known where somebody else took it meanwhile, or changed its length."""
        if not self._cache.claim(self) or self._cache.length != self._filled:
            self._cache.truncate(0)
            self._filled = 0
        self._cache.place(self._positions)

    def _reuse(self, ids: list[int], positions: Sequence[int]) -> int:
        """Make `ids` the sequence and cut the cache to what they share with the last one; that length."""
        self._positions = tuple(positions)
        self._claim()
        common = common_prefix(self.tokens[: self._cache.length], ids[:-1])
        self._cache.truncate(common)
        self._filled = common
        self.tokens = ids
        return common

    def _prefill(self, abort: Abort, cached: int, on_prefill: OnPrefill | None) -> None:
        last = len(self.tokens) - 1
        chunk = prefill_chunk(self._model.device)
        while self._cache.length < last and not abort():
            start = self._cache.length
            inputs = self._model.inputs(self.tokens[start : min(start + chunk, last)])
            self._model.forward(inputs, self._cache, last_only=True)
            self._filled = self._cache.length
            if on_prefill is not None:
                on_prefill(self._cache.length, len(self.tokens), cached)
