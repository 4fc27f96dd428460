"""The parameters of `begin_stream_ex` and the keys of `stream_ex`, over a tiny model."""

import random
from typing import Any

import pytest
import torch

from exl2chat.exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Tokenizer
from exl2chat.exllamav2.generator import ExLlamaV2Sampler, ExLlamaV2StreamingGenerator
from exl2chat.exllamav2.generator.filters import ExLlamaV2Filter, ExLlamaV2PrefixFilter, ExLlamaV2SelectFilter

Settings = ExLlamaV2Sampler.Settings
PROMPT = "Once upon a time"


@pytest.fixture
def generator(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> ExLlamaV2StreamingGenerator:
    return ExLlamaV2StreamingGenerator(model, ExLlamaV2Cache(model, max_seq_len=256), tokenizer)


def stream(
    subject: ExLlamaV2StreamingGenerator, settings: Any = None, prompt: str = PROMPT, count: int = 12, **options: Any
) -> list[dict[str, Any]]:
    """The results of a reply, at most `count` of them."""
    random.seed(1)
    subject.begin_stream_ex(subject.tokenizer.encode(prompt), settings or Settings.greedy(), **options)
    results: list[dict[str, Any]] = []
    while len(results) < count and not (results and results[-1]["eos"]):
        results.append(subject.stream_ex())
    return results


def text(results: list[dict[str, Any]]) -> str:
    return "".join(result["chunk"] for result in results)


def ids(results: list[dict[str, Any]]) -> torch.Tensor:
    return torch.cat([result["chunk_token_ids"] for result in results], 1)


def test_only_what_was_asked_for_is_in_a_result(generator: ExLlamaV2StreamingGenerator) -> None:
    (result,) = stream(generator, count=1)
    assert result.keys() == {"chunk", "eos", "chunk_token_ids", "stop_reason", "reply_tokens"}


def test_probabilities_top_tokens_and_logits_have_the_shapes_and_values_of_the_reference(
    generator: ExLlamaV2StreamingGenerator, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer
) -> None:
    settings = Settings(temperature=1.0, top_k=3, top_p=1.0, token_repetition_penalty=1.2)
    asked = {"return_probabilities": True, "return_top_tokens": 5, "return_logits": True}
    results = stream(generator, settings, count=4, **asked)
    size = tokenizer.get_vocab_size()
    for place, result in enumerate(results):
        count = result["chunk_token_ids"].shape[1]
        assert result["probs"].shape == (1, count)
        assert result["top_tokens"].shape == result["top_probs"].shape == (1, count, 5)
        assert result["logits"].shape == (1, count, size)
        assert count == 1
        assert result["top_tokens"][0, 0, 3:].tolist() == [-1, -1]
        assert result["top_probs"].sum().item() == pytest.approx(1)
        at = result["top_tokens"][0, 0].tolist().index(result["chunk_token_ids"].item())
        assert result["probs"].item() == pytest.approx(result["top_probs"][0, 0, at].item())
        before = generator.sequence_ids[:, : -len(results) + place]
        torch.testing.assert_close(
            result["logits"][0], model.forward(before, last_id_only=True)[0, :, :size], rtol=1e-3, atol=1e-3
        )


def test_the_older_form_tells_what_was_asked_for(generator: ExLlamaV2StreamingGenerator) -> None:
    asked = {"return_probabilities": True, "return_logits": True}
    (expected,) = stream(generator, count=1, **asked)
    stream(generator, count=0, **asked)
    chunk, eos, tokens, probs, logits = generator.stream()
    assert (chunk, eos, tokens.tolist()) == (expected["chunk"], False, expected["chunk_token_ids"].tolist())
    assert torch.equal(probs, expected["probs"])
    assert torch.equal(logits, expected["logits"][0])


def test_it_completes_prompts_as_the_base_generator_and_goes_on(generator: ExLlamaV2StreamingGenerator) -> None:
    expected = text(stream(generator))
    options: dict[str, Any] = {"stop_token": None, "completion_only": True}
    assert generator.generate_simple(PROMPT, Settings.greedy(), 12, **options) == expected
    assert len(generator.generate_simple([PROMPT, "So it is"], Settings.greedy(), 3, **options)) == 2
    assert text(stream(generator)) == expected


def test_filters_shape_the_reply_and_end_it(
    generator: ExLlamaV2StreamingGenerator, tokenizer: ExLlamaV2Tokenizer
) -> None:
    select = ExLlamaV2SelectFilter(None, tokenizer, ["yes it is", "no way"])
    results = stream(generator, count=40, filters=[select])
    assert (text(results) in ("yes it is", "no way"), results[-1]["eos"]) == (True, True)
    prefix = ExLlamaV2PrefixFilter(None, tokenizer, "Dear reader, ")
    assert text(stream(generator, count=30, filters=[prefix])).startswith("Dear reader, ")


class Mask(ExLlamaV2Filter):
    """A filter in the manner of Formatron's: it masks logits, and lets one token or EOS pass."""

    token = 50

    def can_mask_logits(self) -> bool:
        return True

    def prepare_logit_mask(self) -> bool:
        return True

    def mask_logits(self, logits: torch.Tensor) -> torch.Tensor:
        masked = torch.full_like(logits, -torch.inf)
        allowed = [self.token, self.tokenizer.eos_token_id]
        masked[..., allowed] = logits[..., allowed]
        return masked


def test_a_filter_may_mask_logits_and_eos_can_be_preferred(
    generator: ExLlamaV2StreamingGenerator, tokenizer: ExLlamaV2Tokenizer
) -> None:
    rule = Mask(None, tokenizer)
    results = stream(generator, count=5, filters=[rule])
    assert set(ids(results)[0].tolist()) <= {50}
    (last,) = stream(generator, filters=[rule], filter_prefer_eos=True)
    assert (last["eos"], last["chunk"], last["stop_reason"]) == (True, "", "eos")


def test_several_filters_hold_at_once(generator: ExLlamaV2StreamingGenerator, tokenizer: ExLlamaV2Tokenizer) -> None:
    both = [
        ExLlamaV2SelectFilter(None, tokenizer, ["no", "yes"]),
        ExLlamaV2SelectFilter(None, tokenizer, ["yes", "maybe"]),
    ]
    assert text(stream(generator, filters=both)) == "yes"


def test_a_healed_prompt_goes_on_within_its_last_word(
    generator: ExLlamaV2StreamingGenerator, tokenizer: ExLlamaV2Tokenizer
) -> None:
    settings = Settings(temperature=1.5, top_p=0.0, top_k=0)
    prompt = tokenizer.encode("the capit")[0]
    piece = tokenizer.get_id_to_piece_list()[prompt[-1]]
    results = stream(generator, settings, "the capit", count=4, token_healing=True)
    sequence = generator.sequence_ids[0]
    assert torch.equal(sequence[: len(prompt) - 1], prompt[:-1])
    assert tokenizer.get_id_to_piece_list()[sequence[len(prompt) - 1]].startswith(piece)
    assert tokenizer.decode(sequence).startswith("the capit" + text(results))


def test_a_filter_and_healing_work_together(
    generator: ExLlamaV2StreamingGenerator, tokenizer: ExLlamaV2Tokenizer
) -> None:
    select = ExLlamaV2SelectFilter(None, tokenizer, ["al is", "ol is"])
    results = stream(generator, None, "the capit", count=20, token_healing=True, filters=[select])
    assert text(results) in ("al is", "ol is")
    assert results[-1]["eos"]


def test_banned_strings_are_suppressed_in_any_case(generator: ExLlamaV2StreamingGenerator) -> None:
    free = text(stream(generator, count=12))
    banned = free.strip()[2:5].upper()
    results = stream(generator, count=25, banned_strings=[banned])
    assert banned.lower() not in text(results).lower()
    suppressed = [result["suppressed"] for result in results if "suppressed" in result]
    assert suppressed
    assert all(banned.lower() in each.lower() for each in suppressed)
    with pytest.raises(ValueError, match="no list of texts"):
        stream(generator, banned_strings="no")


def test_banned_tokens_are_not_drawn_in_that_step(generator: ExLlamaV2StreamingGenerator) -> None:
    (first,) = ids(stream(generator, count=1))[0].tolist()
    generator.begin_stream_ex(generator.tokenizer.encode(PROMPT), Settings.greedy())
    assert generator.stream_ex(ban_tokens=[first])["chunk_token_ids"].item() != first


def test_special_tokens_are_decoded_on_request(
    generator: ExLlamaV2StreamingGenerator, tokenizer: ExLlamaV2Tokenizer
) -> None:
    settings = Settings.greedy()
    settings.allow_tokens(tokenizer, ["<|im_start|>"])
    assert text(stream(generator, settings, count=2)) == ""
    assert text(stream(generator, settings, count=2, decode_special_tokens=True)) == "<|im_start|>" * 2


def test_the_older_form_streams_tuples_and_takes_the_same_options(generator: ExLlamaV2StreamingGenerator) -> None:
    free = text(stream(generator, count=3))
    prompt = generator.tokenizer.encode(PROMPT)
    generator.begin_stream(prompt, Settings.greedy(), token_healing=False)
    said = [generator.stream() for _ in range(3)]
    assert "".join(chunk for chunk, _, _ in said) == free
    assert all(not eos and tokens.shape == (1, 1) for _, eos, tokens in said)
