"""Parameters of jobs, and of `generate` which makes them: each does something."""

from typing import Any

import pytest
import torch

from exl2chat.exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Tokenizer
from exl2chat.exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler, ExLlamaV2StreamingGenerator
from tests.exllamav2.test_base_parameters import AfterTwo

GREEDY = ExLlamaV2Sampler.Settings.greedy()
PROMPT = "We hold these truths to be sel"
SPECIAL = "<|im_start|>"


@pytest.fixture
def dynamic(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> ExLlamaV2DynamicGenerator:
    return ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=512), tokenizer)


def last(generator: ExLlamaV2DynamicGenerator, prompt: str = PROMPT, **options: Any) -> dict[str, Any]:
    """The last result of a reply of at most 12 tokens."""
    _, record = generator.generate(prompt, 12, return_last_results=True, **{"gen_settings": GREEDY, **options})
    return dict(record)


def test_stop_ids_are_not_drawn_before_min_new_tokens(dynamic: ExLlamaV2DynamicGenerator) -> None:
    even = list(range(0, dynamic.tokenizer.get_vocab_size(), 2))
    assert last(dynamic, stop_conditions=even)["new_tokens"] < 8
    assert 8 < last(dynamic, stop_conditions=even, min_new_tokens=8)["new_tokens"] <= 12


def test_the_last_token_of_a_prompt_is_healed(
    dynamic: ExLlamaV2DynamicGenerator, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer
) -> None:
    stream = ExLlamaV2StreamingGenerator(model, ExLlamaV2Cache(model, max_seq_len=256), tokenizer)
    ids = tokenizer.encode(PROMPT)
    assert isinstance(ids, torch.Tensor)
    replies = []
    for healing in (True, False):
        stream.begin_stream_ex(ids, GREEDY, token_healing=healing)
        replies.append("".join(stream.stream_ex()["chunk"] for _ in range(12)))
        assert last(dynamic, token_healing=healing)["full_completion"] == replies[-1]
    assert replies[0] != replies[1]


@pytest.mark.parametrize(("preferred", "reason"), [(True, "stop_token"), (False, "max_new_tokens")])
def test_an_end_that_the_filters_allow_is_preferred_on_request(
    dynamic: ExLlamaV2DynamicGenerator, preferred: bool, reason: str
) -> None:
    tokenizer = dynamic.tokenizer
    filters = [AfterTwo(dynamic.model, tokenizer)]
    record = last(dynamic, filters=filters, filter_prefer_eos=preferred, stop_conditions=[tokenizer.eos_token_id])
    assert (record["eos_reason"], record["new_tokens"]) == (reason, 3 if preferred else 12)


@pytest.mark.parametrize("shown", [True, False])
def test_special_tokens_are_encoded_and_decoded_on_request(dynamic: ExLlamaV2DynamicGenerator, shown: bool) -> None:
    special = dynamic.tokenizer.single_id(SPECIAL)
    assert special is not None
    only = ExLlamaV2Sampler.Settings.greedy()
    only.allow_tokens(dynamic.tokenizer, [special])
    record = last(dynamic, SPECIAL, gen_settings=only, encode_special_tokens=shown, decode_special_tokens=shown)
    assert record["full_completion"] == SPECIAL * 12 * shown
    assert (record["prompt_tokens"] == 1) is shown


def test_bos_is_put_before_the_prompt_on_request(dynamic: ExLlamaV2DynamicGenerator) -> None:
    counts = [last(dynamic, add_bos=bos)["prompt_tokens"] for bos in (True, False)]
    assert counts[0] == counts[1] + 1
