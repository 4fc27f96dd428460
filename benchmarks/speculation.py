"""What drafts do to the speed of replies: synthetic ones that are always right or always wrong, and n-grams.

    python benchmarks/speculation.py MODEL_FOLDER [--device cpu] [--dtype float32] [--tokens 128] [--rounds 5]

Replies with and without drafts take turns, since the machine may be shared; medians are compared, by the time of the
CPU on a CPU with one thread (OMP_NUM_THREADS=1), where other work on the machine changes it less. `alike` is how many
tokens a reply with n-grams begins with that the reply without has too: all of them, but for rounding.
"""

import argparse
import time
from functools import partial
from pathlib import Path
from statistics import median

from exl2chat.engine.decoders import MOST_DRAFTS
from exl2chat.engine.drafting import common_prefix
from exl2chat.engine.generators.streaming import StreamingGenerator
from exl2chat.engine.loader import LoadedModel, plan_load
from exl2chat.engine.speculation_benchmark import in_turns, measure_drafts
from exl2chat.engine.step_logits import StepLogits
from exl2chat.paths import Paths
from exl2chat.progress import silent
from exl2chat.settings import Sampling

TEXT = (
    "def area(shape):\n    if shape.kind == 'circle':\n        return 3.14159 * shape.radius ** 2\n"
    "    if shape.kind == 'square':\n        return shape.side ** 2\n    raise ValueError(shape.kind)\n"
)
PROMPTS = {
    "quoting": f"Repeat this code exactly, and nothing else:\n\n```python\n{TEXT}```",
    "prose": "Tell me a story about a lighthouse keeper and a storm.",
}
SAMPLING = Sampling(temperature=0.8, top_p=0.95, seed=1)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model = plan_load(args.folder, args.device, args.dtype, 2048, Paths.default(), silent).load(silent)
    print(f"{args.folder.name}, {model.transformer.device}, {str(model.transformer.dtype).removeprefix('torch.')}")
    show_rows(model)
    show_scripts(model, args.tokens, args.rounds)
    for name, prompt in PROMPTS.items():
        show_ngrams(model, name, model.encode_turns([("user", prompt)]), args.tokens, args.rounds)


def show_rows(model: LoadedModel) -> None:
    """The time of a step by its number of rows."""
    prompt = model.encode_turns([("user", PROMPTS["prose"])])
    steps = StepLogits(model.transformer, model.cache, model.checkpoint.config.vocab_size)
    model.cache.truncate(0)
    steps.rows(prompt, ())

    def step(drafts: int) -> None:
        steps.on_host(steps.rows(prompt, prompt[:drafts])[0])

    times = [in_turns([partial(step, drafts)], 9, time.process_time)[0] for drafts in range(MOST_DRAFTS + 1)]
    print("ms a step of 1, 2, ... rows: " + ", ".join(f"{1e3 * median(seconds):.1f}" for seconds in times))


def show_scripts(model: LoadedModel, count: int, rounds: int) -> None:
    """Always right and always wrong, against no drafts."""
    right, wrong = measure_drafts(model.transformer, model.cache, 128, count, rounds, time.process_time)
    off = 1e6 / right.ceiling_microseconds
    print(f"no drafts {off:.1f} tokens/s; always right {right.ratio:.2f}x, always wrong {wrong.ratio:.3f}x")


def show_ngrams(model: LoadedModel, name: str, prompt: list[int], count: int, rounds: int) -> None:
    """Replies to `prompt`."""
    generators = [
        StreamingGenerator(model.transformer, model.transformer.new_cache(2048), model.tokenizer, speculate=kind)
        for kind in ("off", "ngram")
    ]
    for generator in generators:
        generator.set_stop_conditions([-1])

    def reply(generator: StreamingGenerator) -> None:
        generator.begin_stream_ex(prompt, SAMPLING, max_new_tokens=count)
        while not generator.stream_ex().eos:
            pass

    works = [partial(reply, generator) for generator in generators]
    off, ngram = (median(seconds) for seconds in in_turns(works, rounds, time.process_time))
    plain, drafted = (generator.tokens[len(prompt) :] for generator in generators)
    told = generators[1].speculated
    print(
        f"n-grams, {name}: {count / off:.1f} to {count / ngram:.1f} tokens/s, {off / ngram:.2f}x; {told.accepted} of "
        f"{told.drafted} drafts accepted; alike {common_prefix(plain, drafted)} of {count}"
    )


if __name__ == "__main__":
    main()
