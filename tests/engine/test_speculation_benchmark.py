"""What is measured of drafts: that they are right and wrong, and that it is the same reply."""

from collections.abc import Sequence

import pytest
import torch

from exl2chat.engine import decoders
from exl2chat.engine.speculation_benchmark import ScriptedReply, in_turns, measure_drafts
from exl2chat.errors import ModelError
from tests.engine.speculative import Always, RowsCache, RowsModel


class OnDevice(RowsModel):
    """A model of which a benchmark takes the replies for what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("meta")


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "Pace", Always)


@pytest.mark.parametrize("kind", [RowsModel, OnDevice])
def test_drafts_of_a_script_are_all_right_or_all_wrong(kind: type[RowsModel]) -> None:
    model = kind()
    reply = ScriptedReply(model, RowsCache(), 20, 17)  # type: ignore[arg-type]
    assert len(reply.sequence) == 37
    for right, steps in ((None, 17), (True, 3), (False, 17)):
        subject = reply.decoder(right)
        model.calls.clear()
        reply.repeat(subject)
        assert len(model.calls) == steps
        assert (subject.speculated.accepted, subject.speculated.drafted > 0) == (
            14 * (right is True),
            right is not None,
        )


def test_another_reply_is_an_error_where_bits_are_the_same() -> None:
    """Elsewhere the first is followed whatever is drawn."""

    def last(model: RowsModel) -> list[int]:
        reply = ScriptedReply(model, RowsCache(), 20, 9)  # type: ignore[arg-type]
        model._reply = lambda _: 7  # from now on it says something else
        reply.repeat(reply.decoder())
        return reply.sequence

    assert last(RowsModel()) != [1] * 20 + [7] * 9
    with pytest.raises(ModelError, match="another"):
        last(OnDevice())


def test_speed_is_told_against_the_same_reply_without() -> None:
    """On a clock that counts steps of the model."""
    model = RowsModel()
    rows = measure_drafts(model, RowsCache(), 20, 16, 2, lambda: float(len(model.calls)))  # type: ignore[arg-type]
    assert [row.name for row in rows] == ["reply with drafts always right", "reply with drafts always wrong"]
    assert [row.ratio for row in rows] == [8, 1]
    assert rows[0].ceiling_microseconds == 1e6


def test_works_take_turns() -> None:
    done: list[int] = []
    works: Sequence = [lambda n=n: done.append(n) for n in (1, 5)]
    assert in_turns(works, 2, lambda: float(sum(done))) == [[1.0, 1.0], [5.0, 5.0]]
    assert done == [1, 5] * 3
