"""Options of a guided stream: at a scale of 1 the second prompt has no say, and the reply is that of the first."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from exl2chat.exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Lora, ExLlamaV2Tokenizer
from exl2chat.exllamav2.generator import (
    ExLlamaV2MMEmbedding,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
)
from exl2chat.exllamav2.generator.filters import ExLlamaV2SelectFilter
from tests.model.lora_files import make_lora

Settings = ExLlamaV2Sampler.Settings
PICTURE = "<picture>"
PAIR = [f"The people {PICTURE} of the to", f"In the beginning {PICTURE} were all of the to"]
COUNT = 12


@pytest.fixture
def stream(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> ExLlamaV2StreamingGenerator:
    generator = ExLlamaV2StreamingGenerator(model, ExLlamaV2Cache(model, max_seq_len=256, batch_size=2), tokenizer)
    generator.set_stop_conditions([])
    return generator


def picture(model: ExLlamaV2, seed: int = 1) -> ExLlamaV2MMEmbedding:
    """Rows of no particular meaning."""
    rows = torch.randn(4, model.transformer.config.hidden_size, generator=torch.Generator().manual_seed(seed))
    return ExLlamaV2MMEmbedding(model, rows, text_alias=PICTURE)


def said(
    generator: ExLlamaV2StreamingGenerator, scale: float | None, only: list[str] | None = None, **options: Any
) -> tuple[str, list[int]]:
    """Text and tokens of a reply to the pair, or without a scale to its first prompt."""
    embeddings = options.setdefault("input_embeddings", [picture(generator.model)])
    ids, offsets = generator.tokenizer.encode(PAIR, return_offsets=True, embeddings=embeddings)
    mask = generator.tokenizer.padding_mask(ids)
    settings = Settings.greedy(cfg_scale=scale)
    if only:
        settings.allow_tokens(generator.tokenizer, only)
    prompts = ids, mask, offsets[:, None]
    ids, mask, offsets = prompts if scale is not None else (each[:1] for each in prompts)
    generator.begin_stream_ex(ids, settings, input_mask=mask, position_offsets=offsets, **options)
    results = [generator.stream_ex()]
    while not results[-1]["eos"] and results[-1]["reply_tokens"] < COUNT:
        results.append(generator.stream_ex())
    text = "".join(result["chunk"] for result in results)
    return text, [token for result in results for token in result["chunk_token_ids"][0].tolist()]


def options(name: str, generator: ExLlamaV2StreamingGenerator, folder: Path) -> Mapping[str, Any]:
    """What is set, under its name."""
    free = said(generator, None)[0]
    model, tokenizer = generator.model, generator.tokenizer
    if name == "loras":
        config = model.transformer.config
        make_lora(folder, {"model.layers.0.mlp.down_proj": (config.hidden_size, config.intermediate_size)}, size=0.5)
    known: dict[str, Callable[[], dict[str, Any]]] = {
        "token_healing": lambda: {"token_healing": True},
        "banned_strings": lambda: {"banned_strings": [free.strip()[1:4].upper()]},
        "filters": lambda: {"filters": [ExLlamaV2SelectFilter(model, tokenizer, ["no one", "wn is", "wn was"])]},
        "decode_special_tokens": lambda: {"decode_special_tokens": True, "only": ["<|im_start|>"]},
        "input_embeddings": lambda: {"input_embeddings": [picture(model, 2)]},
        "loras": lambda: {"loras": ExLlamaV2Lora.from_directory(model, str(folder))},
    }
    return known[name]()


NAMES = ["token_healing", "banned_strings", "filters", "decode_special_tokens", "input_embeddings", "loras"]


@pytest.mark.parametrize("name", NAMES)
def test_an_option_does_what_it_does_without_guidance(
    name: str, stream: ExLlamaV2StreamingGenerator, tmp_path: Path
) -> None:
    plain, chosen = said(stream, None), options(name, stream, tmp_path)
    expected = said(stream, None, **chosen)
    assert expected != plain
    assert said(stream, 1.0, **chosen) == expected
    assert said(stream, 1.0) == plain


def test_stop_strings_end_a_guided_reply(stream: ExLlamaV2StreamingGenerator) -> None:
    free = said(stream, 1.0)[0]
    stop = free[4:8]
    stream.set_stop_conditions([stop])
    assert said(stream, 1.0)[0] == free[: free.index(stop)]
