"""Whole models on the GPU: golden logits, steps against prompts, recordings, and the generator's text."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from exl2chat.engine.decode_graphs import DecodeGraphs
from exl2chat.engine.generators.streaming import StreamingGenerator
from exl2chat.engine.transformer import Transformer
from exl2chat.model.checkpoint import open_checkpoint
from exl2chat.model.tokenizer import open_tokenizer
from exl2chat.progress import silent
from exl2chat.settings import Sampling

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
GOLDEN = sorted((Path(__file__).parents[1] / "data" / "golden").iterdir())
TOLERANCE = 3e-3


def load(folder: Path) -> Transformer:
    return Transformer.load(open_checkpoint(folder), CUDA, torch.float16, silent)


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    error = ours - expected.to(ours.device)
    assert error.abs().max() <= TOLERANCE * expected.abs().max()
    assert error.square().mean().sqrt() <= TOLERANCE * expected.square().mean().sqrt()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 16, 200])
@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_golden_logits_in_steps_of_any_size(folder: Path, rows: int) -> None:
    expected = load_file(folder / "expected.safetensors")
    tokens, logits = expected["input_ids"][0].long().to(CUDA), expected["logits"]
    model = load(folder)
    cache = model.new_cache(256)
    close(torch.cat([model.forward(part, cache) for part in tokens.split(rows)]), logits.reshape(len(tokens), -1))


@pytest.mark.parametrize("rows", [5, 24, 200])
@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_the_last_logits_alone(folder: Path, rows: int) -> None:
    expected = load_file(folder / "expected.safetensors")
    tokens, logits = expected["input_ids"][0].long().to(CUDA)[:rows], expected["logits"]
    model = load(folder)
    last = model.forward(tokens, model.new_cache(256), last_only=True)
    close(last, logits.reshape(-1, last.shape[1])[len(tokens) - 1 : len(tokens)])


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_steps_equal_the_prompt_past_a_page(folder: Path) -> None:
    model = load(folder)
    tokens = torch.randint(model.config.vocab_size, (300,), device=CUDA)
    whole = model.forward(tokens, model.new_cache(512))
    cache = model.new_cache(512)
    parts = [model.forward(tokens[:230], cache), *(model.forward(part, cache) for part in tokens[230:].split(7))]
    close(torch.cat(parts), whole)


def test_a_recorded_step_gives_the_bits_of_a_plain_one() -> None:
    model = load(GOLDEN[1])
    tokens = torch.randint(model.config.vocab_size, (120,), device=CUDA)
    recorded, plain = model.new_cache(256), model.new_cache(256)

    class Unrecorded(DecodeGraphs):
        def run(self, tokens, step):  # type: ignore[no-untyped-def]
            return step(tokens)

    plain.graphs = Unrecorded()
    for part in (tokens[:40], *tokens[40:80].split(1), *tokens[80:].split(3)):
        assert torch.equal(model.forward(part, recorded), model.forward(part, plain))


def test_truncating_and_extending_equals_a_fresh_cache_bit_for_bit() -> None:
    model = load(GOLDEN[0])
    kept, dropped, added = torch.randint(model.config.vocab_size, (3, 30), device=CUDA)
    used, fresh = model.new_cache(256), model.new_cache(256)
    for part in (kept, dropped[:20], *dropped[20:].split(1)):
        model.forward(part, used)
    used.truncate(len(kept))
    model.forward(kept, fresh)
    for token in added.split(1):
        assert torch.equal(model.forward(token, used), model.forward(token, fresh))


def test_a_decode_step_gives_the_same_bits_a_hundred_times() -> None:
    model = load(GOLDEN[0])
    cache = model.new_cache(256)
    tokens = torch.randint(model.config.vocab_size, (60,), device=CUDA)
    model.forward(tokens[:-1], cache)
    first = model.forward(tokens[-1:], cache)
    for _ in range(100):
        cache.truncate(59)
        assert torch.equal(model.forward(tokens[-1:], cache), first)


def write(folder: Path, device: str, dtype: torch.dtype) -> tuple[str, list[int]]:
    """The greedy reply to a fixed prompt: its text and the whole sequence."""
    checkpoint = open_checkpoint(folder)
    model = Transformer.load(checkpoint, torch.device(device), dtype, silent)
    generator = StreamingGenerator(model, model.new_cache(128), open_tokenizer(checkpoint.folder))
    generator.set_stop_conditions([])
    generator.begin_stream_ex(list(range(5, 40)), Sampling(temperature=0.0), max_new_tokens=40)
    results = [generator.stream_ex()]
    while not results[-1].eos:
        results.append(generator.stream_ex())
    return "".join(result.text for result in results), generator.tokens


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_the_generator_writes_the_text_of_the_cpu_in_float32(folder: Path) -> None:
    """The same text, unless two tokens were as good within the tolerance of the logits."""
    (text, tokens), (ours, chosen) = write(folder, "cpu", torch.float32), write(folder, "cuda", torch.float16)
    assert len(tokens) == len(chosen) == 75
    if text != ours:
        step = next(i for i, (a, b) in enumerate(zip(tokens, chosen, strict=True)) if a != b)
        model = Transformer.load(open_checkpoint(folder), torch.device("cpu"), torch.float32, silent)
        logits = model.forward(torch.tensor(tokens[:step]), model.new_cache(128), last_only=True)[0]
        assert logits[tokens[step]] - logits[chosen[step]] < 2 * TOLERANCE * logits.abs().max()
