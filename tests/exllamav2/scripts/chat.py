"""A minimal chat loop as one writes it for exllamav2: the whole conversation in one growing tensor of ids."""

import sys

import torch

from exl2chat.exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl2chat.exllamav2.generator import ExLlamaV2Sampler, ExLlamaV2StreamingGenerator

config = ExLlamaV2Config(sys.argv[1])
config.max_seq_len = 200
model = ExLlamaV2(config)
model.load()
cache = ExLlamaV2Cache(model)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
generator.set_stop_conditions([tokenizer.eos_token_id])
settings = ExLlamaV2Sampler.Settings.greedy()

context = torch.empty((1, 0), dtype=torch.long)
while (said := input("You: ")) != "bye":
    context = torch.cat([context, tokenizer.encode(f"User: {said}\nBot:", add_bos=context.shape[1] == 0)], dim=1)
    generator.begin_stream_ex(context, settings)
    print("Bot: ", end="")
    for _ in range(12):
        result = generator.stream_ex()
        print(result["chunk"], end="")
        if result["eos"]:
            break
    print()
    context = generator.sequence_ids
    print("context:", context.shape[1], "full:", generator.full())
