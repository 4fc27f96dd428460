"""`ExLlamaV2Sampler`: every field of its settings means what it says, and its faults are not ours."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exl2chat.engine.sampler import Sampler, active_steps
from exl2chat.errors import UsageError
from exl2chat.exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl2chat.exllamav2.generator import ExLlamaV2Sampler, ExLlamaV2StreamingGenerator
from exl2chat.settings import Sampling

MODEL = Path(__file__).parents[1] / "data" / "golden" / "llama-6.0bpw-exl2"
Settings = ExLlamaV2Sampler.Settings
OFF = {"temperature": 1.0, "top_p": 0.0, "top_k": 0, "token_repetition_penalty": 1.0}


# Settings


def test_defaults_are_the_references() -> None:
    assert Settings().sampling(seed=1) == Sampling(
        temperature=0.8, top_k=50, top_p=0.8, min_p=0.0, repetition_penalty=1.025, seed=1
    )


def test_zero_switches_truncation_off_and_a_low_temperature_is_greedy() -> None:
    settings = Settings(top_p=0, top_k=0, temperature=0.005, token_repetition_penalty=1.0, tfs=1, typical=1)
    assert settings.sampling(seed=1) == Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=1)


def test_greedy_settings_are_greedy() -> None:
    assert Settings.greedy().sampling(seed=1).temperature == 0
    assert Settings(top_k=1).sampling(seed=1).temperature == 0
    assert Settings.greedy(min_p=0.2).min_p == 0.2


def test_penalties_keep_their_meaning() -> None:
    settings = Settings(
        token_repetition_penalty=1.2, token_frequency_penalty=0.3, token_presence_penalty=0.4,
        token_repetition_range=64, token_repetition_decay=32,
    )  # fmt: skip
    result = settings.sampling(seed=1)
    assert (result.repetition_penalty, result.frequency_penalty, result.presence_penalty) == (1.2, 0.3, 0.4)
    assert (result.penalty_range, result.penalty_decay) == (64, 32)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"smoothing_factor": 0.3}, {"smoothing_factor": 0.3}),
        ({"min_temp": 0.5, "max_temp": 2, "temp_exponent": 0.7},
         {"min_temperature": 0.5, "max_temperature": 2, "temperature_exponent": 0.7}),
        ({"min_temp": 2, "max_temp": 2}, {"min_temperature": 2, "max_temperature": 0}),
        ({"top_a": 0.2}, {"top_a": 0.2}),
        ({"min_p": 0.1}, {"min_p": 0.1}),
        ({"tfs": 0.9}, {"tfs": 0.9}),
        ({"typical": 0.9}, {"typical_p": 0.9}),
        ({"skew": -0.5}, {"skew": -0.5}),
        ({"temperature_last": True}, {"temperature_last": True}),
        ({"mirostat": True, "mirostat_eta": 0.2}, {"mirostat_tau": 1.5, "mirostat_eta": 0.2}),
        ({"mirostat": True, "mirostat_mu": [2.5]}, {"mirostat_tau": 1.5, "mirostat_mu": 2.5}),
        ({"mirostat": True, "mirostat_mu": 0}, {"mirostat_tau": 1.5, "mirostat_mu": None}),
        ({"mirostat_tau": 3}, {"mirostat_tau": 0}),
        ({"dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3, "dry_range": 9, "dry_max_ngram": 7},
         {"dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3, "dry_range": 9, "dry_max_length": 7}),
        ({"dry_sequence_breakers": {7, 3}}, {"dry_breakers": (3, 7)}),
        ({"xtc_probability": 0.5, "xtc_threshold": 0.2, "xtc_ignore_tokens": frozenset({9, 1})},
         {"xtc_probability": 0.5, "xtc_threshold": 0.2, "xtc_ignore_tokens": (1, 9)}),
        ({"token_bias": torch.tensor([0, 1.5, -torch.inf, 0, -2, -1e9])},
         {"logit_bias": ((1, 1.5), (4, -2.0)), "banned_tokens": (2, 5)}),
        ({"token_bias": torch.tensor([-torch.inf, 1.5, -torch.inf, 0])},
         {"logit_bias": ((1, 1.5),), "allowed_tokens": (1, 3)}),
    ],
)  # fmt: skip
def test_every_field_has_its_place_in_our_settings(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert Settings(**OFF, **fields).sampling(seed=1) == Sampling(temperature=1.0, top_p=1.0, seed=1, **expected)


def test_smoothing_does_not_leak_from_one_use_of_the_settings_to_the_next(tokenizer: ExLlamaV2Tokenizer) -> None:
    """Unlike exllamav2, where the temperature in use is divided by the factor once more for every row of a batch."""
    logits = torch.linspace(-2, 2, tokenizer.get_vocab_size())[None, None].repeat(3, 1, 1)
    settings = Settings(**OFF, smoothing_factor=0.3)
    ids = torch.ones(3, 2, dtype=torch.int64)
    _, _, top, _, _ = ExLlamaV2Sampler.sample(logits, settings, ids, 0.5, tokenizer, return_top_tokens=5)
    assert torch.equal(top[0], top[1])
    assert torch.equal(top[0], top[2])


def test_a_stream_with_everything_set_repeats_for_a_seed() -> None:
    config = ExLlamaV2Config(str(MODEL))
    model = ExLlamaV2(config)
    model.load()
    tokenizer = ExLlamaV2Tokenizer(config)
    settings = Settings(
        temperature=1.2, top_k=200, top_p=0.99, top_a=0.001, min_p=0.001, tfs=0.99, typical=0.99, mirostat=True,
        mirostat_tau=6, smoothing_factor=0.05, max_temp=2, skew=0.1, xtc_probability=0.5, dry_multiplier=0.8,
        token_frequency_penalty=0.1,
    )  # fmt: skip
    settings.disallow_tokens(tokenizer, [tokenizer.eos_token_id])
    replies = []
    for seed in (1, 1, 2):
        random.seed(seed)
        generator = ExLlamaV2StreamingGenerator(model, ExLlamaV2Cache(model, max_seq_len=256), tokenizer)
        generator.begin_stream_ex(tokenizer.encode("Once upon a time"), settings)
        replies.append([generator.stream_ex()["chunk"] for _ in range(20)])
    assert replies[0] == replies[1] != replies[2]


# Copies


def test_a_clone_shares_nothing_that_can_be_changed() -> None:
    """Unlike exllamav2, where clones share the bias and what DRY remembers."""
    settings = Settings.greedy(min_p=0.1, token_bias=torch.zeros(4), dry_sequence_breakers={1})
    clone = settings.clone()
    clone.top_k = 7
    clone.token_bias[2] = -1
    clone.dry_sequence_breakers.add(2)
    clone.post_sampling_hooks.append(print)
    assert (settings.top_k, clone.top_k, clone.min_p) == (1, 7, 0.1)
    assert (settings.token_bias.count_nonzero(), settings.dry_sequence_breakers) == (0, {1})
    assert settings.post_sampling_hooks == []


def test_a_greedy_clone_keeps_dry_and_penalties_as_they_are() -> None:
    """Unlike exllamav2, where the base of DRY becomes its allowed length."""
    settings = Settings(dry_multiplier=0.8, dry_base=1.5, dry_allowed_length=3, token_presence_penalty=0.25)
    result = settings.greedy_clone().sampling(seed=1)
    assert (result.temperature, result.presence_penalty) == (0, 0.25)
    assert (result.dry_multiplier, result.dry_base, result.dry_allowed_length) == (0.8, 1.5, 3)
    assert (settings.temperature, settings.top_k) == (0.8, 50)


def test_settings_that_were_used_are_as_they_were() -> None:
    """Unlike exllamav2, where DRY keeps its history in the settings for the next conversation."""
    settings = Settings(**OFF, dry_multiplier=5.0, mirostat=True)
    ours = settings.sampling(seed=1)
    sampler = Sampler(ours, [1, 2, 3, 1, 2])
    for position in range(5):
        sampler.observe(sampler.sample(np.zeros(8, np.float32), position))
    assert settings == Settings(**OFF, dry_multiplier=5.0, mirostat=True)
    assert settings.sampling(seed=1) == ours


# Tokens that are allowed or not


def test_disallowed_tokens_are_never_drawn(tokenizer: ExLlamaV2Tokenizer) -> None:
    settings = Settings.greedy()
    settings.disallow_tokens(tokenizer, [5, 9])
    assert settings.sampling(seed=1).banned_tokens == (5, 9)


def test_only_allowed_tokens_are_drawn(tokenizer: ExLlamaV2Tokenizer) -> None:
    settings = Settings.greedy()
    settings.allow_tokens(tokenizer, [9, "</s>", 5])
    assert settings.sampling(seed=1).allowed_tokens == (tokenizer.single_id("</s>"), 5, 9)
    settings.allow_tokens(tokenizer, [5, 6])
    settings.disallow_tokens(tokenizer, [6])
    assert settings.sampling(seed=1).allowed_tokens == (5,)


@pytest.mark.parametrize("token", ["no such token", -1, 10**6, None, 1.5])
def test_what_is_no_token_cannot_be_allowed(token: Any, tokenizer: ExLlamaV2Tokenizer) -> None:
    with pytest.raises(ValueError, match="is no token"):
        Settings().allow_tokens(tokenizer, [token])


# Errors


@pytest.mark.parametrize(
    ("name", "value"), [("cfg_scale", 1.5), ("post_sampling_hooks", [print]), ("ngram_trie", object())]
)
def test_a_sampling_field_that_is_not_supported_yet_is_named(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{name} is not supported yet"):
        Settings(**{name: value}).sampling(seed=0)


def test_a_misspelt_field_is_an_error() -> None:
    with pytest.raises(AttributeError):
        Settings().temprature = 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": -3}, "top_k is a whole number from 0 to 1000000000000, not -3"),
        ({"typical": 1.5}, "typical_p is a number from 0 to 1, not 1.5"),
        ({"dry_base": 0.5}, "dry_base is a number from 1 to 10, not 0.5"),
        ({"dry_max_ngram": 0}, "dry_max_length is a whole number of at least 1, not 0"),
        ({"token_bias": torch.tensor([torch.nan])}, "logit_bias holds ids of at least 0"),
        ({"token_bias": torch.tensor([0, 101.0])}, "a number from -100.0 to 100.0, not 1: 101.0"),
    ],
)
def test_a_value_out_of_range_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Settings(**fields).sampling(seed=0)


# Single draws


def draw(tokenizer: ExLlamaV2Tokenizer, logits: torch.Tensor, settings: Any, **options: Any) -> tuple[Any, ...]:
    ids = torch.ones(len(logits), 3, dtype=torch.int64)
    return ExLlamaV2Sampler.sample(logits, settings, ids, options.pop("random", 0.3), tokenizer, **options)


def test_a_draw_reports_the_token_its_probability_and_the_likeliest(tokenizer: ExLlamaV2Tokenizer) -> None:
    logits = torch.full((2, 1, tokenizer.get_vocab_size() + 32), -90.0)
    logits[0, 0, [4, 7, 9]] = torch.tensor([0.5, 0.3, 0.2]).log()
    logits[1, 0, 11] = 0.0
    logits[:, :, tokenizer.get_vocab_size() :] = 90.0
    before = logits.clone()
    token, top, top_probabilities, probability, end = draw(
        tokenizer, logits, Settings(**OFF, min_p=0.5), return_top_tokens=3
    )
    assert token[0, 0] in (4, 7)
    assert token[1, 0] == 11
    torch.testing.assert_close(top_probabilities, torch.tensor([[[0.625, 0.375, 0.0]], [[1.0, 0.0, 0.0]]]))
    assert top.tolist() == [[[4, 7, -1]], [[11, -1, -1]]]
    assert probability[0, 0] == top_probabilities[0, 0, [4, 7].index(int(token[0, 0]))]
    assert (probability.shape, end) == ((2, 1), False)
    assert torch.equal(logits, before)


def test_draws_follow_the_random_number(tokenizer: ExLlamaV2Tokenizer) -> None:
    logits = torch.full((1, 1, tokenizer.get_vocab_size()), -90.0)
    logits[0, 0, [4, 7]] = torch.tensor([0.75, 0.25]).log()
    drawn = [draw(tokenizer, logits, Settings(**OFF), random=i / 2000)[0].item() for i in range(2000)]
    assert set(drawn) == {4, 7}
    assert abs(drawn.count(4) - 1500) < 4 * (2000 * 0.75 * 0.25) ** 0.5
    assert draw(tokenizer, logits, Settings(**OFF))[1:3] == (None, None)


def test_blocked_tokens_are_not_drawn(tokenizer: ExLlamaV2Tokenizer) -> None:
    """Unlike exllamav2, where the caller's logits are changed in place."""
    logits = torch.zeros(1, 1, tokenizer.get_vocab_size())
    logits[0, 0, [4, 7]] = torch.tensor([9.0, 8.0])
    before = logits.clone()
    assert draw(tokenizer, logits, Settings.greedy(), blocked_tokens=[4])[0].item() == 7
    assert torch.equal(logits, before)


