"""`ExLlamaV2DynamicGenerator` and its jobs: many replies at once."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from threading import Event
from typing import Any, cast

import torch
from torch import Tensor

from exl2chat.engine.generators.dynamic import MANY, DynamicGenerator
from exl2chat.engine.replies.jobs import Job
from exl2chat.engine.scheduler import Limits
from exl2chat.engine.stopping import StopConditions
from exl2chat.engine.transformer import prefill_chunk
from exl2chat.errors import ContextError, UsageError
from exl2chat.exllamav2.cache import ExLlamaV2Cache
from exl2chat.exllamav2.embedding import ExLlamaV2MMEmbedding, encode_prompt, marks_of
from exl2chat.exllamav2.generator.requests import (
    check_draft,
    check_prompts,
    engine_constraint,
    engine_settings,
    is_set,
    row_of,
)
from exl2chat.exllamav2.generator.results import Record, record_of
from exl2chat.exllamav2.generator.sampler import ExLlamaV2Sampler
from exl2chat.exllamav2.lora import Loras, scaled_loras
from exl2chat.exllamav2.model import ExLlamaV2
from exl2chat.exllamav2.tokenizer import ExLlamaV2Tokenizer
from exl2chat.exllamav2.unsupported import refuse_set, unsupported
from exl2chat.exllamav2.util import JobSequence, SeqTensor

Prompt = str | tuple[str, str]
DEFAULT_SKIPS = 4


class ExLlamaV2DynamicJob:
    """A reply to be written after `input_ids` [1, n], or after a pair of them with gen_settings.cfg_scale.

    `identifier` comes back with every result. Nothing but stop_conditions ends a reply before max_new_tokens.
    """

    serial_number: int | None = None

    def __init__(
        self,
        input_ids: Tensor | Sequence[Tensor],
        max_new_tokens: int,
        min_new_tokens: int = 0,
        max_skips: int | None = DEFAULT_SKIPS,
        gen_settings: ExLlamaV2Sampler.Settings | None = None,
        seed: int | None = None,
        stop_conditions: Collection[int | str] | None = None,
        decode_special_tokens: bool = False,
        return_top_tokens: int = 0,
        return_logits: bool = False,
        return_probs: bool = False,
        filters: list[Any] | None = None,
        filter_prefer_eos: bool = False,
        token_healing: bool = False,
        identifier: object = None,
        banned_strings: Sequence[str] | None = None,
        embeddings: Sequence[ExLlamaV2MMEmbedding] | None = None,
        **kwargs: Any,
    ) -> None:
        """ValueError for a stop condition that is neither a token id nor a string."""
        refuse_set("ExLlamaV2DynamicJob", **kwargs)
        if max_skips != DEFAULT_SKIPS:
            raise unsupported(f"ExLlamaV2DynamicJob: max_skips {max_skips}")
        if isinstance(banned_strings, str):
            raise UsageError("banned_strings is one text: each of its letters would be banned", "give a list of texts")
        self.identifier = identifier
        settings = gen_settings or ExLlamaV2Sampler.Settings()
        self._filters = filters or settings.filters
        prompts = input_ids if isinstance(input_ids, list | tuple) else [cast(Tensor, input_ids)]
        sampling, guidance, hooks = engine_settings(settings, seed)
        self._job = Job(
            tuple(map(row_of, prompts)), max_new_tokens, sampling, StopConditions.of(stop_conditions or ()),
            min_new_tokens, guidance, token_healing, tuple(banned_strings or ()), None, filter_prefer_eos,
            decode_special_tokens, return_top_tokens, return_probs, return_logits, hooks,
            embeddings=tuple(marks_of(embeddings).values()),
        )  # fmt: skip

    @property
    def sequences(self) -> list[JobSequence]:
        """Its prompts."""
        return [JobSequence(SeqTensor(torch.tensor([prompt]))) for prompt in self._job.prompts]

    def get_max_seq_len(self) -> int:
        """Tokens of the longest sequence that this job can lead to."""
        return max(map(len, self._job.prompts)) + self._job.max_new_tokens

    def request(self, tokenizer: ExLlamaV2Tokenizer) -> Job:
        """The engine's job, with filters of its own."""
        return replace(self._job, constraint=engine_constraint(self._filters, tokenizer))


