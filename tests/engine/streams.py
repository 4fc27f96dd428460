"""Streams over the model of hashes."""

from collections.abc import Iterator, Sequence
from typing import Any

from exl2chat.engine.generators.streaming import Extras, StreamingGenerator, StreamResult
from exl2chat.engine.token_table import TokenTable
from exl2chat.settings import Sampling
from tests.engine.fake_model import END, VOCABULARY, FakeCache, FakeModel, FakeTokenizer

GREEDY = Sampling(temperature=0)
WARM = Sampling(temperature=1.0, top_p=1.0, seed=5)
PROMPT = [65, 66, 67]


def generator(model: FakeModel | None = None, words: Sequence[str] = (), capacity: int = 1000) -> StreamingGenerator:
    return StreamingGenerator(model or FakeModel(), FakeCache(capacity), FakeTokenizer(words=words))  # type: ignore[arg-type]


def table(words: Sequence[str] = ()) -> TokenTable:
    return TokenTable(FakeTokenizer(words=words), VOCABULARY, {END})  # type: ignore[arg-type]


def stream(subject: StreamingGenerator) -> Iterator[StreamResult]:
    while True:
        result = subject.stream_ex()
        yield result
        if result.eos:
            return


def reply(
    subject: StreamingGenerator, extras: Extras, settings: Sampling = WARM, prompt: Sequence[int] = PROMPT, **more: Any
) -> tuple[str, list[int], StreamResult]:
    """Text, tokens and the last result."""
    subject.begin_stream_ex(prompt, settings, extras=extras, **{"max_new_tokens": 40, **more})
    results = list(stream(subject))
    tokens = [token for result in results for token in result.tokens]
    return "".join(result.text for result in results), tokens, results[-1]
