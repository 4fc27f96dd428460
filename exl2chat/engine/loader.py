"""A model folder to everything a generator needs, and a conversation to the tokens the model reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from exl2chat.engine.cache import KVCache
from exl2chat.engine.placement import check_memory, choose_device, choose_dtype
from exl2chat.engine.transformer import Transformer
from exl2chat.errors import UsageError
from exl2chat.model.checkpoint import Checkpoint, open_checkpoint
from exl2chat.model.template import ChatTemplate, Turn, open_template
from exl2chat.model.tokenizer import Tokenizer, open_tokenizer
from exl2chat.model.vet import vet
from exl2chat.paths import Paths
from exl2chat.progress import Progress

DEFAULT_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that can answer. Stops: whatever config, generation_config, tokenizer or template ends a turn with."""

    checkpoint: Checkpoint
    transformer: Transformer
    cache: KVCache
    tokenizer: Tokenizer
    template: ChatTemplate
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]

    def encode_turns(self, turns: Sequence[Turn]) -> list[int]:
        """The ids of (role, text) turns up to where the assistant writes: after its text, if the last turn is its."""
        continuing = bool(turns) and turns[-1][0] == "assistant"
        return self.tokenizer.encode_chat(self.template.render(turns, continue_final=continuing))


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """A model that can be loaded: everything but its weights has been read, and they are expected to fit."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    template: ChatTemplate
    device: torch.device
    dtype: torch.dtype
    context: int

    def load(self, progress: Progress) -> LoadedModel:
        """Load the weights. ModelError where they are damaged or do not fit the memory that is free by now."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what torch keeps of an earlier model does not count as free
        check_memory(self.checkpoint, self.device, self.dtype, self.context)
        transformer = Transformer.load(self.checkpoint, self.device, self.dtype, progress)
        cache = transformer.new_cache(self.context)
        stop_ids = self.checkpoint.config.eos_ids | self.tokenizer.eos_ids | self.template.stop_ids
        stop_strings = self.template.stop_strings
        return LoadedModel(self.checkpoint, transformer, cache, self.tokenizer, self.template, stop_ids, stop_strings)


def plan_load(
    path: Path,
    device: str,
    dtype: str,
    context: int | None,
    paths: Paths,
    progress: Progress,
    replaced: LoadedModel | None = None,
) -> LoadPlan:
    """Read and check the model in the folder `path`; `device` and `dtype` are those of the settings.

    `context` None: what the model was made for, at most 8192 tokens. `replaced` is a model that will be given up before
    the weights are loaded: its memory counts as free. ModelError where the folder is damaged, not supported or does not
    fit the memory; UsageError for a context that the model was not made for.
    """
    progress("reading the model folder")
    checkpoint = open_checkpoint(path)
    progress("trying the tokenizer and the chat template")
    vet(checkpoint.folder, paths)
    tokenizer = open_tokenizer(checkpoint.folder)
    template = open_template(checkpoint.folder, tokenizer)
    room = choose_context(checkpoint, context)
    place = choose_device(device)
    kind = choose_dtype(dtype, place)
    reusable = 0
    if replaced and replaced.transformer.device.type == place.type:
        reusable = replaced.transformer.weight_bytes + replaced.cache.nbytes
    check_memory(checkpoint, place, kind, room, reusable)
    return LoadPlan(checkpoint, tokenizer, template, place, kind, room)


def choose_context(checkpoint: Checkpoint, asked: int | None) -> int:
    """The context in tokens; UsageError when more is asked for than the model was made for."""
    longest = checkpoint.config.context
    if asked is not None and asked > longest:
        raise UsageError(f"--ctx {asked}: {checkpoint.folder.path.name} was made for {longest} tokens", "ask for less")
    return asked or min(longest, DEFAULT_CONTEXT)
