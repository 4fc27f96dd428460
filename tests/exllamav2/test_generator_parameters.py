"""Parameters of the dynamic generator and of its twin, what results tell of its pages, and a filter beside healing."""

from typing import Any

import pytest

from exl2chat.exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Tokenizer
from exl2chat.exllamav2.generator import (
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicGeneratorAsync,
    ExLlamaV2DynamicJob,
    ExLlamaV2DynamicJobAsync,
    ExLlamaV2Sampler,
)
from exl2chat.exllamav2.generator.filters import ExLlamaV2PrefixFilter
from tests.exllamav2.test_generators import PROMPTS

GREEDY = ExLlamaV2Sampler.Settings.greedy()
LONG = " ".join(PROMPTS * 20)


def dynamic(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, **options: Any) -> ExLlamaV2DynamicGenerator:
    return ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=1024), tokenizer, **options)


def ids(tokenizer: ExLlamaV2Tokenizer, text: str) -> Any:
    return tokenizer.encode(text)


def results(generator: ExLlamaV2DynamicGenerator, *texts: str, **options: Any) -> list[dict[str, Any]]:
    """Those of jobs of four tokens."""
    for text in texts:
        generator.enqueue(ExLlamaV2DynamicJob(ids(generator.tokenizer, text), 4, gen_settings=GREEDY, **options))
    found = []
    while generator.num_remaining_jobs():
        found += generator.iterate()
    return found


@pytest.mark.parametrize("chunk", [100, 200])
def test_so_much_of_a_prompt_is_read_in_a_step(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, chunk: int) -> None:
    told = results(dynamic(model, tokenizer, max_chunk_size=chunk), LONG)
    read = [record["curr_progress"] for record in told if record["stage"] == "prefill"]
    assert read[:-1] == [chunk * (1 + step) for step in range(len(read) - 1)]
    assert len(read) > 2


@pytest.mark.parametrize("most", [1, 2])
def test_so_many_jobs_run_at_a_time(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, most: int) -> None:
    told = results(dynamic(model, tokenizer, max_batch_size=most), *PROMPTS)
    running = highest = 0
    for record in told:
        running += (record["stage"] == "started") - record["eos"]
        highest = max(highest, running)
    assert highest == most


def test_pages_that_were_cached_are_counted(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
    generator = dynamic(model, tokenizer)
    ends = [results(generator, LONG)[-1] for _ in range(2)]
    assert [end["cached_pages"] for end in ends] == [0, ends[1]["cached_tokens"] // 256]
    assert ends[1]["cached_pages"] >= 1


def test_a_prefix_begins_behind_what_was_healed(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
    options: dict[str, Any] = {
        "filters": [ExLlamaV2PrefixFilter(model, tokenizer, "ople say:")],
        "gen_settings": GREEDY,
    }
    text = dynamic(model, tokenizer).generate("The pe", 12, token_healing=True, **options)
    assert text.startswith("The people say:")


async def test_enqueueing_a_job_that_has_begun_is_nothing_new(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
    generator = ExLlamaV2DynamicGeneratorAsync(model, ExLlamaV2Cache(model, max_seq_len=512), tokenizer)
    job = ExLlamaV2DynamicJobAsync(generator, ids(tokenizer, PROMPTS[0]), 4, gen_settings=GREEDY)
    generator.enqueue(job)
    serials = {record["serial"] async for record in job}
    after = ExLlamaV2DynamicJobAsync(generator, ids(tokenizer, PROMPTS[0]), 4, gen_settings=GREEDY)
    assert [record async for record in after]
    await generator.close()
    assert (serials, after.serial_number) == ({0}, 1)
