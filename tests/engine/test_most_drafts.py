"""How many tokens a stream may draft at a time, by where its model runs."""

import pytest
import torch

from exl2chat.engine.decoders import MOST_DRAFTS
from exl2chat.engine.generators import streaming
from exl2chat.engine.generators.streaming import StreamingGenerator
from tests.engine.fake_model import FakeCache, FakeModel, FakeTokenizer


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