def test_rows_that_are_alike_are_drawn_apart(tokenizer: ExLlamaV2Tokenizer) -> None:
    tokens = draw(tokenizer, torch.zeros(4, 1, tokenizer.get_vocab_size()), Settings(**OFF))[0]
    assert len(set(tokens.flatten().tolist())) == 4


@pytest.mark.parametrize("name", ["prefix_token", "filters", "filter_prefer_eos"])
def test_a_draw_names_what_it_cannot_do(name: str, tokenizer: ExLlamaV2Tokenizer) -> None:
    with pytest.raises(UsageError, match=f"{name} is not supported yet"):
        draw(tokenizer, torch.zeros(1, 1, 300), Settings(), **{name: [object()]})


def test_the_default_tokens_of_dry_and_xtc_are_those_of_the_vocabulary(tokenizer: ExLlamaV2Tokenizer) -> None:
    full_stop, line_feed = (tokenizer.encode(text)[0, -1].item() for text in (".", "\n"))
    breakers = ExLlamaV2Sampler.get_dry_default_sequence_breaker_tokens(tokenizer)
    assert {full_stop, line_feed, *tokenizer.native.special_ids} <= breakers
    kept = ExLlamaV2Sampler.get_default_xtc_mask_tokens(tokenizer)
    assert {line_feed, *tokenizer.native.special_ids} <= kept
    assert full_stop not in kept


def test_every_step_of_the_reference_can_be_asked_for() -> None:
    everything = Settings(
        smoothing_factor=0.3, top_a=0.1, min_p=0.1, tfs=0.9, typical=0.9, mirostat=True, max_temp=2, skew=0.1,
        xtc_probability=0.5,
    )  # fmt: skip
    assert [step.name for step in active_steps(everything.sampling(seed=0))] == [
        "smoothing", "top_k", "top_p", "top_a", "min_p", "tfs", "typical_p", "mirostat", "dynamic_temperature", "xtc",
        "skew",
    ]  # fmt: skip
