"""What scripts get wrong is told in one line, and not by Python's or torch's errors."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from exl2chat.errors import ModelError, UsageError
from exl2chat.exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl2chat.exllamav2.generator import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicJob,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
)
from tests.exllamav2.conftest import MODEL

GREEDY = ExLlamaV2Sampler.Settings.greedy()
FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "bos_token_id", "eos_token_id",
)  # fmt: skip
NO_TEXT: list[Any] = [None, [None], "a\ud800b", ["a\ud800b"], 5]


@pytest.fixture
def cache(model: ExLlamaV2) -> ExLlamaV2Cache:
    return ExLlamaV2Cache(model, max_seq_len=256)


@pytest.fixture
def dynamic(model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer) -> ExLlamaV2DynamicGenerator:
    return ExLlamaV2DynamicGenerator(model, cache, tokenizer)


@pytest.mark.parametrize("prompt", NO_TEXT)
def test_a_prompt_that_is_no_text_is_refused(
    model: ExLlamaV2, dynamic: ExLlamaV2DynamicGenerator, tokenizer: ExLlamaV2Tokenizer, prompt: Any
) -> None:
    base = ExLlamaV2BaseGenerator(model, dynamic.cache, tokenizer)
    calls: list[Callable[[], object]] = [
        lambda: dynamic.generate(prompt, 3),
        lambda: base.generate_simple(prompt, GREEDY, 3),
        lambda: tokenizer.encode(prompt),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="text"):
            call()


@pytest.mark.parametrize("ids", ["abc", None, 5])
def test_ids_that_are_none_are_refused(
    model: ExLlamaV2, cache: ExLlamaV2Cache, tokenizer: ExLlamaV2Tokenizer, ids: Any
) -> None:
    stream = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
    with pytest.raises(UsageError, match="encode returns"):
        stream.begin_stream_ex(ids, GREEDY)
    with pytest.raises(UsageError, match="encode returns"):
        ExLlamaV2DynamicJob(ids, 3)


def test_what_is_no_filter_is_refused(dynamic: ExLlamaV2DynamicGenerator) -> None:
    with pytest.raises(UsageError, match="object is among the filters"):
        dynamic.generate("Once", 3, filters=[object()])
    assert dynamic.num_remaining_jobs() == 0


def test_a_job_is_enqueued_once(dynamic: ExLlamaV2DynamicGenerator) -> None:
    job = ExLlamaV2DynamicJob(torch.tensor([[1, 2, 3]]), 3, gen_settings=GREEDY)
    dynamic.enqueue(job)
    with pytest.raises(UsageError, match="enqueued already"):
        dynamic.enqueue(job)
    assert dynamic.num_remaining_jobs() == 1
    while dynamic.num_remaining_jobs():
        dynamic.iterate()
    dynamic.enqueue(job)
    dynamic.clear_queue()


def test_a_cache_beyond_all_memory_is_one_line(model: ExLlamaV2) -> None:
    with pytest.raises(ModelError, match="GiB, which do not fit the memory"):
        ExLlamaV2Cache(model, max_seq_len=10**15)


def test_a_config_has_the_fields_of_config_json() -> None:
    config = ExLlamaV2Config(str(MODEL))
    raw = json.loads((MODEL / "config.json").read_text())
    for name in FIELDS:
        assert getattr(config, name) == raw[name], name
    with pytest.raises(AttributeError):
        config.hidden_size = 5  # type: ignore[misc]
    with pytest.raises(UsageError, match="call prepare"):
        _ = ExLlamaV2Config().hidden_size
