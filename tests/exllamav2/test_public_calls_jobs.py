"""The base and dynamic generators, called in the patterns of the public scripts for exllamav2."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exl2chat.engine import batch_drafting
from exl2chat.exllamav2 import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_Q6,
    ExLlamaV2Cache_Q8,
    ExLlamaV2Config,
    ExLlamaV2Lora,
    ExLlamaV2Tokenizer,
    Timer,
)
from exl2chat.exllamav2.generator import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicGeneratorAsync,
    ExLlamaV2DynamicJob,
    ExLlamaV2DynamicJobAsync,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
)
from exl2chat.exllamav2.generator.filters import ExLlamaV2PrefixFilter
from tests.engine.speculative import Always
from tests.exllamav2.conftest import MODEL
from tests.exllamav2.test_public_calls_streaming import Record, reply
from tests.model.lora_files import make_lora

Settings = ExLlamaV2Sampler.Settings
GREEDY = Settings.greedy()
PROMPTS = [
    "Once upon a time",
    "The people of the town",
    "We hold these truths to be self-evident, that all",
    "So it is",
]
STORY = " ".join(f"{prompt} {number}." for number in range(12) for prompt in PROMPTS)
Make = Callable[..., ExLlamaV2DynamicGenerator]


@pytest.fixture
def make(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> Make:
    def call(size: int = 1024, **options: Any) -> ExLlamaV2DynamicGenerator:
        cache = ExLlamaV2Cache(model, max_seq_len=size, lazy=True)
        return ExLlamaV2DynamicGenerator(model=model, cache=cache, tokenizer=tokenizer, **options)

    return call


# generate


def test_one_prompt_and_several_are_continued_with_default_settings(make: Make) -> None:
    generator = make()
    generator.warmup()
    with Timer() as timer:
        one = generator.generate(prompt=PROMPTS[0], max_new_tokens=10, add_bos=True)
        several = generator.generate(prompt=PROMPTS, max_new_tokens=10, add_bos=True)
    assert timer.interval > 0
    assert [text[: len(prompt)] for text, prompt in zip([one, *several], [PROMPTS[0], *PROMPTS], strict=True)] == [
        PROMPTS[0],
        *PROMPTS,
    ]


def test_many_copies_of_a_prompt_are_more_than_run_at_once(make: Make) -> None:
    generator = make(max_batch_size=3)
    texts = generator.generate(prompt=[PROMPTS[0]] * 7, max_new_tokens=8, gen_settings=GREEDY)
    assert len(texts) == 7
    assert len(set(texts)) == 1


def test_a_long_beginning_that_prompts_share_is_kept_once(make: Make, tokenizer: ExLlamaV2Tokenizer) -> None:
    prompts = [f"{STORY}\n###\n{question}" for question in ("Who?", "Where is it?", "Why?", "When did it end?")]
    length = tokenizer.encode(prompts[0]).shape[1]
    pages = -(-(length + 30) // 256)
    assert pages >= 3
    generator = make((pages + 1) * 256)  # for one prompt, and the end of another
    options: dict[str, Any] = {"max_new_tokens": 8, "gen_settings": GREEDY, "completion_only": True}
    texts, last = generator.generate(prompt=prompts, return_last_results=True, **options)
    assert texts == [make(2048).generate(prompt=prompt, **options) for prompt in prompts]
    assert [result["cached_tokens"] >= 512 for result in last] == [False, True, True, True]


def test_scales_of_guidance_stand_beside_each_other(make: Make) -> None:
    generator, scales = make(4096), [-1.0, 0.0, 0.5, 1.0, 2.0]
    settings = [Settings.greedy(cfg_scale=scale) for scale in scales]
    options: dict[str, Any] = {"max_new_tokens": 10, "completion_only": True, "add_bos": True}
    pairs = [(PROMPTS[1], PROMPTS[2]) for _ in scales]
    texts = dict(zip(scales, generator.generate(prompt=pairs, gen_settings=settings, **options), strict=True))
    plain = generator.generate(prompt=[PROMPTS[2], PROMPTS[1]], gen_settings=GREEDY, **options)
    assert [texts[0.0], texts[1.0]] == plain
    assert len(set(texts.values())) > 2


def test_replies_with_a_form_run_beside_those_without(
    make: Make, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer
) -> None:
    prompts, filters = [], []
    for prompt in PROMPTS[:2]:
        prompts += [prompt, prompt]
        filters += [None, [Record(tokenizer), ExLlamaV2PrefixFilter(model, tokenizer, ["{", " {"])]]
    texts = make().generate(
        prompt=prompts, filters=filters, filter_prefer_eos=True, max_new_tokens=60, add_bos=True,
        stop_conditions=[tokenizer.eos_token_id], completion_only=True, gen_settings=GREEDY,
    )  # fmt: skip
    for text in texts[1::2]:
        assert isinstance(json.loads(text)["n"], int)
    assert not any(text.startswith("{") for text in texts[::2])


class Pinned(Record):
    """A filter as Formatron's: it would mask logits, if there was a GPU."""

    def can_mask_logits(self) -> bool:
        return True

    def prepare_logit_mask(self) -> bool:
        return True

    def mask_logits(self, logits: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"no memory can be pinned for {logits.shape}")


