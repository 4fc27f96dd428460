"""LoRAs in the base and dynamic generators: the replies of the streaming generator with the same LoRAs."""

from pathlib import Path

import pytest

from exl2chat.errors import UsageError
from exl2chat.exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Lora, ExLlamaV2Tokenizer
from exl2chat.exllamav2.generator import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicJob,
    ExLlamaV2StreamingGenerator,
)
from tests.exllamav2.test_generators import GREEDY, PROMPTS
from tests.model.lora_files import make_lora

TEXT = " ".join(PROMPTS * 8)  # more than a page


@pytest.fixture
def lora(model: ExLlamaV2, tmp_path: Path) -> ExLlamaV2Lora:
    config = model.transformer.config
    shapes = {"model.layers.0.mlp.down_proj": (config.hidden_size, config.intermediate_size)}
    make_lora(tmp_path, shapes, size=0.5)
    return ExLlamaV2Lora.from_directory(model, str(tmp_path))


def streamed(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, lora: ExLlamaV2Lora | None) -> str:
    stream = ExLlamaV2StreamingGenerator(model, ExLlamaV2Cache(model, max_seq_len=512), tokenizer)
    stream.set_stop_conditions([])
    ids = tokenizer.encode(TEXT)
    stream.begin_stream_ex(ids, GREEDY, loras=lora)
    for _ in range(12):
        stream.stream_ex()
    return str(tokenizer.decode(stream.sequence_ids[0, ids.shape[1] :]))


def test_loras_change_from_reply_to_reply_and_pages_are_those_of_the_same_ones(
    model: ExLlamaV2,
    tokenizer: ExLlamaV2Tokenizer,
    lora: ExLlamaV2Lora,
) -> None:
    plain, changed = streamed(model, tokenizer, None), streamed(model, tokenizer, lora)
    assert plain != changed
    cache = ExLlamaV2Cache(model, max_seq_len=1024)
    dynamic = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
    cached = []
    for loras in (None, lora, None, [lora]):
        dynamic.set_loras(loras)
        text, last = dynamic.generate(TEXT, 12, gen_settings=GREEDY, completion_only=True, return_last_results=True)
        assert text == (plain if loras is None else changed)
        cached.append(last["cached_tokens"])
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) >= 256
    base = ExLlamaV2BaseGenerator(model, cache, tokenizer)
    for loras in (lora, None):
        reply = base.generate_simple(TEXT, GREEDY, 12, loras=loras, stop_token=None, completion_only=True)
        assert reply == (plain if loras is None else changed)


def test_loras_cannot_change_under_a_job(
    model: ExLlamaV2,
    tokenizer: ExLlamaV2Tokenizer,
    lora: ExLlamaV2Lora,
) -> None:
    dynamic = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=512), tokenizer)
    dynamic.enqueue(ExLlamaV2DynamicJob(tokenizer.encode(PROMPTS[0]), 3))
    with pytest.raises(UsageError, match="not ended"):
        dynamic.set_loras(lora)
