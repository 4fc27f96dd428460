"""A script as one writes it for exllamav2: load with a bar, stream until a stop condition or a limit."""

import sys

from exl2chat.exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Config, ExLlamaV2Tokenizer
from exl2chat.exllamav2.generator import ExLlamaV2Sampler, ExLlamaV2StreamingGenerator

config = ExLlamaV2Config()
config.model_dir = sys.argv[1]
config.prepare()
config.arch_compat_overrides()
config.no_flash_attn = True

model = ExLlamaV2(config)
cache = ExLlamaV2Cache(model, max_seq_len=512, lazy=True)
model.load_autosplit(cache, progress=True)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2StreamingGenerator(model, cache, tokenizer)
generator.warmup()

settings = ExLlamaV2Sampler.Settings()
settings.temperature = 0.85
settings.top_k = 50
settings.top_p = 0.8
settings.token_repetition_penalty = 1.05

generator.set_stop_conditions([tokenizer.eos_token_id, "\n\nUser:"])
generator.begin_stream_ex(tokenizer.encode("Once upon a time,", add_bos=True), settings)
count = 0
while True:
    result = generator.stream_ex()
    count += result["chunk_token_ids"].shape[1]
    sys.stdout.write(result["chunk"])
    if result["eos"] or count == 20:
        break
print()
print("tokens:", count)