def test_filters_may_stand_in_settings(make: Make, model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
    settings = GREEDY.clone()
    settings.filters = [Pinned(tokenizer)]
    base = ExLlamaV2BaseGenerator(model, ExLlamaV2Cache(model, max_seq_len=256), tokenizer)
    text = make().generate(
        PROMPTS[0], 60, gen_settings=settings, stop_conditions=[tokenizer.eos_token_id], completion_only=True
    )
    assert text == base.generate_simple(PROMPTS[0], settings, 60, completion_only=True)
    assert isinstance(json.loads(text)["n"], int)


def test_a_lora_is_set_between_two_replies(make: Make, model: ExLlamaV2, tmp_path: Path) -> None:
    make_lora(tmp_path, {"model.layers.0.mlp.down_proj": (256, 512)}, size=0.5)
    generator = make()
    texts = []
    for lora in (None, ExLlamaV2Lora.from_directory(model, str(tmp_path)), None):
        generator.set_loras(lora)
        texts.append(generator.generate(PROMPTS[0], 12, gen_settings=GREEDY, stop_conditions=["###"]))
    assert texts[0] == texts[2] != texts[1]


@pytest.mark.parametrize("drafts", ["draft_model", "use_ngram_draft"])
def test_drafts_change_no_reply(drafts: str, make: Make, model: ExLlamaV2, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_drafting, "Pace", Always)
    options: dict[str, Any] = {"use_ngram_draft": True}
    if drafts == "draft_model":
        cache = ExLlamaV2Cache(model, max_seq_len=1024, lazy=True)
        options = {"draft_model": model, "draft_cache": cache, "num_draft_tokens": 4}
    ask: dict[str, Any] = {"max_new_tokens": 40, "encode_special_tokens": True, "gen_settings": GREEDY}
    generator = make(**options)
    generator.warmup()
    text, last = generator.generate(prompt=STORY, return_last_results=True, **ask)
    assert text == make().generate(prompt=STORY, **ask)
    assert last["accepted_draft_tokens"] + last["rejected_draft_tokens"] > 0


@pytest.mark.parametrize("kind", [ExLlamaV2Cache_Q4, ExLlamaV2Cache_Q6, ExLlamaV2Cache_Q8])
def test_a_quantised_cache_takes_the_place_of_another(
    kind: type[ExLlamaV2Cache], model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer
) -> None:
    generator = ExLlamaV2DynamicGenerator(model, kind(model, max_seq_len=1024), tokenizer)
    texts = generator.generate(PROMPTS, 6, gen_settings=GREEDY, completion_only=True)
    stream = ExLlamaV2StreamingGenerator(model, kind(model, max_seq_len=256), tokenizer)
    stream.set_stop_conditions([])
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert reply(stream, prompt, 6) == text


# Jobs


def test_results_are_collected_by_the_identifiers_of_jobs(make: Make, tokenizer: ExLlamaV2Tokenizer) -> None:
    generator = make()
    jobs = [
        ExLlamaV2DynamicJob(
            input_ids=tokenizer.encode(prompt, add_bos=True),
            max_new_tokens=12,
            stop_conditions=[tokenizer.eos_token_id],
            gen_settings=GREEDY,
            identifier=number,
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    generator.enqueue(jobs)
    shown = {job: tokenizer.decode(job.sequences[0].input_ids.torch())[0] for job in jobs}
    assert list(shown.values()) == PROMPTS
    collected, ended, widths = [""] * len(jobs), {}, []
    while generator.num_remaining_jobs():
        results = generator.iterate()
        widths.append(len({result["identifier"] for result in results}))
        for result in results:
            assert result["job"] is jobs[result["identifier"]]
            collected[result["identifier"]] += result.get("text", "")
            if result["eos"]:
                ended[result["identifier"]] = result["full_completion"]
    assert collected == [ended[number] for number in range(len(jobs))]
    assert max(widths) == len(jobs)


def test_a_job_shows_what_it_suppresses_and_is_not_ended_too_soon(make: Make, tokenizer: ExLlamaV2Tokenizer) -> None:
    generator = make()
    word = generator.generate(PROMPTS[0], 12, gen_settings=GREEDY, completion_only=True).split()[0]
    job = ExLlamaV2DynamicJob(
        input_ids=tokenizer.encode(PROMPTS[0], add_bos=False, encode_special_tokens=True), min_new_tokens=10,
        max_new_tokens=20, banned_strings=[word], stop_conditions=[tokenizer.eos_token_id], gen_settings=GREEDY,
    )  # fmt: skip
    generator.enqueue(job)
    text, suppressed, eos = "", "", False
    while not eos:
        for result in generator.iterate():
            if result["stage"] == "streaming":
                eos = result["eos"]
                text, suppressed = text + result.get("text", ""), suppressed + result.get("suppressed_text", "")
    assert word.lower() in suppressed.lower()
    assert word.lower() not in text.lower()
    assert result["new_tokens"] >= 10


async def test_tasks_read_their_jobs_and_one_breaks_off(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
    cache = ExLlamaV2Cache(model, max_seq_len=1024)
    generator = ExLlamaV2DynamicGeneratorAsync(model=model, cache=cache, tokenizer=tokenizer)

    async def run(prompt: str, leaves: bool) -> str:
        ids = tokenizer.encode(prompt, add_bos=False)
        job = ExLlamaV2DynamicJobAsync(
            generator, input_ids=ids, max_new_tokens=25, gen_settings=GREEDY, banned_strings=["horse"]
        )
        text = prompt
        async for result in job:
            text += result.get("text", "")
            if leaves and len(text) > len(prompt) + 15:
                await job.cancel()
                break
        return text

    async with asyncio.timeout(60):
        texts = await asyncio.gather(*(run(prompt, number == 1) for number, prompt in enumerate(PROMPTS)))
    await generator.close()
    alone = ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=1024), tokenizer)
    full = alone.generate(PROMPTS, 25, gen_settings=GREEDY, banned_strings=["horse"])
    assert [texts[0], *texts[2:]] == [full[0], *full[2:]]
    assert full[1].startswith(texts[1])
    assert texts[1] != full[1]


# The base generator


def test_batches_are_continued_in_a_cache_for_so_many(tokenizer: ExLlamaV2Tokenizer) -> None:
    config = ExLlamaV2Config(str(MODEL))
    config.dtype, config.max_output_len, config.max_batch_size = "float32", 1, 3
    model = ExLlamaV2(config)
    cache = ExLlamaV2Cache(model, lazy=True, batch_size=3, max_seq_len=40)
    model.load_autosplit(cache)
    assert cache.footprint()[0] == 3 * ExLlamaV2Cache(model, max_seq_len=40).footprint()[0]
    generator = ExLlamaV2BaseGenerator(model, cache, tokenizer)
    texts = []
    for start in (0, 3):
        batch = sorted(PROMPTS, key=len)[start : start + 3]
        texts += generator.generate_simple(batch, GREEDY, 12, seed=1234, add_bos=True, stop_token=None)
    alone = ExLlamaV2BaseGenerator(model, ExLlamaV2Cache(model, max_seq_len=40), tokenizer)
    for prompt, text in zip(sorted(PROMPTS, key=len), texts, strict=True):
        assert text == alone.generate_simple(prompt, GREEDY, 12, add_bos=True, stop_token=None)
    with pytest.warns(UserWarning, match="cache of 40"):  # the room of one row, not of three
        generator.generate_simple(STORY, GREEDY, 5)
