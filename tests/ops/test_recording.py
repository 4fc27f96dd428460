"""What a recording keeps away from itself, without a GPU."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from exl2chat.ops.recording import record


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """How each was made."""
    made: list[dict[str, object]] = []

    @contextmanager
    def capture(_graph: object, **how: object) -> Iterator[None]:
        made.append(how)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return made


def test_no_garbage_is_collected_in_a_recording(recordings: list[dict[str, object]]) -> None:
    _, during = record(gc.isenabled, pool=(1, 2))
    assert (during, gc.isenabled()) == (False, True)
    assert recordings == [{"pool": (1, 2), "stream": None, "capture_error_mode": "thread_local"}]


@pytest.mark.usefixtures("recordings")
def test_collection_goes_on_as_it_was_whatever_happens() -> None:
    def fail() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        record(fail)
    assert gc.isenabled()
    gc.disable()
    try:
        record(int)
        assert not gc.isenabled()
    finally:
        gc.enable()
