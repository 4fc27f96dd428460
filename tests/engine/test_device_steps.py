"""The memory that a device writes tokens into, without a device."""

import weakref

import torch

from exl2chat.engine.device_steps import DrawnTokens


class FakeEvent:
    """An event of which `log` says what was done, and whether the memory was there then."""

    def __init__(self, place: int, memory: torch.Tensor, log: list[tuple[str, int, bool]]) -> None:
        self._place, self._memory, self._log = place, weakref.ref(memory), log

    def record(self) -> None:
        self._log.append(("record", self._place, self._memory() is not None))

    def synchronize(self) -> None:
        self._log.append(("wait", self._place, self._memory() is not None))


def drawn(log: list[tuple[str, int, bool]]) -> DrawnTokens:
    memory = torch.tensor([7, 8, 9], dtype=torch.int32)
    return DrawnTokens(memory, [FakeEvent(place, memory, log) for place in range(3)])


def test_a_token_is_taken_once_its_step_has_ended() -> None:
    log: list[tuple[str, int, bool]] = []
    subject = drawn(log)
    subject.record(1)
    assert subject.take(1, 3) == [8, 9, 7]
    assert log == [("record", 1, True), ("wait", 1, True)]


def test_the_memory_is_given_back_after_every_step_that_writes_to_it() -> None:
    log: list[tuple[str, int, bool]] = []
    subject = drawn(log)
    memory = weakref.ref(subject.memory)
    subject.record(2)
    del subject
    assert log[1:] == [("wait", place, True) for place in range(3)]
    assert memory() is None
