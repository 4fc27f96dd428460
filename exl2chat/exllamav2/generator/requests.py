"""What scripts ask of the generators, as the engine is asked: settings, filters, prompts."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import Tensor

from exl2chat.engine.constraints import Constraint
from exl2chat.engine.drafting import check_draft_tokenizer
from exl2chat.engine.replies.jobs import Choice
from exl2chat.errors import UsageError
from exl2chat.exllamav2.generator.filters import constraint_of
from exl2chat.exllamav2.generator.hooks import engine_hook
from exl2chat.exllamav2.generator.sampler import ExLlamaV2Sampler
from exl2chat.exllamav2.model import ExLlamaV2
from exl2chat.exllamav2.tokenizer import MASKED, ExLlamaV2Tokenizer
from exl2chat.exllamav2.unsupported import unsupported
from exl2chat.model.folder import open_folder
from exl2chat.model.tokenizer import open_tokenizer
from exl2chat.settings import Sampling

Hooks = tuple[Callable[[Choice], None], ...]


def engine_settings(settings: ExLlamaV2Sampler.Settings, seed: int | None) -> tuple[Sampling, float | None, Hooks]:
    """The engine's settings, guidance and hooks. Without a seed one comes from Python's `random`, so that
    `random.seed(n)` makes replies repeat."""
    plain = replace(settings, cfg_scale=None, post_sampling_hooks=[])
    sampling = plain.sampling(random.getrandbits(63) if seed is None else seed)
    return sampling, settings.cfg_scale, tuple(map(engine_hook, settings.post_sampling_hooks))


def engine_constraint(filters: Sequence[Any] | None, tokenizer: ExLlamaV2Tokenizer) -> Constraint | None:
    """All filters at once, of which every job has copies of its own. None without filters."""
    return constraint_of(tokenizer, filters or ())


def check_prompts(prompts: object) -> None:
    """UsageError for what is neither a text nor many. Whether each of many is one, encoding it shows."""
    if not isinstance(prompts, Sequence):
        raise UsageError(f"the prompt is a {type(prompts).__name__}", "give a text, or a list of texts")


def row_of(ids: Tensor) -> tuple[int, ...]:
    """A prompt [1, n] or [n]. UsageError for a batch, and for what is no tensor."""
    if not isinstance(ids, Tensor):
        raise UsageError(f"input_ids is a {type(ids).__name__}", "give the tensor that tokenizer.encode returns")
    if ids.dim() > 2 or (ids.dim() == 2 and ids.shape[0] != 1):
        raise UsageError(f"input_ids has shape {list(ids.shape)}", "it is [1, n]: a job has one row")
    return tuple(ids.flatten().tolist())


def attended(input_ids: Tensor, input_mask: Tensor | None, offsets: Tensor | None) -> tuple[Tensor, tuple[int, ...]]:
    """What input_mask leaves of a prompt [1, n], and the RoPE positions of that and of the reply; none where they
    follow each other. UsageError for what is no mask.

    input_mask [1, n]: bool, true where a token is to be seen, or as `ExLlamaV2Tokenizer.padding_mask` gives it. Offsets
    [1, 1] shift all positions, which changes nothing: RoPE lets attention see how far apart two tokens are, not where.
    """
    if offsets is not None and offsets.numel() != 1:
        raise UsageError(f"position_offsets has shape {list(offsets.shape)}", "it is [1, 1]: one for the prompt")
    if input_mask is None:
        return input_ids, ()
    if input_mask.shape != input_ids.shape:
        raise UsageError(
            f"input_mask has shape {list(input_mask.shape)}", f"it is that of input_ids, {list(input_ids.shape)}"
        )
    seen = input_mask
    if input_mask.dtype != torch.bool:
        seen = input_mask == 0
        if not (seen | (input_mask <= MASKED)).all():
            raise UsageError("input_mask is neither bool nor a padding mask", "give true where a token is to be seen")
    places = [*seen[0].nonzero()[:, 0].tolist(), seen.shape[1]]
    positions = tuple(place - places[0] for place in places)
    return input_ids[:, seen[0]], positions if positions[-1] >= len(positions) else ()


def unpadded(input_ids: Tensor, input_mask: Tensor | None, offsets: Tensor | None) -> tuple[tuple[int, ...], ...]:
    """The prompts of a batch [B, n], without what input_mask hides before them. Offsets [B, 1] change nothing."""
    prompts = []
    for at in range(len(input_ids)):
        mask, offset = (None if each is None else each[at : at + 1] for each in (input_mask, offsets))
        prompt, positions = attended(input_ids[at : at + 1], mask, offset)
        if positions:
            raise unsupported("an input_mask with gaps, with cfg_scale,")
        prompts.append(row_of(prompt))
    return tuple(prompts)


def check_draft(draft_model: ExLlamaV2 | None, tokenizer: ExLlamaV2Tokenizer) -> None:
    """UsageError where a token is another one to the draft model, by the tokenizer in its folder."""
    if draft_model is not None:
        folder = open_folder(Path(draft_model.config.model_dir or ""))
        check_draft_tokenizer(open_tokenizer(folder), tokenizer.native, folder.path.name)


def is_set(event: Event | None) -> Callable[[], bool]:
    """Whether an event that may be missing is set."""
    return lambda: event is not None and event.is_set()
