"""The streaming generator, called in the patterns of the public scripts for exllamav2."""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exl2chat.engine import decoders
from exl2chat.engine.generators import dynamic
from exl2chat.errors import ChatError, ContextError, UsageError
from exl2chat.exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Lora, ExLlamaV2Tokenizer
from exl2chat.exllamav2.generator import (
    ExLlamaV2PostSamplingResult,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
)
from exl2chat.exllamav2.generator.filters import ExLlamaV2PrefixFilter
from tests.engine.speculative import Always
from tests.model.lora_files import make_lora

Settings = ExLlamaV2Sampler.Settings
GREEDY = Settings.greedy()
PROMPT = "Once upon a time there was a"
PAIR = ["The people of the town", "We hold these truths to be self-evident, that all"]
Make = Callable[..., ExLlamaV2StreamingGenerator]


@pytest.fixture
def make(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> Make:
    """A generator over a cache of its own, which nothing but the script ends."""

    def call(size: int = 256, batch_size: int = 1, **options: Any) -> ExLlamaV2StreamingGenerator:
        cache = ExLlamaV2Cache(model, max_seq_len=size, batch_size=batch_size)
        generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer, **options)
        generator.set_stop_conditions([])
        return generator

    return call


def read(generator: ExLlamaV2StreamingGenerator, count: int) -> str:
    """What the reply says, until it has `count` tokens or ends."""
    text, tokens = "", 0
    while tokens < count:
        result = generator.stream_ex()
        text += result["chunk"]
        tokens += result["chunk_token_ids"].shape[1]
        if result["eos"]:
            break
    return text


def reply(generator: ExLlamaV2StreamingGenerator, prompt: str = PROMPT, count: int = 12, **options: Any) -> str:
    """A reply of `count` tokens to a prompt."""
    generator.begin_stream_ex(generator.tokenizer.encode(prompt), options.pop("settings", GREEDY), **options)
    return read(generator, count)


# Loops


def test_the_older_loop_runs_until_its_own_limit(make: Make, tokenizer: ExLlamaV2Tokenizer) -> None:
    generator = make()
    settings = Settings()
    settings.temperature, settings.top_k, settings.top_p, settings.top_a = 0.85, 50, 0.8, 0.0
    settings.token_repetition_penalty = 1.05
    settings.disallow_tokens(tokenizer, [tokenizer.eos_token_id])
    generator.warmup()
    texts = []
    for _ in range(2):
        random.seed(4)
        generator.begin_stream(tokenizer.encode(PROMPT, add_bos=True), settings)
        texts.append("".join(generator.stream()[0] for _ in range(20)))
    assert texts[0] == texts[1] != ""


def test_a_chat_grows_by_what_was_said_and_begins_anew_when_it_is_full(
    make: Make, tokenizer: ExLlamaV2Tokenizer
) -> None:
    generator, turns, shortened = make(64), [], 0
    generator.set_stop_conditions([tokenizer.eos_token_id, tokenizer.single_id("<|endoftext|>") or 1])
    assert tokenizer.eos_token_id in generator.stop_tokens
    for number in range(5):
        turns.append(tokenizer.encode(f"{PAIR[number % 2]} {number}"))
        while sum(turn.shape[1] for turn in turns) > 64 - 12:
            turns, shortened = turns[2:], shortened + 1
        generator.begin_stream_ex(torch.cat(turns, 1), GREEDY)
        said = torch.empty((1, 0), dtype=torch.long)
        for _ in range(8):
            result = generator.stream_ex()
            said = torch.cat([said, result["chunk_token_ids"]], 1)
            if result["eos"] or generator.full():
                break
        turns.append(said)
        fresh = make(64)
        fresh.begin_stream_ex(torch.cat(turns[:-1], 1), GREEDY)
        while fresh.sequence_ids.shape[1] < generator.sequence_ids.shape[1]:
            fresh.stream_ex()
        assert torch.equal(fresh.sequence_ids, generator.sequence_ids)
    assert shortened > 0


