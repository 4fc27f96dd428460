"""The asynchronous generator as scripts use it."""

import asyncio

import pytest
import torch

from exl2chat.errors import ContextError
from exl2chat.exllamav2 import ExLlamaV2Cache
from exl2chat.exllamav2.generator import ExLlamaV2DynamicGeneratorAsync, ExLlamaV2DynamicJobAsync
from exl2chat.exllamav2.generator.filters import ExLlamaV2SelectFilter
from tests.exllamav2.test_generators import GREEDY, PROMPTS, streamed


@pytest.fixture
async def generator(model, tokenizer):
    generator = ExLlamaV2DynamicGeneratorAsync(model, ExLlamaV2Cache(model, max_seq_len=512), tokenizer)
    yield generator
    await generator.close()


def begin(generator, text, count=10, **more):
    ids = generator.generator.tokenizer.encode(text)
    return ExLlamaV2DynamicJobAsync(generator, ids, count, gen_settings=GREEDY, **more)


async def read(job):
    async with asyncio.timeout(60):
        return [result async for result in job]


async def test_jobs_are_read_side_by_side(generator):
    jobs = [begin(generator, text, identifier=n) for n, text in enumerate(PROMPTS)]
    generator.enqueue(jobs[0])
    done = await asyncio.gather(*map(read, jobs))
    for n, (job, results) in enumerate(zip(jobs, done, strict=True)):
        assert "".join(result.get("text", "") for result in results) == streamed(generator.generator, PROMPTS[n], 10)
        assert all((r["job"], r["serial"], r["identifier"]) == (job.job, job.serial_number, n) for r in results)
        assert [results[0]["stage"], results[1]["stage"]] == ["started", "prefill"]
        assert [r["eos"] for r in results][-2:] == [False, True]


async def test_a_job_can_be_cancelled_by_either_name(generator):
    jobs = [begin(generator, PROMPTS[0], 200) for _ in range(2)]
    readers = [asyncio.create_task(read(job)) for job in jobs]
    await jobs[0].cancel()
    await generator.cancel(jobs[1])
    for results in await asyncio.gather(*readers):
        assert not any(result["eos"] for result in results)


async def test_filters_work_in_the_thread(generator, model, tokenizer):
    select = ExLlamaV2SelectFilter(model, tokenizer, [" red"])
    assert (await read(begin(generator, PROMPTS[0], filters=[select])))[-1]["full_completion"] == " red"


async def test_what_is_wrong_with_a_job_is_raised_where_it_is_awaited(generator):
    with pytest.raises(ContextError):
        await read(begin(generator, PROMPTS[0], 10_000))
    with pytest.raises(ValueError):
        ExLlamaV2DynamicJobAsync(generator, torch.tensor([[1]]), 5, stop_conditions=[None])