class ExLlamaV2DynamicGenerator:
    """Writes the replies of many jobs at once, in the pages of one cache. What a text begins with and an earlier one
    too is computed once."""

    def __init__(
        self,
        model: ExLlamaV2,
        cache: ExLlamaV2Cache,
        tokenizer: ExLlamaV2Tokenizer,
        max_batch_size: int | None = None,
        max_seq_len: int | None = None,
        max_chunk_size: int | None = None,
        max_q_size: int = 8,
        draft_model: ExLlamaV2 | None = None,
        draft_cache: ExLlamaV2Cache | None = None,
        num_draft_tokens: int = 4,
        use_ngram_draft: bool = False,
        max_ngram: int = 4,  # noqa: ARG002
        max_sampling_threads: int = 16,  # noqa: ARG002
        min_sampling_threads: int = 3,  # noqa: ARG002
        paged: bool = True,  # noqa: ARG002
        filter_background_eval: bool = True,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        """max_batch_size sequences run at a time (None: config.max_input_len // max_q_size), none longer than
        max_seq_len (None: the cache); max_chunk_size tokens of prompts are read in a step. Up to num_draft_tokens are
        drafted at a time, none with 0, by draft_model over draft_cache (None: one as long as the cache) or by n-grams.

        max_ngram, threads, paged and filter_background_eval change no result here: pages work on every device, and
        sampling is done in one thread.
        """
        refuse_set("ExLlamaV2DynamicGenerator", **kwargs)
        if draft_model and use_ngram_draft:
            raise UsageError("a draft model and use_ngram_draft exclude each other", "leave one of them out")
        if not num_draft_tokens:
            draft_model, draft_cache, use_ngram_draft = None, None, False
        check_draft(draft_model, tokenizer)
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self.max_seq_len = max_seq_len or cache.max_seq_len
        batch = max_batch_size or max(1, model.config.max_input_len // max_q_size)
        drafts = num_draft_tokens if draft_model or use_ngram_draft else 0
        chunk = max_chunk_size or prefill_chunk(model.transformer.device)
        self.engine = DynamicGenerator(
            model.transformer,
            cache.kv,
            tokenizer.native,
            Limits(batch=batch, queue=MANY, chunk=chunk, drafts=drafts),
            draft_model.transformer if draft_model else None,
            draft_cache.kv if draft_cache else None,
            "draft" if draft_model else "ngram" if use_ngram_draft else "off",
        )
        self._jobs: dict[int, ExLlamaV2DynamicJob] = {}

    def warmup(self) -> None:
        """Write a few tokens and forget them."""
        self.engine.warm_up()

    def set_loras(self, loras: Loras) -> None:
        """The LoRAs of all jobs to come; None for none. UsageError while jobs remain."""
        self.engine.set_adapters(scaled_loras(loras))

    def enqueue(self, job: ExLlamaV2DynamicJob | Sequence[ExLlamaV2DynamicJob]) -> int | list[int]:
        """The serial of a job, or of each. ContextError for one that can never fit, UsageError for one that has not
        ended."""
        if isinstance(job, ExLlamaV2DynamicJob):
            return self._enqueue(job)
        return [self._enqueue(each) for each in job]

    def _enqueue(self, job: ExLlamaV2DynamicJob) -> int:
        if any(job is one for one in self._jobs.values()):
            raise UsageError("the job is enqueued already", "make another job, or wait until this one has ended")
        serial = self.engine.enqueue(self.checked(job))
        self._jobs[serial] = job
        job.serial_number = serial
        return serial

    def checked(self, job: ExLlamaV2DynamicJob) -> Job:
        """The engine's job; ContextError when it is longer than max_seq_len."""
        if (length := job.get_max_seq_len()) > self.max_seq_len:
            raise ContextError(
                f"prompt and max_new_tokens are {length} tokens, more than max_seq_len {self.max_seq_len}",
                "shorten the prompt or lower max_new_tokens",
            )
        return job.request(self.tokenizer)

    def cancel(self, job: ExLlamaV2DynamicJob) -> None:
        """End a job; it has no more results. Nothing happens to one that has ended."""
        if job.serial_number is not None and self._jobs.get(job.serial_number) is job:
            del self._jobs[job.serial_number]
            self.engine.cancel(job.serial_number)

    def clear_queue(self) -> None:
        """Cancel every job."""
        self.engine.clear()
        self._jobs.clear()

    def num_remaining_jobs(self) -> int:
        """Jobs that have not ended."""
        return self.engine.remaining

    def iterate(self) -> list[Record]:
        """One step of all jobs; what it brought. A job that fails says so in a result of its own and ends; the
        others go on."""
        records = []
        for result in self.engine.iterate():
            records.append(record_of(result, self._jobs[result.serial], self.tokenizer))
            if records[-1]["eos"]:
                del self._jobs[result.serial]
        return records

    def reset_page_table(self) -> None:
        """Forget the prompts that are cached."""
        self.engine.reset()

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        max_new_tokens: int,
        min_new_tokens: int = 0,
        seed: int | None = None,
        gen_settings: ExLlamaV2Sampler.Settings | Sequence[ExLlamaV2Sampler.Settings] | None = None,
        token_healing: bool = False,
        encode_special_tokens: bool = False,
        decode_special_tokens: bool = False,
        stop_conditions: Collection[int | str] | None = None,
        add_bos: bool = False,
        abort_event: Event | None = None,
        completion_only: bool = False,
        filters: Sequence[Any] | None = None,
        filter_prefer_eos: bool = False,
        return_last_results: bool = False,
        embeddings: Sequence[Any] | None = None,
        banned_strings: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The prompt's text with what follows, or that alone with completion_only; a list for a list of prompts; None
        once abort_event is set. A tuple of two is a pair for cfg_scale, whose first text counts.

        The seed grows by one per prompt. gen_settings is one for all or one each; so are filters and embeddings, lists
        of lists where each prompt has its own. With return_last_results (texts, last results). A job that fails raises
        its error, and UsageError is raised while other jobs remain.
        """
        refuse_set("ExLlamaV2DynamicGenerator.generate", **kwargs)
        check_prompts(prompt)
        prompts = cast(list[Prompt], [prompt] if isinstance(prompt, str | tuple) else list(prompt))
        settings = _each("gen_settings", gen_settings, isinstance(gen_settings, Sequence), len(prompts))
        own_filters = _each("filters", filters, _has_lists(filters), len(prompts))
        own_embeddings = _each("embeddings", embeddings, _has_lists(embeddings), len(prompts))
        jobs = []
        for number, text in enumerate(prompts):
            ids = self._encoded(text, own_embeddings[number], encode_special_tokens, add_bos)
            job = ExLlamaV2DynamicJob(
                ids, max_new_tokens, min_new_tokens, DEFAULT_SKIPS, settings[number],
                None if seed is None else seed + number, stop_conditions, decode_special_tokens,
                filters=own_filters[number], filter_prefer_eos=filter_prefer_eos, token_healing=token_healing,
                banned_strings=banned_strings, embeddings=own_embeddings[number],
            )  # fmt: skip
            jobs.append(job)
        last = self._run(jobs, abort_event)
        if last is None:
            return None
        done = _texts(prompts, last, completion_only)
        results = (done, last) if isinstance(prompt, list) else (done[0], last[0])
        return results if return_last_results else results[0]

    def _encoded(self, prompt: Prompt, embeddings: Any, special: bool, add_bos: bool) -> list[Tensor]:
        """The ids [n] of a text, or of each of a pair."""
        texts, marks = prompt if isinstance(prompt, tuple) else [prompt], marks_of(embeddings)
        return [torch.tensor(encode_prompt(self.tokenizer.native, text, marks, special, add_bos)) for text in texts]

    def _run(self, jobs: list[ExLlamaV2DynamicJob], abort_event: Event | None) -> list[Record] | None:
        """The last result of every job; None once `abort_event` is set."""
        if self.engine.remaining:
            raise UsageError(f"{self.engine.remaining} jobs have not ended", "iterate until they have")
        aborted = is_set(abort_event)
        last: dict[int, Record] = {}
        try:
            serials = [self._enqueue(job) for job in jobs]
            while self.engine.remaining:
                if aborted():
                    return None
                for record in self.iterate():
                    if "error" in record:
                        raise record["error"]
                    if record["eos"]:
                        last[record["serial"]] = record
        finally:
            self.clear_queue()
        return [last[serial] for serial in serials]


def _texts(prompts: Sequence[Prompt], last: Sequence[Record], completion_only: bool) -> list[str]:
    """Each prompt, of a pair the first, with what follows; or that alone."""
    starts = ["" if completion_only else text if isinstance(text, str) else text[0] for text in prompts]
    return [start + record["full_completion"] for start, record in zip(starts, last, strict=True)]


def _has_lists(given: Sequence[Any] | None) -> bool:
    return any(isinstance(each, list) for each in given or ())


def _each(name: str, given: Any, own: bool, count: int) -> list[Any]:
    """What every prompt has of what is `given`: its own, or all the same. UsageError where those are not as many."""
    each = list(given) if own else [given] * count
    if len(each) != count:
        raise UsageError(f"{name} are not as many as the prompts", "give one for all, or one each")
    return each
