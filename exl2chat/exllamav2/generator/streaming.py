"""`ExLlamaV2StreamingGenerator`: a stream of one reply."""

from collections.abc import Collection, Sequence
from functools import cached_property, partial
from threading import Event
from typing import Any

import torch
from torch import Tensor

from exl2chat.engine.decoders import MOST_DRAFTS
from exl2chat.engine.drafting import Speculate
from exl2chat.engine.generators.streaming import Extras, StreamingGenerator, StreamResult
from exl2chat.engine.stopping import StopConditions
from exl2chat.errors import ContextError, UsageError
from exl2chat.exllamav2.cache import ExLlamaV2Cache
from exl2chat.exllamav2.embedding import Embeddings, spliced
from exl2chat.exllamav2.generator.base import ExLlamaV2BaseGenerator
from exl2chat.exllamav2.generator.filters import ExLlamaV2Filter, constraint_of
from exl2chat.exllamav2.generator.job_stream import JobStream
from exl2chat.exllamav2.generator.requests import attended, check_draft, engine_settings, is_set, row_of, unpadded
from exl2chat.exllamav2.generator.sampler import ExLlamaV2Sampler
from exl2chat.exllamav2.lora import Loras, scaled_loras
from exl2chat.exllamav2.model import ExLlamaV2
from exl2chat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exl2chat.exllamav2.unsupported import refuse_set
from exl2chat.settings import Sampling

Begin = "ExLlamaV2StreamingGenerator.begin_stream_ex"


