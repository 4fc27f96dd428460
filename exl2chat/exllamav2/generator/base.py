"""`ExLlamaV2BaseGenerator`: prompts to whole replies."""

import warnings
from collections.abc import Sequence
from threading import Event

import torch
from torch import Tensor

from exl2chat.engine.generators.base import BaseGenerator, Completion
from exl2chat.engine.replies.jobs import Job
from exl2chat.engine.stopping import StopConditions
from exl2chat.exllamav2.cache import ExLlamaV2Cache
from exl2chat.exllamav2.embedding import Embeddings, encode_prompt, marks_of_prompts
from exl2chat.exllamav2.generator.filters import ExLlamaV2Filter
from exl2chat.exllamav2.generator.requests import check_prompts, engine_constraint, engine_settings, is_set
from exl2chat.exllamav2.generator.sampler import ExLlamaV2Sampler
from exl2chat.exllamav2.lora import Loras, scaled_loras
from exl2chat.exllamav2.model import ExLlamaV2
from exl2chat.exllamav2.tokenizer import ExLlamaV2Tokenizer

EOS = -1


class ExLlamaV2BaseGenerator:
    """`sequence_ids` are the texts of the last call, int64 [B, n], padded on the left."""

    abort_event: Event | None = None
    sequence_ids: Tensor | None = None

    def __init__(self, model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer) -> None:
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self._generator = BaseGenerator(model.transformer, cache.kv, tokenizer.native, cache.max_seq_len)

    def warmup(self) -> None:
        """Write a few tokens, so that the first reply is as fast as the others."""
        self._generator.warm_up()

    def full(self) -> bool:
        """Whether a sequence has reached the end of the cache."""
        return self._generator.full()

    def generate_simple(
        self,
        prompt: str | Sequence[str],
        gen_settings: ExLlamaV2Sampler.Settings,
        num_tokens: int,
        seed: int | None = None,
        token_healing: bool = False,
        encode_special_tokens: bool = False,
        decode_special_tokens: bool = False,
        loras: Loras = None,
        stop_token: int | None = EOS,
        add_bos: bool = False,
        abort_event: Event | None = None,
        input_embeddings: Embeddings = None,
        completion_only: bool = False,
        filters: Sequence[ExLlamaV2Filter] | None = None,
        filter_prefer_eos: bool = False,
    ) -> str | list[str]:
        """The text of the prompt and up to `num_tokens` tokens more; a list for a list, of which each is a sequence of
        its own: nothing is padded. `seed` is that of the first, each other has one more than the one before.

        stop_token -1: every EOS id of config and tokenizer; None: none. A prompt that leaves no room for num_tokens is
        cut from the left, with a warning. Once abort_event is set, what is written by then is returned.

        input_embeddings: a tensor [B, N, hidden] for B prompts, which stands where each has `{{EMBED_HERE}}` and is no
        part of the text that comes back; or `ExLlamaV2MMEmbedding`s, wherever their aliases stand.
        """
        check_prompts(prompt)
        self._generator.set_adapters(scaled_loras(loras))
        self.abort_event = abort_event
        stops = self.tokenizer.eos_ids if stop_token == EOS else frozenset(() if stop_token is None else (stop_token,))
        jobs = []
        texts = [prompt] if isinstance(prompt, str) else prompt
        all_marks = marks_of_prompts(input_embeddings, len(texts))
        for number, (text, marks) in enumerate(zip(texts, all_marks, strict=True)):
            own = None if seed is None else seed + number
            sampling, guidance, hooks = engine_settings(gen_settings, own)
            ids = encode_prompt(self.tokenizer.native, text, marks, encode_special_tokens, add_bos)
            job = Job(
                (ids,), num_tokens, sampling, StopConditions(stops), guidance=guidance, heal=token_healing,
                constraint=engine_constraint(filters or gen_settings.filters, self.tokenizer),
                prefer_end=filter_prefer_eos, special=decode_special_tokens, hooks=hooks,
                embeddings=tuple(marks.values()),
            )  # fmt: skip
            jobs.append(job)
        done = self._generator.generate(jobs, is_set(abort_event))
        self.sequence_ids = self._padded([completion.tokens for completion in done])
        results = [self._text(completion, completion_only, decode_special_tokens) for completion in done]
        return results[0] if isinstance(prompt, str) else results

    def _text(self, completion: Completion, completion_only: bool, special: bool) -> str:
        if completion.cut:
            warnings.warn(
                f"the first {completion.cut} tokens of the prompt were left out: with num_tokens it does not fit a "
                f"cache of {self.cache.max_seq_len}",
                stacklevel=3,
            )
        if completion_only:
            return completion.text
        text = self.tokenizer.decode(torch.tensor(completion.tokens), special)
        return text if isinstance(text, str) else text[0]

    def _padded(self, rows: list[list[int]]) -> Tensor:
        longest = max(map(len, rows), default=0)
        pad = self.tokenizer.pad_token_id
        return torch.tensor([[pad] * (longest - len(row)) + row for row in rows], dtype=torch.int64)
