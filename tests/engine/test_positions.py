"""Tokens that stand elsewhere than at their number: prompts of which a part is hidden, against transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from exl2chat.engine.cache import PAGE, KVCache
from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.generators.streaming import StreamingGenerator
from exl2chat.engine.replies.jobs import Job
from exl2chat.engine.transformer import Transformer
from tests.engine.dynamic_jobs import GREEDY, prompt
from tests.engine.tiny_models import ByteTokenizer
from tests.engine.transformers_models import VARIANTS, load, make_model

COUNT = 10
IDS = prompt(60)
PLACES = {  # of the tokens that are seen
    "all": range(60),
    "no padding": range(20, 60),
    "a gap": [*range(25), *range(40, 60)],
    "several": [*range(3, 9), 12, *range(30, 58)],
}
Pair = tuple[Any, Transformer]


@pytest.fixture(scope="module", params=["llama", "qwen2-yarn"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model of transformers and ours over the same files."""
    folder: Path = tmp_path_factory.mktemp("model")
    return make_model(folder, *VARIANTS[request.param]), load(folder)


def continued(theirs: Any, seen: Sequence[int]) -> list[int]:
    """What transformers writes with a mask, every token at the position that is its number."""
    ids, mask, last = torch.tensor([IDS]), torch.zeros(1, len(IDS), dtype=torch.int64), seen[-1]
    mask[0, list(seen)] = 1
    for _ in range(COUNT):
        with torch.inference_mode():
            logits = theirs(ids, attention_mask=mask, position_ids=torch.arange(ids.shape[1])[None]).logits[0, last]
        ids = torch.cat([ids, logits.argmax()[None, None]], 1)
        mask = torch.cat([mask, torch.ones(1, 1, dtype=torch.int64)], 1)
        last = -1
    return ids[0, len(IDS) :].tolist()  # type: ignore[no-any-return]


def stream(model: Transformer, cache: KVCache | None = None) -> StreamingGenerator:
    subject = StreamingGenerator(model, cache or model.new_cache(128), ByteTokenizer())  # type: ignore[arg-type]
    subject.set_stop_conditions([])
    return subject


def begin(subject: StreamingGenerator, places: Sequence[int]) -> int:
    """Begin the reply to what is at these places of IDS, and say how much of it was cached."""
    ids, positions = [IDS[place] for place in places], [*places, len(IDS)]
    return subject.begin_stream_ex(ids, GREEDY, max_new_tokens=COUNT, positions=positions).cached_tokens


def streamed(subject: StreamingGenerator, places: Sequence[int]) -> list[int]:
    begin(subject, places)
    while not subject.stream_ex().eos:
        pass
    return subject.tokens[-COUNT:]


@pytest.mark.parametrize("kind", PLACES)
def test_replies_to_prompts_with_hidden_parts_are_those_of_transformers(pair: Pair, kind: str) -> None:
    theirs, model = pair
    assert streamed(stream(model), PLACES[kind]) == continued(theirs, PLACES[kind])


def test_a_gap_matters_and_padding_does_not(pair: Pair) -> None:
    """So that to leave out padding and offsets is right, and to close gaps would not be."""
    _, model = pair

    def closed(kind: str) -> list[int]:
        subject = stream(model)
        subject.begin_stream_ex([IDS[place] for place in PLACES[kind]], GREEDY, max_new_tokens=COUNT)
        while not subject.stream_ex().eos:
            pass
        return subject.tokens[-COUNT:]

    assert closed("no padding") == streamed(stream(model), PLACES["no padding"])
    assert closed("several") != streamed(stream(model), PLACES["several"])


def test_what_stands_elsewhere_is_read_again(pair: Pair) -> None:
    _, model = pair
    subject = stream(model)
    streamed(subject, range(50))
    assert begin(subject, range(50)) == 49
    moved = [*range(30), *range(35, 55)]
    assert begin(subject, [*range(30), *range(30, 50)]) == 49
    ids = [IDS[place] for place in range(50)]
    assert subject.begin_stream_ex(ids, GREEDY, positions=moved).cached_tokens == 30
    assert subject.begin_stream_ex(ids, GREEDY, positions=moved).cached_tokens == 49
    assert subject.begin_stream_ex(ids, GREEDY).cached_tokens == 30


def test_others_find_every_token_at_its_place(pair: Pair) -> None:
    _, model = pair
    cache = model.new_cache(PAGE)
    expected = streamed(stream(model), PLACES["several"])
    first, second = stream(model, cache), stream(model, cache)
    jobs = DynamicGenerator(model, cache, ByteTokenizer())  # type: ignore[arg-type]
    begin(first, PLACES["several"])
    first.stream_ex()
    assert streamed(second, range(60)) == streamed(stream(model), range(60))
    first.stream_ex()
    (final,) = jobs.generate([Job((IDS,), COUNT, GREEDY)]) or ()
    for _ in range(COUNT - 2):
        first.stream_ex()
    assert first.tokens[-COUNT:] == expected
    alone = DynamicGenerator(model, model.new_cache(PAGE), ByteTokenizer())  # type: ignore[arg-type]
    assert [final.text] == [one.text for one in alone.generate([Job((IDS,), COUNT, GREEDY)]) or ()]
