"""One reply at a time, token by token, over a cache that is kept from turn to turn."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch

from exl2chat.engine.cache import KVCache
from exl2chat.engine.constraints import Constraint
from exl2chat.engine.decoders import MOST_DRAFTS, Decoder
from exl2chat.engine.drafting import Speculate, choose_drafters, common_prefix
from exl2chat.engine.embeddings import InputEmbeddings, check_prompt
from exl2chat.engine.lora import Scaled, with_adapters
from exl2chat.engine.paced_drafts import Speculated
from exl2chat.engine.replies.jobs import Choice, EndReason, Job, Token
from exl2chat.engine.replies.language import Language
from exl2chat.engine.replies.task import Advance, End, Task
from exl2chat.engine.stopping import StopConditions, StopReason
from exl2chat.engine.token_table import TokenTable
from exl2chat.engine.transformer import Transformer, prefill_chunk
from exl2chat.errors import ChatError, ContextError, UsageError
from exl2chat.model.tokenizer import Tokenizer
from exl2chat.settings import Sampling

OnPrefill = Callable[[int, int, int], None]
Abort = Callable[[], bool]


class Extras(msgspec.Struct, frozen=True):
    """What a reply may be asked for besides its text. Where it bears on a token, the host draws that, on a GPU too.

    constraint: what the reply is; it ends as soon as that is complete. prefer_end: end it as soon as the constraint
    allows it. token_healing: the first token takes the place of the prompt's last one, whose text it repeats and goes
    on from, unless that is the only one, hidden, or no whole characters. banned_strings, in any case of their letters,
    do not come to be: tokens are taken back and others drawn. return_probabilities, return_top_tokens (so many) and
    return_logits fill `StreamResult.details`. hooks see each draw, and may change it.
    """

    constraint: Constraint | None = None
    prefer_end: bool = False
    token_healing: bool = False
    banned_strings: Collection[str] = ()
    return_probabilities: bool = False
    return_top_tokens: int = 0
    return_logits: bool = False
    hooks: tuple[Callable[[Choice], None], ...] = ()

    def __post_init__(self) -> None:
        if self.return_top_tokens < 0:
            raise UsageError(f"return_top_tokens is {self.return_top_tokens}", "it is at least 0")

    @property
    def wants_details(self) -> bool:
        return self.return_probabilities or self.return_top_tokens > 0 or self.return_logits


PLAIN = Extras()
REASONS: dict[EndReason, StopReason] = {
    "stop_token": "eos", "end_filter": "eos", "stop_string": "stop_string", "max_new_tokens": "max_tokens",
    "context": "context", "stopped": "stopped",
}  # fmt: skip


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
    details: tuple[Token, ...] = ()

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

    task: Task
    abort: Abort
    details: bool

    @property
    def reason(self) -> StopReason | None:
        """Why it is complete, even if nobody was told because of an interrupt."""
        return None if self.task.end is None else REASONS[self.task.end.reason]


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
        known: Sequence[int] = (),
    ) -> None:
        """Up to `num_speculative_tokens` are drafted at a time, as `speculate` says (`drafting.choose_drafters`); no
        more than MOST_DRAFTS where a GPU draws. The draft model's cache, by default one as long as `cache`, is used by
        nobody else. UsageError for a draft model with fewer tokens than `model`."""
        self._model, self._cache, self._tokenizer = model, cache, tokenizer
        if num_speculative_tokens < 1:
            raise UsageError(f"num_speculative_tokens is {num_speculative_tokens}", "it is at least 1")
        if model.device.type == "cuda":  # where more would be rounded in another way
            num_speculative_tokens = min(num_speculative_tokens, MOST_DRAFTS)
        self._language = Language(tokenizer, model.config.vocab_size)
        self._size = self._language.size
        if draft_model is not None and draft_cache is None:
            draft_cache = draft_model.new_cache(cache.capacity)
        drafters = choose_drafters(speculate, model, draft_model, draft_cache, self._size, known)
        self._decoder = Decoder(model, cache, self._size, drafters, num_speculative_tokens)
        self._conditions = StopConditions(tokenizer.eos_ids)
        self._reply: _Reply | None = None
        self._table: TokenTable | None = None
        self._filled = 0
        self._positions: tuple[int, ...] = ()
        self.tokens: list[int] = []

    @property
    def speculated(self) -> Speculated:
        """What drafts did for the last reply so far."""
        return self._decoder.speculated

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
        job = Job(
            (tuple(ids),), max_new_tokens or self._cache.capacity, settings, self._conditions,
            heal=extras.token_healing, banned=extras.banned_strings, constraint=extras.constraint,
            prefer_end=extras.prefer_end, special=decode_special_tokens, top_tokens=extras.return_top_tokens,
            probabilities=extras.wants_details, logits=extras.return_logits,
            hooks=extras.hooks, continuing=continuing,
        )  # fmt: skip
        task = Task(job, self._language, self._cache.capacity)
        self._use(adapters, tuple(embeddings))
        cached = self._reuse(task.chooser.tokens, tuple(positions))
        self._decoder.begin(task.chooser, min(self._cache.capacity, len(self.tokens) + job.max_new_tokens))
        self._prefill(abort, cached, on_prefill)
        self._reply = _Reply(task, abort, extras.wants_details)
        return StreamStart(len(self.tokens), cached, task.chooser.seed)

    def stream_ex(self, banned: Collection[int] = ()) -> StreamResult:
        """Generate one token, which is none of `banned`. A result with a stop reason completes the reply; further calls
        repeat the reason. No token is added where a banned string came to be: then some are taken back."""
        reply = self._reply
        if reply is None:
            raise ChatError("no reply was begun", "call begin_stream_ex first")
        chooser = reply.task.chooser
        if reply.reason is not None:
            return StreamResult("", (), chooser.count, reply.reason)
        if reply.abort():
            return _result(reply, reply.task.finish(End("stopped")))
        if chooser.finished:  # as a grammar of the empty text is from the start
            return _result(reply, reply.task.finish(End("end_filter")))
        if banned:
            chooser.ban(banned)
        self._claim()
        try:
            token = self._decoder.next(chooser)
        finally:
            self._filled = self._cache.length
        advance = reply.task.push(token)
        if advance.rewound:
            self._cache.truncate(len(self.tokens) - 1)
            self._filled = self._cache.length
        return _result(reply, advance)

    def _checked(self, input_ids: Sequence[int] | torch.Tensor, embeddings: Sequence[InputEmbeddings]) -> list[int]:
        """The prompt as a list; UsageError when it is no prompt, ContextError when it is too long."""
        if isinstance(input_ids, torch.Tensor):
            if input_ids.dim() > 1 and input_ids.shape[0] != 1:
                raise UsageError(f"input_ids has shape {list(input_ids.shape)}", "a stream has one row: [1, n]")
            input_ids = input_ids.reshape(-1).tolist()
        if not isinstance(input_ids, Iterable):
            raise UsageError(f"the prompt is a {type(input_ids).__name__}", "give what the tokenizer's encode returns")
        ids = list(input_ids)
        check_prompt(ids, self._size, self._model.config.hidden_size, embeddings)
        if (over := len(ids) + 1 - self._cache.capacity) > 0:
            larger = self._cache.capacity < self._model.config.context
            raise ContextError(
                f"the prompt has {len(ids)} tokens, {over} too many for a context of {self._cache.capacity}",
                f"shorten it, start a new conversation{', or load the model with a larger --ctx' * larger}",
            )
        return ids

    def _use(self, adapters: Sequence[Scaled], embedded: tuple[InputEmbeddings, ...]) -> None:
        """Run the model with these from now on. Nothing that was computed with other adapters is known any more."""
        model = with_adapters(self._model, adapters)
        if model is not self._model:
            self._filled = 0
        if embedded != model.embedded:
            model = replace(model, embedded=embedded)
        self._model = self._decoder.model = model

    def _claim(self) -> None:
        """Take the cache. Nothing in it is known where somebody else took it meanwhile, or changed its length."""
        if not self._cache.claim(self) or self._cache.length != self._filled:
            self._cache.truncate(0)
            self._filled = 0
        self._cache.place(self._positions)

    def _reuse(self, ids: list[int], positions: tuple[int, ...]) -> int:
        """Make `ids` the sequence and cut the cache to what they share with the last one; that length."""
        self._positions = positions
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


def _result(reply: _Reply, advance: Advance) -> StreamResult:
    return StreamResult(
        advance.text,
        tuple(token.id for token in advance.tokens),
        reply.task.chooser.count,
        reply.reason,
        "".join(token.text for token in advance.suppressed),
        advance.tokens if reply.details else (),
    )
