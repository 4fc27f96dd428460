"""A model folder to everything a generator needs, and a conversation to the tokens the model reads."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from exl2chat.engine.cache import BITS, KVCache
from exl2chat.engine.drafting import check_draft_tokenizer
from exl2chat.engine.placement import candidate, check_context, choose_device, choose_dtype, plan_memory
from exl2chat.engine.transformer import Transformer
from exl2chat.model.checkpoint import Checkpoint, open_checkpoint
from exl2chat.model.template import ChatTemplate, Turn, open_template
from exl2chat.model.tokenizer import Tokenizer, open_tokenizer
from exl2chat.model.vet import vet
from exl2chat.paths import Paths
from exl2chat.progress import Progress


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that can answer. Stops: whatever config, generation_config, tokenizer or template ends a turn with.
    `note` is what the user should know of how it was loaded; it may be empty."""

    checkpoint: Checkpoint
    transformer: Transformer
    cache: KVCache
    tokenizer: Tokenizer
    template: ChatTemplate
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    note: str

    def encode_turns(self, turns: Sequence[Turn]) -> list[int]:
        """The ids of (role, text) turns up to where the assistant writes: after its text, if the last turn is its."""
        continuing = bool(turns) and turns[-1][0] == "assistant"
        return self.tokenizer.encode_chat(self.template.render(turns, continue_final=continuing))

    def recover(self) -> None:
        """After a reply that failed: give back what it held, so that the next one finds all the memory there is.

        What CUDA raises here it would raise at every call from now on: this process is of no more use.
        """
        gc.collect()
        if self.transformer.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A model that can be loaded: everything but its weights has been read, and they are expected to fit."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    template: ChatTemplate
    device: torch.device
    dtype: torch.dtype
    context: int | None
    cache_bits: int

    def load(self, progress: Progress) -> LoadedModel:
        """Load the weights, telling what memory they take. ModelError where they are damaged or do not fit what is
        free by now, or where a kernel does not compile."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what torch keeps of an earlier model does not count as free
        model = candidate(self.checkpoint, self.device, self.dtype, self.cache_bits)
        budget = plan_memory(model, self.device, self.dtype, self.context)

        def show(stage: str, done: int = 0, total: int = 0, unit: str = "") -> None:
            progress(f"{stage} {budget}", done, total, unit)

        transformer = Transformer.load(self.checkpoint, self.device, self.dtype, show, self.cache_bits)
        cache = transformer.new_cache(budget.context)
        transformer.warm_up(cache, progress)
        stop_ids = self.checkpoint.config.eos_ids | self.tokenizer.eos_ids | self.template.stop_ids
        stop_strings = self.template.stop_strings
        return LoadedModel(
            self.checkpoint, transformer, cache, self.tokenizer, self.template, stop_ids, stop_strings, budget.note
        )


def plan_load(
    path: Path,
    device: str,
    dtype: str,
    context: int | None,
    paths: Paths,
    progress: Progress,
    replaced: Sequence[LoadedModel] = (),
    cache: str = "fp16",
) -> LoadPlan:
    """Read and check the model in the folder `path`; `device`, `dtype` and `cache` are those of the settings.

    `context` None: what the model was made for, at most 8192 tokens, and what fits. `replaced` are models that will
    be given up before the weights are loaded: their memory counts as free. ModelError where the folder is damaged, not
    supported or does not fit the memory; UsageError for a context that the model was not made for.
    """
    progress("reading the model folder")
    checkpoint = open_checkpoint(path)
    progress("trying the tokenizer and the chat template")
    vet(checkpoint.folder, paths)
    tokenizer = open_tokenizer(checkpoint.folder)
    template = open_template(checkpoint.folder, tokenizer)
    check_context(checkpoint, context)
    place = choose_device(device)
    kind = choose_dtype(dtype, place)
    leaving = [model for model in replaced if model.transformer.device.type == place.type]
    reusable = sum(model.transformer.weight_bytes + model.cache.nbytes for model in leaving)
    plan_memory(candidate(checkpoint, place, kind, BITS[cache]), place, kind, context, reusable)
    return LoadPlan(checkpoint, tokenizer, template, place, kind, context, BITS[cache])


def plan_draft(
    path: Path, plan: LoadPlan, paths: Paths, progress: Progress, replaced: Sequence[LoadedModel] = ()
) -> LoadPlan:
    """The model in the folder `path`, to draft for that of `plan`: at its place, with its dtype and a cache as long, or
    as long as the draft model was made for. UsageError where their tokens differ."""
    draft = plan_load(path, plan.device.type, str(plan.dtype).removeprefix("torch."), None, paths, progress, replaced)
    check_draft_tokenizer(draft.tokenizer, plan.tokenizer, path.name)
    longest = draft.checkpoint.config.context
    return replace(draft, context=None if plan.context is None else min(plan.context, longest))
