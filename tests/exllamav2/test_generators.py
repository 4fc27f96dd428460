"""The base and dynamic generators as scripts use them: results, parameters, and what is refused."""

import random
import warnings
from threading import Event
from typing import Any

import pytest
import torch

from exl2chat.errors import ContextError, UsageError
from exl2chat.exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Tokenizer
from exl2chat.exllamav2.generator import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicJob,
    ExLlamaV2PostSamplingHook,
    ExLlamaV2PostSamplingResult,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
)
from exl2chat.exllamav2.generator.filters import ExLlamaV2PrefixFilter, ExLlamaV2SelectFilter

Settings = ExLlamaV2Sampler.Settings
GREEDY = Settings.greedy()
PROMPTS = ["Once upon a time", "The people of the town", "We hold these truths to be self-evident, that all"]


@pytest.fixture
def dynamic(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> ExLlamaV2DynamicGenerator:
    return ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=1024, lazy=True), tokenizer)


@pytest.fixture
def base(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> ExLlamaV2BaseGenerator:
    return ExLlamaV2BaseGenerator(model, ExLlamaV2Cache(model, max_seq_len=256), tokenizer)


def streamed(generator: Any, text: str, count: int, settings: Settings = GREEDY, add_bos: bool = False) -> str:
    """What the streaming generator says after `text`."""
    model, tokenizer = generator.model, generator.tokenizer
    stream = ExLlamaV2StreamingGenerator(model, ExLlamaV2Cache(model, max_seq_len=512), tokenizer)
    stream.set_stop_conditions([])
    stream.begin_stream_ex(tokenizer.encode(text, add_bos=add_bos), settings)
    for _ in range(count):
        stream.stream_ex()
    tokens = stream.sequence_ids[0]
    return str(tokenizer.decode(tokens))[len(text) :]


def drain(generator: ExLlamaV2DynamicGenerator) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    while generator.num_remaining_jobs():
        results += generator.iterate()
    return results


def job(generator: Any, text: str, count: int, **more: Any) -> ExLlamaV2DynamicJob:
    return ExLlamaV2DynamicJob(generator.tokenizer.encode(text), count, **{"gen_settings": GREEDY, **more})


# generate


def test_generate_continues_a_prompt_or_a_list(dynamic: ExLlamaV2DynamicGenerator) -> None:
    dynamic.warmup()
    expected = [streamed(dynamic, text, 15) for text in PROMPTS]
    full = [text + reply for text, reply in zip(PROMPTS, expected, strict=True)]
    assert dynamic.generate(PROMPTS[0], 15, gen_settings=GREEDY) == full[0]
    assert dynamic.generate(PROMPTS, 15, gen_settings=GREEDY) == full
    assert dynamic.generate(PROMPTS, 15, gen_settings=[GREEDY] * 3, completion_only=True) == expected
    text, last = dynamic.generate(PROMPTS[0], 15, gen_settings=GREEDY, return_last_results=True)
    assert (text, last["full_completion"], last["new_tokens"]) == (full[0], expected[0], 15)


def test_seeds_grow_by_one_per_prompt(dynamic: ExLlamaV2DynamicGenerator) -> None:
    wild = Settings(temperature=1.5, top_k=0, top_p=0.0)
    first = dynamic.generate([PROMPTS[0]] * 2, 12, seed=7, gen_settings=wild)
    assert first[0] != first[1]
    assert first == [dynamic.generate(PROMPTS[0], 12, seed=seed, gen_settings=wild) for seed in (7, 8)]
    random.seed(1)
    unseeded = dynamic.generate(PROMPTS[0], 12, gen_settings=wild)
    random.seed(1)
    assert dynamic.generate(PROMPTS[0], 12, gen_settings=wild) == unseeded


def test_generate_ends_at_stop_conditions_and_at_nothing_else(dynamic: ExLlamaV2DynamicGenerator) -> None:
    expected = streamed(dynamic, PROMPTS[0], 15)
    stop = expected[4:7]
    found = dynamic.generate(PROMPTS[0], 15, gen_settings=GREEDY, stop_conditions=[stop], completion_only=True)
    assert found == expected[: expected.index(stop)]


def test_generate_returns_nothing_once_aborted(dynamic: ExLlamaV2DynamicGenerator) -> None:
    stop = Event()
    stop.set()
    assert dynamic.generate(PROMPTS, 15, abort_event=stop) is None
    assert dynamic.num_remaining_jobs() == 0


def test_a_pair_is_guided(dynamic: ExLlamaV2DynamicGenerator) -> None:
    pair = (PROMPTS[0], PROMPTS[2])
    alone = dynamic.generate(PROMPTS[0], 12, gen_settings=GREEDY)
    assert dynamic.generate(pair, 12, gen_settings=Settings.greedy(cfg_scale=1.0)) == alone
    assert dynamic.generate([pair], 12, gen_settings=Settings.greedy(cfg_scale=4.0)) != [alone]
    with pytest.raises(UsageError, match="guidance"):
        dynamic.generate(pair, 12, gen_settings=GREEDY)


def test_filters_are_for_all_or_one_each(
    dynamic: ExLlamaV2DynamicGenerator, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer
) -> None:
    """One filter for many prompts is cloned: what one reply feeds it, the others do not see."""
    select = ExLlamaV2SelectFilter(model, tokenizer, [" red", " green"])
    prefix = ExLlamaV2PrefixFilter(model, tokenizer, "=> ")
    for filters in ([select], [[select], [select], [select]]):
        replies = dynamic.generate(PROMPTS, 12, gen_settings=GREEDY, filters=filters, completion_only=True)
        assert set(replies) <= {" red", " green"}
    replies = dynamic.generate(PROMPTS, 12, gen_settings=GREEDY, filters=[[prefix], [], [select]], completion_only=True)
    assert replies[0].startswith("=> ")
    assert replies[1] == streamed(dynamic, PROMPTS[1], 12)
    assert replies[2] in (" red", " green")
    with pytest.raises(UsageError, match="as many"):
        dynamic.generate(PROMPTS, 12, filters=[[select]])


def test_banned_strings_and_healing_reach_the_engine(dynamic: ExLlamaV2DynamicGenerator) -> None:
    expected = streamed(dynamic, PROMPTS[0], 15)
    banned = expected[3:6]
    found = dynamic.generate(PROMPTS[0], 15, gen_settings=GREEDY, banned_strings=[banned], completion_only=True)
    assert banned.lower() not in found.lower()
    healed = dynamic.generate("We hold these truths to be sel", 8, gen_settings=GREEDY, token_healing=True)
    assert healed.startswith("We hold these truths to be sel")


# Results


def test_results_have_the_documented_keys(dynamic: ExLlamaV2DynamicGenerator) -> None:
    wanted = job(
        dynamic, PROMPTS[0], 6, identifier="me", return_probs=True, return_top_tokens=2, return_logits=True,
        gen_settings=Settings(top_k=2, top_p=0.0),
    )  # fmt: skip
    serial = dynamic.enqueue(wanted)
    assert wanted.serial_number == serial
    results = drain(dynamic)
    assert all((r["job"], r["serial"], r["identifier"]) == (wanted, serial, "me") for r in results)
    assert [r["stage"] for r in results] == ["started", "prefill", *["streaming"] * 6]
    length = dynamic.tokenizer.encode(PROMPTS[0]).shape[1]
    assert (results[1]["curr_progress"], results[1]["max_progress"]) == (length - 1, length)
    tokens = torch.cat([r["token_ids"] for r in results[2:]], 1)
    assert tokens.shape == (1, 6)
    for result in results[2:]:
        assert result["top_k_tokens"].shape == result["top_k_probs"].shape == (1, 1, 2)
        assert result["top_k_probs"].sum() == pytest.approx(1, abs=1e-5)
        assert 0 < result["token_probs"].item() < 1
        assert result["logits"].shape[:2] == (1, 1)
    last = results[-1]
    assert [r["eos"] for r in results] == [False] * 7 + [True]
    assert (last["eos_reason"], last["new_tokens"], last["prompt_tokens"]) == ("max_new_tokens", 6, length)
    assert last["full_completion"] == "".join(r.get("text", "") for r in results)
    assert min(last[key] for key in ("time_enqueued", "time_prefill", "time_generate")) >= 0
    assert (last["cached_pages"], last["cached_tokens"]) == (0, 0)


def test_what_ended_a_job_is_told(dynamic: ExLlamaV2DynamicGenerator) -> None:
    dynamic.enqueue(job(dynamic, PROMPTS[0], 15))
    stop = int(drain(dynamic)[10]["token_ids"])
    text = streamed(dynamic, PROMPTS[0], 15)[4:8]
    dynamic.enqueue([job(dynamic, PROMPTS[0], 15, stop_conditions=[condition]) for condition in (stop, text)])
    ends = {r["serial"]: r for r in drain(dynamic) if r["eos"]}
    assert (ends[1]["eos_reason"], ends[1]["eos_triggering_token_id"]) == ("stop_token", stop)
    assert ends[1]["eos_triggering_token_str"] == dynamic.tokenizer.native.token_of(stop)
    assert (ends[2]["eos_reason"], ends[2]["eos_triggering_string"]) == ("stop_string", text)
    assert ends[2]["held"]["text"].startswith(text)
    assert ends[2]["held"]["token_ids"].shape[0] == 1


def test_suppressed_text_is_told(dynamic: ExLlamaV2DynamicGenerator) -> None:
    banned = streamed(dynamic, PROMPTS[0], 15)[3:6]
    dynamic.enqueue(job(dynamic, PROMPTS[0], 15, banned_strings=[banned]))
    told = [r for r in drain(dynamic) if "suppressed_text" in r]
    assert banned.lower() in told[0]["suppressed_text"].lower()
    assert told[0]["suppressed_tokens"].shape[0] == 1


def test_a_job_that_fails_says_so_in_its_own_result(dynamic: ExLlamaV2DynamicGenerator) -> None:
    class Broken(ExLlamaV2PostSamplingHook):
        def __call__(self, result: ExLlamaV2PostSamplingResult) -> None:
            raise ArithmeticError(result.sampled_token)

    dynamic.enqueue([
        job(dynamic, PROMPTS[0], 5, gen_settings=Settings(post_sampling_hooks=[Broken()])),
        job(dynamic, PROMPTS[1], 5),
    ])  # fmt: skip
    ends = {r["serial"]: r for r in drain(dynamic) if r["eos"]}
    assert isinstance(ends[0]["error"], ArithmeticError)
    assert ends[1]["full_completion"] == streamed(dynamic, PROMPTS[1], 5)
    with pytest.raises(ArithmeticError):
        dynamic.generate(PROMPTS[0], 5, gen_settings=Settings(post_sampling_hooks=[Broken()]))


def test_hooks_see_the_draw_and_change_it(dynamic: ExLlamaV2DynamicGenerator, base: ExLlamaV2BaseGenerator) -> None:
    """exllamav2's dynamic generator ignores them (appendix B-15)."""
    seen: list[ExLlamaV2PostSamplingResult] = []

    def hook(result: ExLlamaV2PostSamplingResult) -> None:
        seen.append(result)
        result.sampled_token = torch.tensor([[65]])

    settings = Settings(top_k=3, top_p=0.0, post_sampling_hooks=[hook])
    expected = dynamic.tokenizer.decode(torch.tensor([65] * 3))
    assert dynamic.generate(PROMPTS[0], 3, gen_settings=settings, completion_only=True) == expected
    assert base.generate_simple(PROMPTS[0], settings, 3, completion_only=True) == expected
    assert seen[0].candidate_tokens.shape == seen[0].candidate_probs.shape == (1, 1, 3)
    assert seen[0].candidate_probs.sum() == pytest.approx(1, abs=1e-5)
    assert seen[0].sampled_prob.shape == (1, 1)


def test_jobs_can_be_cancelled(dynamic: ExLlamaV2DynamicGenerator) -> None:
    jobs = [job(dynamic, text, 10) for text in PROMPTS]
    assert dynamic.enqueue(jobs) == [0, 1, 2]
    dynamic.iterate()
    dynamic.cancel(jobs[1])
    dynamic.cancel(jobs[1])
    stranger = job(dynamic, PROMPTS[0], 5)
    stranger.serial_number = 0  # as another generator numbered it
    dynamic.cancel(stranger)
    assert {r["serial"] for r in drain(dynamic) if r["eos"]} == {0, 2}
    dynamic.enqueue(job(dynamic, PROMPTS[0], 5))
    dynamic.clear_queue()
    assert dynamic.num_remaining_jobs() == 0


def test_prompts_are_cached_from_job_to_job_until_the_table_is_reset(dynamic: ExLlamaV2DynamicGenerator) -> None:
    text = " ".join(PROMPTS * 20)
    cached = []
    for reset in (False, False, True):
        if reset:
            dynamic.reset_page_table()
        dynamic.enqueue(job(dynamic, text, 2))
        cached.append(drain(dynamic)[-1]["cached_tokens"])
    assert (cached[0], cached[2]) == (0, 0)
    assert cached[1] == dynamic.tokenizer.encode(text).shape[1] - 1


# The base generator


def test_generate_simple_continues_a_prompt_or_a_list(base: ExLlamaV2BaseGenerator) -> None:
    base.warmup()
    expected = [streamed(base, text, 12) for text in PROMPTS]
    full = [text + reply for text, reply in zip(PROMPTS, expected, strict=True)]
    assert base.generate_simple(PROMPTS[0], GREEDY, 12, stop_token=None) == full[0]
    assert base.generate_simple(PROMPTS, GREEDY, 12, stop_token=None) == full
    assert base.sequence_ids is not None
    assert [base.tokenizer.decode(row) for row in base.sequence_ids] == full
    assert base.generate_simple(PROMPTS, GREEDY, 12, stop_token=None, completion_only=True) == expected
    assert not base.full()


def test_generate_simple_knows_its_parameters(
    base: ExLlamaV2BaseGenerator, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer
) -> None:
    wild = Settings(temperature=1.5, top_k=0, top_p=0.0)
    assert base.generate_simple(PROMPTS[0], wild, 9, seed=5) == base.generate_simple(PROMPTS[0], wild, 9, seed=5)
    with_bos = base.generate_simple(PROMPTS[0], GREEDY, 9, add_bos=True, stop_token=None, completion_only=True)
    assert with_bos == streamed(base, PROMPTS[0], 9, add_bos=True)
    select = ExLlamaV2SelectFilter(model, tokenizer, [" red", " green"])
    replies = base.generate_simple(PROMPTS, GREEDY, 9, filters=[select], filter_prefer_eos=True, completion_only=True)
    assert set(replies) <= {" red", " green"}
    special = base.generate_simple("<|im_start|>", GREEDY, 1, encode_special_tokens=True, decode_special_tokens=True)
    assert special.startswith("<|im_start|>")
    healed = base.generate_simple("We hold these truths to be sel", GREEDY, 8, token_healing=True)
    assert healed.startswith("We hold these truths to be sel")
    stop = Event()
    stop.set()
    assert base.generate_simple(PROMPTS[0], GREEDY, 9, abort_event=stop) == PROMPTS[0]
    assert base.abort_event is stop


def test_generate_simple_stops_at_any_eos_id_or_at_the_token_given(base: ExLlamaV2BaseGenerator) -> None:
    """exllamav2 knows the first EOS id only (appendix B-6)."""
    base.generate_simple(PROMPTS[0], GREEDY, 12, stop_token=None)
    assert base.sequence_ids is not None
    stop = int(base.sequence_ids[0, -7])
    short = base.generate_simple(PROMPTS[0], GREEDY, 12, stop_token=stop, completion_only=True)
    assert len(short) < len(streamed(base, PROMPTS[0], 12))
    eos = base.tokenizer.eos_ids
    base.tokenizer.eos_ids = frozenset({250_000, stop})
    try:
        assert base.generate_simple(PROMPTS[0], GREEDY, 12, completion_only=True) == short
    finally:
        base.tokenizer.eos_ids = eos


def test_a_prompt_that_is_cut_is_said_to_be(base: ExLlamaV2BaseGenerator) -> None:
    """exllamav2 says nothing."""
    text = " ".join(PROMPTS * 20)
    with pytest.warns(UserWarning, match="were left out"):
        base.generate_simple(text, GREEDY, 10, stop_token=None)
    assert base.full()
    assert base.sequence_ids is not None
    assert base.sequence_ids.shape == (1, 256)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        base.generate_simple(PROMPTS[0], GREEDY, 10)


# What is refused

JOB: dict[str, Any] = {"max_skips": 9, "other": 1}
GENERATOR: dict[str, Any] = {"other": 1}


@pytest.mark.parametrize("name", JOB)
def test_a_parameter_of_a_job_that_is_not_supported_yet_is_named(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}.* is not supported yet"):
        ExLlamaV2DynamicJob(torch.tensor([[1]]), 5, **{name: JOB[name]})


@pytest.mark.parametrize("name", GENERATOR)
def test_a_parameter_of_the_generator_that_is_not_supported_yet_is_named(
    name: str, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer
) -> None:
    with pytest.raises(UsageError, match=f"{name}.* is not supported yet"):
        ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model), tokenizer, **{name: GENERATOR[name]})


def test_what_makes_no_sense_is_refused(
    model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, dynamic: ExLlamaV2DynamicGenerator
) -> None:
    with pytest.raises(ValueError):
        ExLlamaV2DynamicJob(torch.tensor([[1]]), 5, stop_conditions=[tokenizer.single_id("<|no such token|>")])
    with pytest.raises(UsageError, match="letters"):
        ExLlamaV2DynamicJob(torch.tensor([[1]]), 5, banned_strings="bad")
    with pytest.raises(UsageError, match="one row"):
        ExLlamaV2DynamicJob(torch.ones(2, 3, dtype=torch.int64), 5)
    small = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=512), tokenizer, max_seq_len=20)
    with pytest.raises(ContextError, match="max_seq_len 20"):
        small.enqueue(job(small, PROMPTS[0], 20))
    dynamic.enqueue(job(dynamic, PROMPTS[0], 5))
    with pytest.raises(UsageError, match="not ended"):
        dynamic.generate(PROMPTS[0], 5)
    assert dynamic.num_remaining_jobs() == 1
