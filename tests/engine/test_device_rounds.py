"""Drafts whose tokens a device draws: when they are tried, alone, and what is told of them."""

from collections.abc import Callable, Sequence

import pytest

from exl2chat.engine.device_decoder import DEPTH, DeviceDecoder
from exl2chat.engine.drafting import ModelDrafter
from exl2chat.engine.generators.streaming import StreamingGenerator
from exl2chat.engine.paced_drafts import PacedDrafts, Source
from exl2chat.settings import Sampling
from tests.engine.fake_device import CAPACITY, SETTINGS, Device, Memory, Oracle, on_device, on_host
from tests.engine.fake_model import VOCABULARY
from tests.engine.speculative import Always, RowsModel, plain, results_of, speculating


@pytest.mark.parametrize("eager", [False, True])
def test_a_device_drafts_what_the_host_would(monkeypatch: pytest.MonkeyPatch, eager: bool) -> None:
    """One draft from another, the same model's: nearly all of them are right. Settings that it does not know are the
    host's, and so are drafts after logits that are not numbers."""
    unknown = Sampling(seed=4, mirostat_tau=3.0)
    for settings in (*SETTINGS, unknown):
        device = Device(Memory(), eager)
        drafter = ModelDrafter(device, device.memory, VOCABULARY)  # type: ignore[arg-type]
        drafter._steps = device  # type: ignore[assignment]
        with monkeypatch.context() as patch:
            subject = speculating(patch, drafter, RowsModel(), CAPACITY, most=3)
        off = plain(RowsModel(), CAPACITY)
        for prompt in ([1, 2, 3], [1, 2, 3, 4], [1, 7]):
            for generator in (off, subject):
                generator.begin_stream_ex(prompt, settings, max_new_tokens=24)
            expected = results_of(off)
            results = [subject.stream_ex() for _ in range(5)]
            device.fault = "logits"
            results += results_of(subject)
            assert results == expected
            assert subject.speculated.accepted >= subject.speculated.drafted - 3 > 10
            assert device.memory.written[: device.memory.length] == subject.tokens[: device.memory.length]
        assert (device.drawn == 0) is (settings is unknown)


def spoken(subject: StreamingGenerator, settings: Sampling, count: int = 30) -> list[int]:
    subject.set_stop_conditions([])
    subject.begin_stream_ex([1, 2, 3], settings, max_new_tokens=count)
    results_of(subject)
    return subject.tokens


def test_right_drafts_are_tried_as_soon_as_nothing_is_in_flight() -> None:
    """The first three steps wait for the prompt; then 5 drafts and the token after them at a time, and what is left."""
    subject, device = on_device(True, Oracle(1))
    assert spoken(subject, SETTINGS[1]) == spoken(on_host(), SETTINGS[1])
    assert device.rows == [1, 1, 1, 6, 6, 6, 6, 3]
    assert subject.speculated[:2] == (22, 22)


def test_wrong_drafts_cost_a_step_each_and_no_more() -> None:
    subject, device = on_device(True, Oracle(0))
    assert spoken(subject, SETTINGS[1]) == spoken(on_host(), SETTINGS[1])
    assert device.rows == [1, 1, 1, *[6] * 22, 5, 4, 3, 2, 1]
    assert subject.speculated == (5 * 22 + 10, 0, 1.0)


def test_a_step_has_no_more_rows_than_the_device_has_room_for() -> None:
    subject, device = on_device(True, Oracle(1))
    subject._decoder._sources = [source._replace(pace=Always(20)) for source in subject._decoder._sources]  # type: ignore[arg-type]
    assert spoken(subject, SETTINGS[1]) == spoken(on_host(), SETTINGS[1])
    assert device.rows == [1, 1, 1, 8, 8, 8, 3]


class Hasty:
    """Has an idea after every token but never a second one."""

    is_model = False

    def __init__(self) -> None:
        self.asked: list[int] = []

    def begin(self, _chooser: object) -> bool:
        return True

    def propose(self, tokens: Sequence[int], _count: int) -> list[int]:
        self.asked.append(len(tokens))
        return [0] if len(tokens) % 2 else []


def test_an_idea_that_comes_to_nothing_interrupts_nothing() -> None:
    """It keeps a step from being queued, and the next token shows what it was worth: some are always in flight."""
    drafter = Hasty()
    subject, device = on_device(True, drafter)
    least = DEPTH
    usual = device.queue

    def queue(drafts: Sequence[int] = ()) -> Callable[[], list[int]]:
        nonlocal least
        least = min(least, device.in_flight) if device.rows else least
        return usual(drafts)

    device.queue = queue  # type: ignore[method-assign]
    assert spoken(subject, SETTINGS[1]) == spoken(on_host(), SETTINGS[1])
    assert device.rows == [1] * 30
    assert len(set(drafter.asked)) > 20
    assert least == 1


def test_no_drafts_come_among_tokens_that_penalties_count() -> None:
    """N-grams are left out; to try what a draft model says the host draws."""
    subject, device = on_device(True, Oracle(1))
    assert spoken(subject, SETTINGS[2]) == spoken(on_host(), SETTINGS[2])
    assert (device.drawn, subject.speculated) == (30, (0, 0, 1.0))
    drafter = Oracle(1)
    drafter.is_model = True
    subject, device = on_device(True, drafter)
    assert spoken(subject, SETTINGS[2]) == spoken(on_host(), SETTINGS[2])
    assert device.drawn == 0
    assert subject.speculated.drafted > 10


def test_a_model_is_not_asked_while_steps_are_in_flight() -> None:
    class Asked(Oracle):
        is_model = True

        def propose(self, tokens: Sequence[int], count: int) -> list[int]:
            assert device.in_flight == 0
            return super().propose(tokens, count)

    subject, device = on_device(False, Asked(1))
    assert spoken(subject, SETTINGS[1]) == spoken(on_host(), SETTINGS[1])
    assert subject.speculated.accepted == 22


class Noted(Always):
    """Writes down what it is told."""

    def __init__(self) -> None:
        super().__init__(3)
        self.times: list[tuple[int, float]] = []

    def stepped(self, seconds: float) -> None:
        self.times.append((0, seconds))

    def drafted(self, count: int, accepted: Sequence[int], seconds: float) -> None:
        assert accepted == [count]
        self.times.append((count, seconds))


def test_times_are_from_one_arrival_to_the_next() -> None:
    """All but the first, which waits for the prompt: here the clock is n squared when it is read for the nth time."""
    device, pace, drafter = Device(Memory(), True), Noted(), Oracle(1)
    drafter._sampling = SETTINGS[1]
    drafts = PacedDrafts([Source(drafter, pace)])  # type: ignore[arg-type]
    squares = (float(n * n) for n in range(100))
    subject = DeviceDecoder(device, device.memory, SETTINGS[1], CAPACITY, drafts, lambda: next(squares))  # type: ignore[arg-type]
    tokens = [1, 2, 3]
    for _ in range(11):
        tokens.append(subject.next(tokens))
    assert pace.times == [(0, 1.0), (0, 3.0), (3, 5.0), (3, 7.0)]
    assert drafts.statistics == (9, 6, pytest.approx(10 * 1.0 / 16))
