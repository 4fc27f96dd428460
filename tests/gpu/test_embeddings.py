"""Rows in prompts on the GPU: rows of the model's own table must say what the tokens do that they are of."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from exl2chat.engine.embeddings import InputEmbeddings
from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.generators.streaming import StreamingGenerator
from exl2chat.engine.replies import choosing
from exl2chat.engine.replies.jobs import Job
from exl2chat.engine.transformer import Transformer
from exl2chat.model.checkpoint import open_checkpoint
from exl2chat.model.tokenizer import Tokenizer, open_tokenizer
from exl2chat.progress import silent
from exl2chat.settings import Sampling

FOLDER = Path(__file__).parents[1] / "data" / "golden" / "llama-6.0bpw-exl2"
PROMPT = list(range(5, 45))
COUNT = 40
SETTINGS = (Sampling(temperature=0), Sampling(temperature=1.5, top_k=50, seed=2))
PENALTIES = Sampling(repetition_penalty=1.2, frequency_penalty=0.2, penalty_range=30, seed=3)
Loaded = tuple[Transformer, Tokenizer]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    checkpoint = open_checkpoint(FOLDER)
    model = Transformer.load(checkpoint, torch.device("cuda"), torch.float16, silent)
    return model, open_tokenizer(checkpoint.folder)


def hidden(model: Transformer, start: int, stop: int) -> tuple[list[int], InputEmbeddings]:
    """The prompt with rows in the place of the tokens from `start` to `stop`."""
    rows = InputEmbeddings.of(model.weights.embedding[PROMPT[start:stop]])
    return [*PROMPT[:start], *rows.ids, *PROMPT[stop:]], rows


def streamed(loaded: Loaded, ids: Sequence[int], settings: Sampling, *embeddings: InputEmbeddings) -> list[int]:
    model, tokenizer = loaded
    subject = StreamingGenerator(model, model.new_cache(128), tokenizer)
    subject.set_stop_conditions([])
    subject.begin_stream_ex(ids, settings, max_new_tokens=COUNT, embeddings=embeddings)
    while not subject.stream_ex().eos:
        pass
    return subject.tokens[len(ids) :]


@pytest.mark.parametrize("place", [(0, 9), (7, 30), (38, 40)])  # the last one too: then the host draws the next token
@pytest.mark.parametrize("settings", SETTINGS)
def test_streams_say_what_the_tokens_do(loaded: Loaded, place: tuple[int, int], settings: Sampling) -> None:
    ids, rows = hidden(loaded[0], *place)
    assert streamed(loaded, ids, settings, rows) == streamed(loaded, PROMPT, settings)


def test_penalties_pass_over_rows_as_on_the_host(loaded: Loaded) -> None:
    ids, rows = hidden(loaded[0], 7, 30)
    ours = streamed(loaded, ids, PENALTIES, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "known_to_device", lambda _: False)
        assert ours == streamed(loaded, ids, PENALTIES, rows)


@pytest.mark.parametrize("place", [(0, 9), (7, 30), (38, 40)])
def test_jobs_say_what_the_tokens_do(loaded: Loaded, place: tuple[int, int]) -> None:
    model, tokenizer = loaded
    ids, rows = hidden(model, *place)

    def reply(prompt: Sequence[int], *embeddings: InputEmbeddings) -> str:
        subject = DynamicGenerator(model, model.new_cache(512), tokenizer)
        (final,) = subject.generate([Job((tuple(prompt),), COUNT, SETTINGS[1], embeddings=embeddings)]) or ()
        return final.text

    assert reply(ids, rows) == reply(PROMPT)