class ExLlamaV2StreamingGenerator:
    """Seeds come from Python's `random`, as in the reference: `random.seed(n)` makes replies repeat."""

    abort_event: Event | None = None
    # Changing these changes nothing: lengths of drafts adapt to what they bring.
    speculative_ngram_min, speculative_ngram_max, speculative_ngram_max_inf, speculative_ngram_threshold = 1, 5, 3, 1
    speculative_prob_threshold = 0.25

    def __init__(
        self,
        model: ExLlamaV2,
        cache: ExLlamaV2Cache,
        tokenizer: ExLlamaV2Tokenizer,
        draft_model: ExLlamaV2 | None = None,
        draft_cache: ExLlamaV2Cache | None = None,
        num_speculative_tokens: int = 5,
    ) -> None:
        """Stops at the EOS ids of config and tokenizer. num_speculative_tokens matters only with a draft
        model, of which nothing is asked with 0. UsageError where that has other tokens."""
        check_draft(draft_model, tokenizer)
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self.draft_model, self.draft_cache = draft_model, draft_cache
        self.num_speculative_tokens = num_speculative_tokens
        self._ngram, self._known = False, tuple[int, ...]()
        self._extras = Extras()
        self._earlier = self._reply = (0, 0, 0)  # tokens, drafts and accepted drafts: before this reply, and of it
        self._generator = self._make()
        self._stream: StreamingGenerator | JobStream = self._generator
        self.set_stop_conditions(tokenizer.eos_ids)

    def _make(self) -> StreamingGenerator:
        """Our generator, which drafts as is set."""
        count, cache = self.num_speculative_tokens, self.draft_cache
        draft = self.draft_model if count else None
        speculate: Speculate = "ngram" if self._ngram else "draft" if draft else "off"
        return StreamingGenerator(
            self.model.transformer, self.cache.kv, self.tokenizer.native, draft.transformer if draft else None,
            cache.kv if draft and cache else None, count or MOST_DRAFTS, speculate, self._known,
        )  # fmt: skip

    @property
    def sequence_ids(self) -> Tensor | None:
        """Prompt and reply so far, int64 [1, n]; None before the first."""
        return torch.tensor([self._stream.tokens], dtype=torch.int64) if self._stream.tokens else None

    @property
    def speculative_ngram(self) -> bool:
        """Whether what was there before is proposed as what follows, which changes no reply. What the cache holds is
        read again when this changes."""
        return self._ngram

    @speculative_ngram.setter
    def speculative_ngram(self, value: bool) -> None:
        if value != self._ngram:
            self._ngram = value
            self._renew()

    def ngram_preload(self, input_ids: Tensor) -> None:
        """Drafts by n-grams may come from `input_ids` [1, n] too, a text of the kind that will be written."""
        self._known = row_of(input_ids)
        self._renew()

    def _renew(self) -> None:
        self._stream = self._generator = self._make()
        self.set_stop_conditions([*self.stop_tokens, *self.stop_strings])

    def reset_sd_stats(self) -> None:
        """Count drafts from here on."""
        tokens, drafted, accepted = self._reply
        self._earlier = (-tokens, -drafted, -accepted)

    def get_sd_stats(self) -> tuple[float, float, int, int, int]:
        """Since the last reset: accepted drafts as a share of the tokens, and of the drafts; then the three numbers."""
        tokens, drafted, accepted = self._counted()
        return accepted / max(tokens, 1), accepted / max(drafted, 1), tokens, drafted, accepted

    def _counted(self) -> tuple[int, int, int]:
        """Tokens, drafts and accepted drafts of the earlier replies and this one."""
        (tokens, drafted, accepted), reply = self._earlier, self._reply
        return tokens + reply[0], drafted + reply[1], accepted + reply[2]

    def warmup(self) -> None:
        """One forward pass, so that the first reply is as fast as the others."""
        self.model.forward(torch.zeros(1, 1, dtype=torch.int64))

    def full(self) -> bool:
        """Whether the sequence has reached the end of the cache."""
        return len(self._stream.tokens) >= self.cache.max_seq_len

    def set_stop_conditions(self, stop_conditions: Collection[int | str]) -> None:
        """Token ids and strings that end a reply; ValueError on anything else. Replaces what held before."""
        conditions = StopConditions.of(stop_conditions)
        self.stop_tokens, self.stop_strings = set(conditions.ids), set(conditions.strings)
        self._generator.set_stop_conditions([*self.stop_tokens, *self.stop_strings])

    def begin_stream(
        self,
        input_ids: Tensor,
        gen_settings: ExLlamaV2Sampler.Settings,
        token_healing: bool = False,
        loras: Loras = None,
        input_mask: Tensor | None = None,
        position_offsets: Tensor | None = None,
        abort_event: Event | None = None,
        **kwargs: Any,
    ) -> None:
        """The older form of `begin_stream_ex`."""
        self.begin_stream_ex(
            input_ids,
            gen_settings,
            token_healing,
            loras,
            input_mask,
            position_offsets,
            abort_event=abort_event,
            **kwargs,
        )

    def begin_stream_ex(
        self,
        input_ids: Tensor,
        gen_settings: ExLlamaV2Sampler.Settings,
        token_healing: bool = False,
        loras: Loras = None,
        input_mask: Tensor | None = None,
        position_offsets: Tensor | None = None,
        return_probabilities: bool = False,
        return_top_tokens: int = 0,
        return_logits: bool = False,
        abort_event: Event | None = None,
        input_embeddings: Embeddings = None,
        decode_special_tokens: bool = False,
        banned_strings: list[str] | None = None,
        filters: Sequence[ExLlamaV2Filter] | None = None,
        filter_prefer_eos: bool = False,
        **kwargs: Any,
    ) -> None:
        """Read the prompt `input_ids` [1, n]. UsageError naming any parameter set that is not supported yet.

        With token_healing the first token of the reply takes the place of the prompt's last one: it repeats that
        one's text, and only what it adds to that is in a chunk. filter_prefer_eos: take an EOS token as soon as all
        filters let one pass. input_embeddings: `ExLlamaV2MMEmbedding`s whose ids are in the prompt; or a tensor [1, N,
        hidden], for whose rows ids from EMBEDDING_INDEX on stand there. input_mask, position_offsets: see `attended`;
        what is hidden is no part of `sequence_ids` either. With cfg_scale there are two prompts [2, n], of which the
        first is in `sequence_ids`, and a cache with a batch_size of 2.
        """
        refuse_set(Begin, **kwargs)
        self.abort_event = abort_event
        input_ids, embeddings = spliced(input_ids, input_embeddings)
        sampling, guidance, hooks = engine_settings(gen_settings, None)
        extras = Extras(
            constraint_of(self.tokenizer, filters or gen_settings.filters or ()), filter_prefer_eos, token_healing,
            banned_strings or (), return_probabilities, return_top_tokens, return_logits, hooks,
        )  # fmt: skip
        begin = self._begin if guidance is None else partial(self._begin_guided, guidance=guidance)
        self._stream = begin(
            input_ids, input_mask, position_offsets, sampling, extras, abort=is_set(abort_event),
            adapters=scaled_loras(loras), decode_special_tokens=decode_special_tokens, embeddings=embeddings,
        )  # fmt: skip
        self._extras = extras
        self._earlier, self._reply = self._counted(), (0, 0, 0)

    def _begin(
        self,
        input_ids: Tensor,
        input_mask: Tensor | None,
        offsets: Tensor | None,
        sampling: Sampling,
        extras: Extras,
        **more: Any,
    ) -> StreamingGenerator:
        """The stream of a reply to one prompt."""
        input_ids, positions = attended(input_ids, input_mask, offsets)
        room = self._room(input_ids.shape[-1]) if self.cache.batch_size > 1 else None
        self._generator.begin_stream_ex(
            input_ids, sampling, max_new_tokens=room, extras=extras, positions=positions, **more
        )
        return self._generator

    def _begin_guided(
        self,
        input_ids: Tensor,
        input_mask: Tensor | None,
        offsets: Tensor | None,
        sampling: Sampling,
        extras: Extras,
        guidance: float,
        **more: Any,
    ) -> JobStream:
        """The stream of a reply that a second prompt guides. ContextError where the cache has no room for it."""
        prompts = unpadded(input_ids, input_mask, offsets)
        if len(prompts) > self.cache.batch_size:
            raise UsageError(f"{len(prompts)} prompts in a cache for one", f"make it with batch_size={len(prompts)}")
        room = self._room(max(map(len, prompts)) + bool(extras.banned_strings))
        stops = StopConditions(frozenset(self.stop_tokens), tuple(self.stop_strings))
        self._jobs.begin_stream_ex(prompts, sampling, guidance, stops, max_new_tokens=room, extras=extras, **more)
        return self._jobs

    @cached_property
    def _jobs(self) -> JobStream:
        return JobStream(self.model, self.cache, self.tokenizer)

    def _room(self, length: int) -> int:
        """How many tokens may follow `length` in one row of the cache. ContextError for none."""
        room = self.cache.max_seq_len - length
        if room < 1:
            raise ContextError(
                f"a prompt of {length} tokens leaves no room in a cache for {self.cache.max_seq_len}", "shorten it"
            )
        return room

    def stream_ex(self, ban_tokens: list[int] | None = None, **kwargs: Any) -> dict[str, Any]:
        """One more token, which is none of `ban_tokens`.

        chunk (str), eos (bool), chunk_token_ids (int64 [1, n]), stop_reason and reply_tokens; as far as they were asked
        for, probs [1, n], top_tokens and top_probs [1, n, k] with -1 and 0 where fewer could be drawn, and logits
        [1, n, V] as the model computed them; suppressed, the text that was taken back, where a banned string was.
        Probabilities are those of what the settings leave.
        """
        refuse_set("ExLlamaV2StreamingGenerator.stream_ex", **kwargs)
        result = self._stream.stream_ex(ban_tokens or ())
        drafts = self._stream.speculated
        self._reply = (result.reply_tokens, drafts.drafted, drafts.accepted)
        answer = {
            "chunk": result.text,
            "eos": result.eos,
            "chunk_token_ids": torch.tensor([result.tokens], dtype=torch.int64),
            "stop_reason": result.stop_reason,
            "reply_tokens": result.reply_tokens,
        }
        return {**answer, **({"suppressed": result.suppressed} if result.suppressed else {}), **self._details(result)}

    def _details(self, result: StreamResult) -> dict[str, Tensor]:
        """How the tokens of `result` were drawn, as far as that was asked for."""
        details, count, answer = result.details, self._extras.return_top_tokens, {}
        if self._extras.return_probabilities:
            answer["probs"] = torch.tensor([[detail.probability for detail in details]])
        if count:
            tops = [[*detail.top, *[(-1, 0.0)] * (count - len(detail.top))] for detail in details]
            ids = [[token for token, _ in top] for top in tops]
            probabilities = [[probability for _, probability in top] for top in tops]
            answer["top_tokens"] = torch.tensor(ids, dtype=torch.int64).reshape(1, len(details), count)
            answer["top_probs"] = torch.tensor(probabilities).reshape(1, len(details), count)
        if self._extras.return_logits:
            rows = [torch.from_numpy(detail.logits) for detail in details if detail.logits is not None]
            size = self.tokenizer.get_vocab_size()
            answer["logits"] = torch.stack(rows)[None] if rows else torch.empty(1, 0, size)
        return answer

    def stream(self, **kwargs: Any) -> tuple[Any, ...]:
        """`stream_ex` as a tuple (chunk, eos, chunk_token_ids), then, as far as they were asked for, probs [1, n] and
        logits [n, V]."""
        result = self.stream_ex(**kwargs)
        probs = (result["probs"],) if "probs" in result else ()
        logits = (result["logits"][0],) if "logits" in result else ()
        return result["chunk"], result["eos"], result["chunk_token_ids"], *probs, *logits

    def generate_simple(self, *args: Any, **kwargs: Any) -> str | list[str]:
        """What `ExLlamaV2BaseGenerator` over the same cache does with this call."""
        return self._base.generate_simple(*args, **kwargs)

    @cached_property
    def _base(self) -> ExLlamaV2BaseGenerator:
        return ExLlamaV2BaseGenerator(self.model, self.cache, self.tokenizer)
