"""Draft models and n-grams in the dynamic generator, as scripts ask for them."""

from typing import Any

import pytest

from exl2chat.engine import batch_drafting
from exl2chat.errors import UsageError
from exl2chat.exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Tokenizer
from exl2chat.exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2Sampler
from tests.engine.speculative import Always

PROMPTS = ["Once upon a time, once upon a time, once upon", "We hold these truths to be self-evident, that all"]
SETTINGS = ExLlamaV2Sampler.Settings(temperature=0.8, top_k=4)


def results(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, **drafts: Any) -> tuple[list[str], list[dict[str, Any]]]:
    cache = ExLlamaV2Cache(model, max_seq_len=512)
    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer, **drafts)
    texts, last = generator.generate(PROMPTS, 40, seed=1, gen_settings=SETTINGS, return_last_results=True)
    return texts, last


def test_texts_are_those_without_drafts(
    model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_drafting, "Pace", Always)
    expected, plain = results(model, tokenizer)
    assert "accepted_draft_tokens" not in plain[0]
    draft_cache = ExLlamaV2Cache(model, max_seq_len=512)
    texts, drafted = results(model, tokenizer, draft_model=model, draft_cache=draft_cache, num_draft_tokens=3)
    assert texts == expected
    assert all(last["new_tokens"] == 40 for last in drafted)
    assert all(last["accepted_draft_tokens"] > 25 > 5 > last["rejected_draft_tokens"] for last in drafted)
    texts, drafted = results(model, tokenizer, use_ngram_draft=True)
    assert texts == expected
    assert sum(last.get("rejected_draft_tokens", 0) for last in drafted) > 0


@pytest.mark.parametrize("drafts", ["draft_model", "use_ngram_draft"])
def test_nothing_is_drafted_with_a_count_of_none(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, drafts: str) -> None:
    given = {"draft_model": model, "draft_cache": ExLlamaV2Cache(model, max_seq_len=512), "use_ngram_draft": True}
    texts, last = results(model, tokenizer, num_draft_tokens=0, **{drafts: given[drafts]})
    assert texts == results(model, tokenizer)[0]
    assert not any("accepted_draft_tokens" in each for each in last)


def test_one_kind_of_drafts_at_a_time(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        results(model, tokenizer, draft_model=model, use_ngram_draft=True)