def test_a_prompt_in_the_middle_of_a_word_is_healed(make: Make) -> None:
    generator = make()
    healed = reply(generator, "The people of the to", token_healing=True)
    whole = generator.tokenizer.decode(generator.sequence_ids[0])
    assert whole == "The people of the to" + healed
    assert torch.equal(generator.sequence_ids[:, :3], generator.tokenizer.encode("The people of the")[:, :3])


def test_strings_are_banned_while_tokens_are_too(make: Make, tokenizer: ExLlamaV2Tokenizer) -> None:
    generator = make()
    plain = reply(generator)
    banned = plain.split()[1]
    generator.begin_stream_ex(
        tokenizer.encode(PROMPT, encode_special_tokens=True), GREEDY, decode_special_tokens=True,
        banned_strings=[banned],
    )  # fmt: skip
    text, suppressed, count = "", "", 0
    while count < 12:
        result = generator.stream_ex(ban_tokens=[tokenizer.eos_token_id] if count < 8 else None)
        count += result["chunk_token_ids"].shape[1]
        text, suppressed = text + result["chunk"], suppressed + result.get("suppressed", "")
    assert banned.lower() in suppressed.lower()
    assert banned.lower() not in text.lower()


# Drafts


def test_n_grams_change_no_reply_and_are_counted(make: Make) -> None:
    text = " ".join([PROMPT] * 4)
    generator, plain = make(), reply(make(), text, 40)
    generator.speculative_ngram = True
    generator.speculative_ngram_min = 2
    assert reply(generator, text, 40) == plain
    shares = generator.get_sd_stats()
    efficiency, accuracy, tokens, drafted, accepted = shares
    assert tokens >= 40
    assert (efficiency, accuracy) == (accepted / tokens, accepted / max(drafted, 1))
    assert drafted >= accepted
    reply(generator, text, 40)
    assert generator.get_sd_stats()[2] >= 2 * tokens - 1
    generator.reset_sd_stats()
    assert generator.get_sd_stats() == (0.0, 0.0, 0, 0, 0)


def test_a_text_that_was_preloaded_gives_drafts(make: Make, tokenizer: ExLlamaV2Tokenizer) -> None:
    said = reply(make(), count=30)
    accepted = []
    for preload in (False, True):
        generator = make()
        generator.speculative_ngram = True
        if preload:
            generator.ngram_preload(tokenizer.encode(PROMPT + said))
        assert reply(generator, count=30) == said
        accepted.append(generator.get_sd_stats()[4])
    assert accepted[1] > accepted[0]


def test_a_draft_model_needs_no_cache_of_the_script(make: Make, model: ExLlamaV2) -> None:
    generator = make(draft_model=model, num_speculative_tokens=3)
    assert reply(generator, count=30) == reply(make(), count=30)
    assert generator.get_sd_stats()[4] > 0


def test_a_draft_model_is_not_asked_for_no_drafts(make: Make, model: ExLlamaV2) -> None:
    generator = make(draft_model=model, num_speculative_tokens=0)
    assert reply(generator, count=30) == reply(make(), count=30)
    assert generator.get_sd_stats()[3:] == (0, 0)


def test_a_prompt_that_is_refused_counts_nothing(make: Make, model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "Pace", Always)
    generator = make(64, draft_model=model)
    reply(generator, count=20)
    before = generator.get_sd_stats()
    assert before[4] > 0
    for _ in range(2):
        with pytest.raises(ContextError):
            reply(generator, PROMPT * 20)
        assert generator.get_sd_stats() == before
    reply(generator, count=20)
    assert generator.get_sd_stats()[2:] == tuple(2 * number for number in before[2:])


# Forms, LoRAs


