"""What a constraint leaves no choice about is computed in one step, and is what it would be one token at a time."""

import json
from pathlib import Path

import pytest
import torch

from exl2chat.engine import batch_drafting, decoders
from exl2chat.engine.compile_grammar import compile_json_schema
from exl2chat.engine.constraints import Constraint
from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.generators.streaming import Extras, StreamingGenerator
from exl2chat.engine.replies.jobs import Job, Streamed
from exl2chat.engine.scheduler import Limits
from exl2chat.engine.stopping import StopConditions
from exl2chat.engine.token_table import TokenTable
from exl2chat.engine.transformer import Transformer
from exl2chat.model.checkpoint import open_checkpoint
from exl2chat.model.tokenizer import Tokenizer, open_tokenizer
from exl2chat.progress import silent
from exl2chat.settings import Sampling
from tests.engine.speculative import Always

FOLDER = Path(__file__).parents[1] / "data" / "golden" / "llama-6.0bpw-exl2"
NAMES = ("temperature of the sea", "height of the mountain")
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in NAMES},
        "required": NAMES,
        "additionalProperties": False,
    }
)
SAMPLING = Sampling(temperature=1.0, seed=2)


@pytest.fixture(scope="module")
def parts() -> tuple[Transformer, Tokenizer]:
    checkpoint = open_checkpoint(FOLDER)
    model = Transformer.load(checkpoint, torch.device("cpu"), torch.float32, silent)
    return model, open_tokenizer(checkpoint.folder)


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "Pace", Always)
    monkeypatch.setattr(batch_drafting, "Pace", Always)


def rule(parts: tuple[Transformer, Tokenizer]) -> Constraint:
    model, tokenizer = parts
    return compile_json_schema(TokenTable(tokenizer, model.config.vocab_size, tokenizer.eos_ids), SCHEMA)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each step of the model has."""
    counted: list[int] = []
    usual = Transformer.step
    monkeypatch.setattr(
        Transformer, "step", lambda self, *inputs: counted.append(len(inputs[0])) or usual(self, *inputs)
    )
    return counted


def test_the_streaming_generator_reads_what_is_forced_in_one_step(
    parts: tuple[Transformer, Tokenizer], steps: list[int]
) -> None:
    model, tokenizer = parts
    ids = tokenizer.encode("Tell me of the island in numbers:", False, True)
    texts, counts = [], []
    for speculate in ("off", "auto"):
        subject = StreamingGenerator(model, model.new_cache(256), tokenizer, speculate=speculate)
        steps.clear()
        subject.begin_stream_ex(ids, SAMPLING, extras=Extras(constraint=rule(parts)))
        results = [subject.stream_ex()]
        while not results[-1].eos:
            results.append(subject.stream_ex())
        texts.append("".join(result.text for result in results))
        counts.append(len(steps))
    assert texts[0] == texts[1]
    assert tuple(json.loads(texts[0])) == NAMES
    assert counts[1] < 0.7 * counts[0]
    assert subject.speculated.accepted > 10


def test_a_stream_that_is_dropped_within_what_is_forced_leaves_nothing_of_it(
    parts: tuple[Transformer, Tokenizer], steps: list[int]
) -> None:
    model, tokenizer = parts
    ids = tokenizer.encode("Tell me of the island in numbers:", False, True)

    def free(subject: StreamingGenerator) -> list[int]:
        subject.begin_stream_ex(ids, SAMPLING, max_new_tokens=20)
        while not subject.stream_ex().eos:
            pass
        return subject.tokens[len(ids) :]

    expected = free(StreamingGenerator(model, model.new_cache(256), tokenizer, speculate="off"))
    subject = StreamingGenerator(model, model.new_cache(256), tokenizer)
    subject.begin_stream_ex(ids, SAMPLING, extras=Extras(constraint=rule(parts)))
    steps.clear()
    result = subject.stream_ex()
    while result.reply_tokens == len(steps):  # until one was computed with another
        assert not result.eos
        result = subject.stream_ex()
    steps.clear()
    assert free(subject) == expected
    assert steps == [1] * len(expected)  # nothing is drafted where nothing is forced


def test_jobs_read_what_is_forced_in_one_step(parts: tuple[Transformer, Tokenizer]) -> None:
    model, tokenizer = parts
    ends, counts = [], []
    for drafts in (0, 6):
        limits = Limits(batch=4, queue=9, chunk=64, drafts=drafts)
        subject = DynamicGenerator(model, model.new_cache(512), tokenizer, limits)
        for seed, text in enumerate(("The sea:", "Some mountains and a lake")):
            ids = tuple(tokenizer.encode(text, False, True))
            stops = StopConditions(tokenizer.eos_ids)
            subject.enqueue(Job((ids,), 80, Sampling(seed=seed), stops, constraint=rule(parts)))
        subject.enqueue(Job((ids,), 10, Sampling(seed=7)))
        finals, count = {}, 0
        while subject.remaining:
            results = subject.iterate()
            finals |= {r.serial: r.final for r in results if isinstance(r, Streamed) and r.final}
            count += 1
        ends.append([finals[serial].text for serial in range(3)])
        counts.append(count)
    assert ends[0] == ends[1]
    assert counts[1] < 0.7 * counts[0]
    assert min(finals[0].accepted, finals[1].accepted) > 10
