"""Each parameter of `generate_simple` does something, in a list of prompts too."""

import pytest
import torch

from exl2chat.exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Tokenizer
from exl2chat.exllamav2.generator import ExLlamaV2BaseGenerator, ExLlamaV2Sampler, ExLlamaV2StreamingGenerator
from exl2chat.exllamav2.generator.filters import ExLlamaV2Filter

Settings = ExLlamaV2Sampler.Settings
GREEDY = Settings.greedy()
PROMPT = "We hold these truths to be sel"
SPECIAL = "<|im_start|>"


@pytest.fixture
def base(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> ExLlamaV2BaseGenerator:
    return ExLlamaV2BaseGenerator(model, ExLlamaV2Cache(model, max_seq_len=256), tokenizer)


class AfterTwo(ExLlamaV2Filter):
    """The text may end once there are two tokens."""

    def begin(self, prefix_str: str) -> None:  # noqa: ARG002
        self.count = 0

    def feed(self, token: torch.Tensor) -> None:  # noqa: ARG002
        self.count += 1

    def next(self) -> tuple[list[int], list[int]]:
        ends = self.tokenizer.eos_ids
        return [token for token in range(self.tokenizer.get_vocab_size()) if self.count > 1 or token not in ends], []


def test_seeds_grow_by_one_per_prompt(base: ExLlamaV2BaseGenerator) -> None:
    wild = Settings(temperature=1.5, top_k=0, top_p=0.0)
    alone = [base.generate_simple(PROMPT, wild, 9, seed=seed) for seed in (5, 6)]
    assert base.generate_simple([PROMPT, PROMPT], wild, 9, seed=5) == alone
    assert alone[0] != alone[1]


def test_the_last_token_of_a_prompt_is_healed(
    base: ExLlamaV2BaseGenerator, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer
) -> None:
    ids = tokenizer.encode(PROMPT)
    assert isinstance(ids, torch.Tensor)
    stream = ExLlamaV2StreamingGenerator(model, ExLlamaV2Cache(model, max_seq_len=256), tokenizer)
    stream.begin_stream_ex(ids, GREEDY, token_healing=True)
    said = "".join(stream.stream_ex()["chunk"] for _ in range(8))
    healed = base.generate_simple([PROMPT, "Another one"], GREEDY, 8, token_healing=True, completion_only=True)
    assert healed[0] == said
    base.generate_simple(PROMPT, GREEDY, 8, token_healing=True, stop_token=None)
    assert base.sequence_ids is not None
    assert base.sequence_ids.shape[1] == ids.shape[1] - 1 + 8


@pytest.mark.parametrize("shown", [True, False])
def test_special_tokens_are_encoded_and_decoded_on_request(base: ExLlamaV2BaseGenerator, shown: bool) -> None:
    special = base.tokenizer.single_id(SPECIAL)
    assert special is not None
    only = Settings.greedy()
    only.allow_tokens(base.tokenizer, [special])
    text = base.generate_simple(
        SPECIAL,
        only,
        3,
        encode_special_tokens=shown,
        decode_special_tokens=shown,
        stop_token=None,
        completion_only=True,
    )
    assert text == SPECIAL * 3 * shown
    assert base.sequence_ids is not None
    assert (base.sequence_ids.shape[1] == 1 + 3) is shown


def test_an_end_that_the_filters_allow_is_preferred_on_request(
    base: ExLlamaV2BaseGenerator, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer
) -> None:
    filters = [AfterTwo(model, tokenizer)]
    lengths = []
    for preferred in (True, False):
        base.generate_simple(PROMPT, GREEDY, 9, filters=filters, filter_prefer_eos=preferred)
        assert base.sequence_ids is not None
        lengths.append(base.sequence_ids.shape[1] - tokenizer.num_tokens(PROMPT))
    assert lengths == [2, 9]  # the end itself is no part of the sequence
