"""A script as one writes it for exllamav2's dynamic generators, which names no other package."""

import asyncio
import sys

from exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer, Timer
from exllamav2.generator import ExLlamaV2BaseGenerator, ExLlamaV2DynamicGenerator, ExLlamaV2DynamicJob
from exllamav2.generator.dynamic_async import ExLlamaV2DynamicGeneratorAsync, ExLlamaV2DynamicJobAsync
from exllamav2.generator.filters import ExLlamaV2SelectFilter
from exllamav2.generator.sampler import ExLlamaV2Sampler

config = ExLlamaV2Config(sys.argv[1])
config.arch_compat_overrides()
model = ExLlamaV2(config)
cache = ExLlamaV2Cache(model, max_seq_len=1024, lazy=True)
model.load_autosplit(cache)
tokenizer = ExLlamaV2Tokenizer(config)
settings = ExLlamaV2Sampler.Settings.greedy()
prompts = ["Once upon a time", "The people"]

generator = ExLlamaV2DynamicGenerator(model=model, cache=cache, tokenizer=tokenizer)
generator.warmup()
with Timer() as timer:
    texts = generator.generate(prompt=prompts, max_new_tokens=8, gen_settings=settings, add_bos=True)
print("dynamic", *texts, sep="|")
assert timer.interval > 0

for number, prompt in enumerate(prompts):
    ids = tokenizer.encode(prompt, add_bos=True)
    generator.enqueue(ExLlamaV2DynamicJob(input_ids=ids, max_new_tokens=8, gen_settings=settings, identifier=number))
replies = list(prompts)
while generator.num_remaining_jobs():
    for result in generator.iterate():
        if result["stage"] == "streaming":
            replies[result["identifier"]] += result.get("text", "")
print("jobs", *replies, sep="|")

choice = ExLlamaV2SelectFilter(model, tokenizer, [" yes", " no"])
print("choice", generator.generate("So?", max_new_tokens=8, filters=[choice], completion_only=True), sep="|")

base = ExLlamaV2BaseGenerator(model, cache, tokenizer)
print("base", *base.generate_simple(prompts, settings, 8, seed=1, add_bos=True, stop_token=None), sep="|")


async def main() -> None:
    """The same once more, awaited."""
    generator = ExLlamaV2DynamicGeneratorAsync(model=model, cache=cache, tokenizer=tokenizer)

    async def read(prompt: str) -> str:
        ids = tokenizer.encode(prompt, add_bos=True)
        job = ExLlamaV2DynamicJobAsync(generator, input_ids=ids, max_new_tokens=8, gen_settings=settings)
        return prompt + "".join([result.get("text", "") async for result in job])

    print("async", *await asyncio.gather(*map(read, prompts)), sep="|")
    await generator.close()


asyncio.run(main())
