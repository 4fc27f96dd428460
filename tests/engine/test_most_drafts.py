"""How many tokens a generator may draft at a time, by where its model runs."""

from dataclasses import replace

import pytest
import torch

from exl2chat.engine.cache import PAGE
from exl2chat.engine.decoders import MOST_DRAFTS
from exl2chat.engine.generators import dynamic, streaming
from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.generators.streaming import StreamingGenerator
from tests.engine.dynamic_jobs import LIMITS
from tests.engine.fake_model import FakeCache, FakeModel, FakeTokenizer
from tests.engine.tiny_models import ByteTokenizer, byte_model


@pytest.mark.parametrize(("device", "most"), [("cpu", 20), ("cuda", MOST_DRAFTS)])
def test_on_a_gpu_no_more_rows_than_have_the_bits_of_one(
    device: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a reply would depend on its drafts."""
    told: list[int] = []
    monkeypatch.setattr(streaming, "Decoder", lambda *arguments: told.append(arguments[-1]))
    model = FakeModel()
    model.device = torch.device(device)
    StreamingGenerator(model, FakeCache(), FakeTokenizer(), num_speculative_tokens=20)  # type: ignore[arg-type]
    StreamingGenerator(model, FakeCache(), FakeTokenizer(), num_speculative_tokens=3)  # type: ignore[arg-type]
    assert told == [most, 3]


@pytest.mark.parametrize(("device", "most"), [("cpu", 20), ("cuda", MOST_DRAFTS)])
def test_jobs_on_a_gpu_draft_no_more_than_a_graph_has_room_for(
    device: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(dynamic, "Rounds", lambda _drafter, drafts, _limit: told.append(drafts))
    model = replace(byte_model(), device=torch.device(device))
    cache = byte_model().new_cache(PAGE)
    DynamicGenerator(model, cache, ByteTokenizer(), replace(LIMITS, drafts=20), speculate="ngram")  # type: ignore[arg-type]
    assert told == [most]
