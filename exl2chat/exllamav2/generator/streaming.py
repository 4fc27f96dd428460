"""`ExLlamaV2StreamingGenerator`: a stream of one reply."""

import random
from collections.abc import Collection
from threading import Event
from typing import Any

import torch
from torch import Tensor

from exl2chat.engine.generators.streaming import StreamingGenerator
from exl2chat.exllamav2.cache import ExLlamaV2Cache
from exl2chat.exllamav2.generator.sampler import ExLlamaV2Sampler
from exl2chat.exllamav2.lora import Loras, scaled_loras
from exl2chat.exllamav2.model import ExLlamaV2
from exl2chat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exl2chat.exllamav2.unsupported import refuse_set

Begin = "ExLlamaV2StreamingGenerator.begin_stream_ex"


class ExLlamaV2StreamingGenerator:
    """Seeds come from Python's `random`, as in the reference: `random.seed(n)` makes replies repeat."""

    abort_event: Event | None = None

    def __init__(
        self,
        model: ExLlamaV2,
        cache: ExLlamaV2Cache,
        tokenizer: ExLlamaV2Tokenizer,
        draft_model: ExLlamaV2 | None = None,
        draft_cache: ExLlamaV2Cache | None = None,
        num_speculative_tokens: int = 5,  # noqa: ARG002
    ) -> None:
        """Stops at the EOS ids of config and tokenizer. num_speculative_tokens matters only with a draft model."""
        refuse_set("ExLlamaV2StreamingGenerator", draft_model=draft_model, draft_cache=draft_cache)
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self._generator = StreamingGenerator(model.transformer, cache.kv, tokenizer.tokenizer)
        self._generator.set_stop_conditions(tokenizer.eos_ids)

    @property
    def sequence_ids(self) -> Tensor:
        """Prompt and reply so far, int64 [1, n]."""
        return torch.tensor([self._generator.tokens], dtype=torch.int64)

    @property
    def speculative_ngram(self) -> bool:
        """Drafting by n-grams: not supported yet."""
        return False

    @speculative_ngram.setter
    def speculative_ngram(self, value: bool) -> None:
        refuse_set("ExLlamaV2StreamingGenerator", speculative_ngram=value)

    def warmup(self) -> None:
        """One forward pass, so that the first reply is as fast as the others."""
        self.model.forward(torch.zeros(1, 1, dtype=torch.int64))

    def full(self) -> bool:
        """Whether the sequence has reached the end of the cache."""
        return len(self._generator.tokens) >= self.cache.max_seq_len

    def set_stop_conditions(self, stop_conditions: Collection[int | str]) -> None:
        """Token ids and strings that end a reply; ValueError on anything else. Replaces what held before."""
        self._generator.set_stop_conditions(stop_conditions)

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
        input_embeddings: Tensor | None = None,
        decode_special_tokens: bool = False,
        banned_strings: list[str] | None = None,
        filters: list[Any] | None = None,
        filter_prefer_eos: bool = False,
        **kwargs: Any,
    ) -> None:
        """Read the prompt `input_ids` [1, n]. UsageError naming any parameter set that is not supported yet."""
        refuse_set(Begin, token_healing=token_healing, input_mask=input_mask)
        refuse_set(Begin, position_offsets=position_offsets, return_probabilities=return_probabilities)
        refuse_set(Begin, return_top_tokens=return_top_tokens, return_logits=return_logits)
        refuse_set(Begin, input_embeddings=input_embeddings, banned_strings=banned_strings)
        refuse_set(Begin, filters=filters, filter_prefer_eos=filter_prefer_eos, **kwargs)
        self.abort_event = abort_event
        self._generator.begin_stream_ex(
            input_ids,
            gen_settings.sampling(seed=random.getrandbits(63)),
            abort=lambda: abort_event is not None and abort_event.is_set(),
            decode_special_tokens=decode_special_tokens,
            adapters=scaled_loras(loras),
        )

    def stream_ex(self, ban_tokens: list[int] | None = None, **kwargs: Any) -> dict[str, Any]:
        """One more token: chunk (str), eos (bool), chunk_token_ids (int64 [1, n]), stop_reason and reply_tokens."""
        refuse_set("ExLlamaV2StreamingGenerator.stream_ex", ban_tokens=ban_tokens, **kwargs)
        result = self._generator.stream_ex()
        return {
            "chunk": result.text,
            "eos": result.eos,
            "chunk_token_ids": torch.tensor([result.tokens], dtype=torch.int64),
            "stop_reason": result.stop_reason,
            "reply_tokens": result.reply_tokens,
        }

    def stream(self, **kwargs: Any) -> tuple[str, bool, Tensor]:
        """`stream_ex` as a tuple (chunk, eos, chunk_token_ids)."""
        result = self.stream_ex(**kwargs)
        return result["chunk"], result["eos"], result["chunk_token_ids"]
