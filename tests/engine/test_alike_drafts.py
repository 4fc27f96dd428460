"""Drafts change nothing: not with LoRAs on a GPU, nor how much is read at once, nor after an interrupt."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exl2chat.engine.batch_drafting import _portions
from exl2chat.engine.cache import PAGE
from exl2chat.engine.decoders import Decoder
from exl2chat.engine.drafting import SuffixDrafter
from exl2chat.engine.generators import dynamic, streaming
from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.replies.choosing import Chooser
from exl2chat.engine.replies.language import Language
from exl2chat.engine.scheduler import Row
from exl2chat.engine.speculation import SpeculativeLogits
from tests.engine.dynamic_jobs import GREEDY, job
from tests.engine.fake_model import VOCABULARY, FakeCache, FakeModel, FakeTokenizer
from tests.engine.tiny_models import ByteTokenizer, byte_model


@pytest.mark.parametrize(("device", "adapters", "drafts"), [("cuda", 1, False), ("cuda", 0, True), ("cpu", 1, True)])
def test_with_loras_nothing_is_drafted_on_a_gpu(device: str, adapters: int, drafts: bool) -> None:
    """Their products may round a row in another way when there are several."""
    decoder = Decoder(FakeModel(), FakeCache(), VOCABULARY, (SuffixDrafter(),))  # type: ignore[arg-type]
    model = FakeModel()
    model.device, model.adapters = torch.device(device), (None,) * adapters
    decoder.model = model  # type: ignore[assignment]
    language = Language(FakeTokenizer(), VOCABULARY)  # type: ignore[arg-type]
    decoder.begin(Chooser(job([1, 2], 5, GREEDY), [1, 2], language), 20)
    assert isinstance(decoder._logits, SpeculativeLogits) == drafts


def test_jobs_with_loras_are_not_drafted_for_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = byte_model()
    subject = DynamicGenerator(model, model.new_cache(PAGE), ByteTokenizer(), speculate="ngram")  # type: ignore[arg-type]
    subject._model = replace(model, device=torch.device("cuda"))
    monkeypatch.setattr(dynamic, "Executor", lambda *_: None)
    monkeypatch.setattr(dynamic, "with_adapters", lambda model, adapters: replace(model, adapters=adapters))
    monkeypatch.setattr(dynamic, "cache_salt", bytes)
    drafting = subject._rounds
    assert drafting is not None
    for adapters, expected in (((1,), None), ((), drafting)):
        subject.set_adapters(adapters)  # type: ignore[arg-type]
        assert subject._rounds is expected


@given(st.lists(st.integers(0, 30)), st.integers(1, 12))
def test_what_a_draft_model_lacks_is_read_in_portions(lengths: list[int], size: int) -> None:
    """A forward pass of any length would take any memory."""
    rows = [Row(number, 0, 100, tuple(range(length)), (0,)) for number, length in enumerate(lengths)]
    portions = _portions(rows, size)
    assert all(sum(len(row.tokens) for row in portion) <= size for portion in portions)
    read: dict[int, list[int]] = {row.job: [] for row in rows}
    for row in (row for portion in portions for row in portion):
        assert row.start == 100 + len(read[row.job])
        read[row.job] += row.tokens
    assert read == {row.job: list(row.tokens) for row in rows}


def test_a_reply_is_over_even_if_nobody_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt that comes when the last token has been added."""
    subject = streaming.StreamingGenerator(FakeModel(), FakeCache(), FakeTokenizer())  # type: ignore[arg-type]
    subject.set_stop_conditions([])
    subject.begin_stream_ex([1, 2, 3], GREEDY, max_new_tokens=2)
    subject.stream_ex()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(streaming, "_result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            subject.stream_ex()
    assert subject.stream_ex().stop_reason == "max_tokens"
    assert len(subject.tokens) == 5