class Record:
    """A filter as other packages write theirs, without a base class: {"n": digits}, then the end."""

    def __init__(self, tokenizer: ExLlamaV2Tokenizer) -> None:
        self.pieces, self.end = tokenizer.get_id_to_piece_list(), tokenizer.eos_token_id
        self.special = set(tokenizer.extended_id_to_piece)
        self.text = ""

    def clone(self) -> "Record":
        return self

    def begin(self, prefix_str: str) -> None:
        self.text = prefix_str

    def feed(self, token: torch.Tensor) -> None:
        self.text += self.pieces[int(token[0][0])]

    def fits(self, text: str) -> bool:
        head = '{"n": '
        if len(text) <= len(head):
            return head.startswith(text)
        digits = text.removeprefix(head).removesuffix("}")
        return text.startswith(head) and digits.isdecimal() and len(digits) <= 3

    def next(self) -> tuple[list[int], list[int]]:
        if self.text.endswith("}"):
            return [self.end], []
        allowed = [
            token
            for token, piece in enumerate(self.pieces)
            if piece and token not in self.special and self.fits(self.text + piece)
        ]
        return sorted(allowed), []


def test_a_reply_has_the_form_that_filters_ask_for(make: Make, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
    generator = make()
    generator.set_stop_conditions([tokenizer.eos_token_id])
    rules = [Record(tokenizer), ExLlamaV2PrefixFilter(model, tokenizer, "{")]
    assert reply(generator, count=40, filters=rules, filter_prefer_eos=True)[:6] == '{"n": '
    settings = GREEDY.clone()
    settings.filters = rules  # as older scripts do
    text = reply(generator, count=40, settings=settings)
    assert text.endswith("}")
    assert Record(tokenizer).fits(text)


def test_a_lora_is_named_where_a_stream_begins(make: Make, model: ExLlamaV2, tmp_path: Path) -> None:
    shapes = {"model.layers.0.mlp.down_proj": (256, 512)}
    make_lora(tmp_path, shapes, size=0.5)
    lora = ExLlamaV2Lora.from_directory(model, str(tmp_path))
    generator = make()
    plain = reply(generator)
    assert reply(generator, loras=lora) != plain
    generator.begin_stream(generator.tokenizer.encode(PROMPT), GREEDY, loras=None)
    assert read(generator, 12) == plain


# Guidance and hooks


def guided(generator: ExLlamaV2StreamingGenerator, scale: float, **options: Any) -> str:
    ids, offsets = generator.tokenizer.encode(PAIR, encode_special_tokens=True, return_offsets=True)
    mask = generator.tokenizer.padding_mask(ids)
    settings = Settings.greedy(cfg_scale=scale)
    generator.begin_stream(ids, settings, input_mask=mask, position_offsets=offsets, **options)
    return read(generator, 15)


def test_two_prompts_guide_one_reply(make: Make) -> None:
    generator = make(batch_size=2)
    ends = {scale: reply(make(), PAIR[1 - scale], 15) for scale in (0, 1)}
    assert [guided(generator, 0.0), guided(generator, 1.0)] == [ends[0], ends[1]]
    assert len({guided(generator, scale) for scale in (-1.0, 0.5, 3.0)} - set(ends.values())) > 0
    assert reply(generator, PAIR[0], 15) == ends[1]  # without guidance, over the same cache
    assert generator.get_sd_stats()[3] == 0


def test_guidance_has_room_for_both_prompts_or_says_so(make: Make) -> None:
    with pytest.raises(UsageError, match="batch_size=2"):
        guided(make(), 0.5)
    small = make(26, batch_size=2)
    text = guided(small, 0.5)
    assert (small.stream_ex()["stop_reason"], text != "") == ("context", True)
    with pytest.raises(UsageError, match="ban_tokens"):
        small.stream_ex(ban_tokens=[3])
    assert reply(small, count=99) != ""
    assert small.full()  # one row, not two
    for begin in (lambda tiny: guided(tiny, 0.5), reply):
        with pytest.raises(ContextError, match="no room"):
            begin(make(5, batch_size=2))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many jobs there are in each step of a guided reply. Steps without one would have no end."""
    counted: list[int] = []
    usual = dynamic.DynamicGenerator.iterate

    def iterate(self: dynamic.DynamicGenerator) -> list[Any]:
        counted.append(self.remaining)
        assert counted[-1]
        return usual(self)

    monkeypatch.setattr(dynamic.DynamicGenerator, "iterate", iterate)
    return counted


@pytest.mark.usefixtures("steps")
def test_a_guided_reply_that_failed_is_over(make: Make) -> None:
    def fail(_: ExLlamaV2PostSamplingResult) -> None:
        raise ValueError("of the hook")

    generator = make(batch_size=2)
    expected = guided(generator, 0.5)
    settings = Settings.greedy(cfg_scale=0.5, post_sampling_hooks=[fail])
    generator.begin_stream_ex(generator.tokenizer.encode(PAIR), settings)
    with pytest.raises(ValueError, match="of the hook"):
        generator.stream_ex()
    with pytest.raises(ChatError, match="no reply was begun"):
        generator.stream_ex()
    assert guided(generator, 0.5) == expected


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("used", [False, True])
def test_no_reply_is_there_where_a_guided_one_could_not_begin(make: Make, used: bool) -> None:
    generator = make(batch_size=2)
    expected = guided(make(batch_size=2), 0.5)
    ids = generator.tokenizer.encode(PAIR)
    if used:
        guided(generator, 0.5)  # which could go on
    mask = torch.tensor([[True], [False]]).expand(ids.shape)
    with pytest.raises(UsageError, match="no tokens"):
        generator.begin_stream_ex(ids, Settings.greedy(cfg_scale=0.5), input_mask=mask)
    with pytest.raises(ChatError, match="no reply was begun"):
        generator.stream_ex()
    assert guided(generator, 0.5) == expected


def test_a_guided_reply_stops_while_its_prompts_are_read(
    make: Make, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Event(threading.Event):
        def is_set(self) -> bool:
            return len(steps) == 2

    monkeypatch.setattr(dynamic, "prefill_chunk", lambda _: 4)
    generator = make(batch_size=2)
    settings = Settings.greedy(cfg_scale=0.5)
    generator.begin_stream_ex(generator.tokenizer.encode(PAIR), settings, abort_event=Event())
    for _ in range(2):
        result = generator.stream_ex()
        assert (result["chunk"], result["stop_reason"], result["reply_tokens"]) == ("", "stopped", 0)
    assert len(steps) == 2


def test_a_hook_sees_every_draw_and_may_change_it(make: Make, tokenizer: ExLlamaV2Tokenizer) -> None:
    seen: list[tuple[int, int]] = []

    def force(result: ExLlamaV2PostSamplingResult) -> None:
        seen.append((result.sampled_token.item(), result.candidate_tokens.shape[-1]))
        result.sampled_token[0, 0] = 50

    generator = make()
    plain = reply(generator)
    settings = Settings(top_k=4, temperature=0.9, post_sampling_hooks=[force])
    generator.begin_stream_ex(tokenizer.encode(PROMPT), settings, return_probabilities=True, return_top_tokens=2)
    results = [generator.stream_ex() for _ in range(5)]
    ids = torch.cat([result["chunk_token_ids"] for result in results], 1)
    assert set(ids.flatten().tolist()) == {50}
    assert torch.equal(generator.sequence_ids[:, -ids.shape[1] :], ids)
    assert len(seen) == 5
    assert all(1 <= count <= 4 for _, count in seen)
    assert results[-1]["top_tokens"].shape == (1, results[-1]["chunk_token_ids"].shape[1], 2)
    assert generator.stream_ex(ban_tokens=[seen[0][0]])["chunk_token_ids"].tolist() in ([[50]], [[]])
    assert reply(generator) == plain
