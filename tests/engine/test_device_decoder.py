"""Steps in flight over a device made of lists: replies and cache are those of a host that takes one step at a time."""

import contextlib
import random
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exl2chat.engine import decoders, penalties
from exl2chat.engine.decoders import Decoder
from exl2chat.engine.device_decoder import DEPTH, DeviceDecoder
from exl2chat.engine.drafting import Drafter, ModelDrafter, SuffixDrafter
from exl2chat.engine.embeddings import InputEmbeddings
from exl2chat.engine.generators.streaming import Extras, StreamingGenerator, StreamResult
from exl2chat.engine.paced_drafts import PacedDrafts, Source
from exl2chat.engine.replies.choosing import ON_DEVICE, Chooser, known_to_device
from exl2chat.engine.sampler import Sampler
from exl2chat.errors import ChatError
from exl2chat.settings import Sampling
from tests.engine.fake_model import VOCABULARY, Claimed, FakeModel, FakeTokenizer
from tests.engine.speculative import Always, RowsModel, plain, results_of, speculating

CAPACITY = 40
SETTINGS = (Sampling(temperature=0), Sampling(seed=1), Sampling(seed=2, repetition_penalty=1.5, penalty_range=9))
NO_NUMBERS = -1


class Memory(Claimed):
    """A cache: what was ever written stays behind its end, as on a GPU."""

    def __init__(self) -> None:
        self.capacity, self.length = CAPACITY, 0
        self.written = [-7] * CAPACITY

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)

    def write(self, place: int, token: int) -> None:
        assert 0 <= place < CAPACITY
        self.written[place] = token


class Device:
    """A model, and the stream that its work is queued on. It works when it is asked for something, or at once."""

    adapters = ()
    embedded = ()
    inputs = FakeModel.inputs

    def __init__(self, memory: Memory, eager: bool) -> None:
        self.memory, self.eager = memory, eager
        self.device, self.dtype, self.config = torch.device("cpu"), torch.bfloat16, FakeModel().config
        self.stream: deque[Callable[[], None]] = deque()
        self.in_flight = self.drawn = 0
        self.rows: list[int] = []  # of each step
        self.fault: str | None = None
        self._logits = FakeModel().logits

    # the host's way

    def forward(self, tokens: torch.Tensor, _cache: Memory, last_only: bool) -> torch.Tensor:
        self.run()
        rows = []
        for token in tokens.tolist():
            self.memory.write(self.memory.length, token)
            self.memory.length += 1
            rows.append(self._logits(self.memory.written[: self.memory.length]))
        return torch.from_numpy(np.stack(rows[-1:] if last_only else rows))

    def run(self) -> None:
        while self.stream:
            self.stream.popleft()()

    # its own: engine/device_steps.py

    def start(self, tokens: Sequence[int], settings: Sampling) -> None:
        self.run()
        missing = torch.tensor(tokens[self.memory.length : -1], dtype=torch.int64)
        if len(missing):
            self.forward(missing, self.memory, True)
        self.in_flight = 0
        self._sampler, self._counts = Sampler(settings, tokens), penalties.active(settings)
        self.follow(tokens)

    def follow(self, tokens: Sequence[int]) -> None:
        assert self.in_flight == 0
        self._position, self._token = len(tokens) - 1, tokens[-1]

    def queue(self, drafts: Sequence[int] = ()) -> Callable[[], list[int]]:
        if self.fault == "queue":
            self.fault = None
            raise RuntimeError("out of memory")
        assert not (drafts and (self.in_flight or self._counts))
        self.in_flight += 1
        assert self.in_flight <= DEPTH
        self.rows.append(1 + len(drafts))
        drawn: list[int] = []
        self.stream.append(lambda: drawn.extend(self._step(drafts)))
        if self.eager:
            self.run()

        def take() -> list[int]:
            self.run()
            self.drawn += 1
            self.in_flight -= 1
            return drawn

        return take

    def _step(self, drafts: Sequence[int]) -> list[int]:
        drawn = []
        for place, token in enumerate((self._token, *drafts), self._position):
            self.memory.write(place, token)
            drawn.append(self._sampler.sample(self._logits(self.memory.written[: place + 1]), place + 1))
        if self.fault == "logits":
            self.fault = None
            drawn = [NO_NUMBERS] * len(drawn)
        self._position, self._token = self._position + 1, drawn[0]
        self._sampler.observe(self._token)
        return drawn


class Oracle:
    """Drafts as right as chance has it, and any number of them."""

    is_model = False

    def __init__(self, right: float, seed: int = 0) -> None:
        self._right, self._chance = right, random.Random(seed)

    def begin(self, chooser: Chooser) -> bool:
        self._sampling = chooser.sampling
        return True

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        sequence, sampler = list(tokens), Sampler(self._sampling, tokens)
        for _ in range(count if self._right in (0, 1) else self._chance.randint(0, count)):
            token = sampler.sample(FakeModel().logits(sequence), len(sequence))
            sequence.append(token if self._chance.random() < self._right else (token + 1) % 256)
        return sequence[len(tokens) :]


def on_device(eager: bool, *drafters: Drafter) -> tuple[StreamingGenerator, Device]:
    device = Device(Memory(), eager)
    subject = StreamingGenerator(device, device.memory, FakeTokenizer())  # type: ignore[arg-type]

    class OnDevice(Decoder):
        def begin(self, chooser: Chooser, longest: int) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(decoders, "runs_on_device", lambda *_: True)
                patch.setattr(decoders, "DeviceSteps", lambda *_: device)
                super().begin(chooser, longest)

    decoder = subject._decoder = OnDevice(device, device.memory, VOCABULARY, drafters)  # type: ignore[arg-type]
    decoder._sources = [Source(drafter, Always(5)) for drafter in drafters]  # type: ignore[arg-type]
    return subject, device


def on_host() -> StreamingGenerator:
    device = Device(Memory(), eager=True)
    return StreamingGenerator(device, device.memory, FakeTokenizer())  # type: ignore[arg-type]


class Turn(msgspec.Struct, frozen=True):
    """A reply: to a prompt that keeps so much of the sequence before, read for so many steps or until it ends."""

    kept: int
    added: list[int]
    settings: Sampling
    limit: int | None
    stops: list[int]
    steps: int
    aborted: bool
    fault: str | None


TURNS = st.builds(
    Turn,
    kept=st.integers(0, CAPACITY),
    added=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    settings=st.sampled_from(SETTINGS),
    limit=st.none() | st.integers(1, 12),
    stops=st.lists(st.integers(0, 255), max_size=80),
    steps=st.integers(0, CAPACITY),
    aborted=st.booleans(),
    fault=st.sampled_from([None, None, None, "queue", "logits"]),
)


DRAFTERS = (None, lambda: Oracle(1), lambda: Oracle(0), lambda: Oracle(0.8), SuffixDrafter)


def play(subject: StreamingGenerator, prompt: list[int], turn: Turn) -> list[StreamResult]:
    stopped = False
    subject.set_stop_conditions(turn.stops)
    subject.begin_stream_ex(prompt, turn.settings, max_new_tokens=turn.limit, abort=lambda: stopped)
    results: list[StreamResult] = []
    while len(results) < turn.steps and not (results and results[-1].eos):
        results.append(subject.stream_ex())
    stopped = turn.aborted
    return [*results, subject.stream_ex()] if stopped else results


@given(st.booleans(), st.lists(TURNS, min_size=1, max_size=6), st.sampled_from(DRAFTERS))
def test_replies_and_cache_are_those_of_one_step_at_a_time(
    eager: bool, turns: list[Turn], drafter: Callable[[], Drafter] | None
) -> None:
    (subject, device), host = on_device(eager, *([drafter()] if drafter else [])), on_host()
    for turn in turns:
        prompt = [*host.tokens[: turn.kept], *turn.added][: CAPACITY - 1]
        expected = play(host, prompt, turn)
        device.fault = turn.fault
        with contextlib.suppress(ChatError, RuntimeError):
            assert play(subject, prompt, turn) == expected
            device.fault = None
        if subject.tokens != host.tokens:  # it failed as it was told
            assert play(subject, prompt, turn) == expected
        memory = device.memory
        assert subject.tokens == host.tokens
        assert memory.length == host._cache.length
        device.run()
        assert memory.written[: memory.length] == subject.tokens[: memory.length]


@pytest.mark.parametrize("drafters", [[], [Oracle(0.8)]], ids=["none", "drafts"])
def test_a_failing_step_does_not_change_the_reply(drafters: list[Drafter]) -> None:
    (subject, device), host = on_device(True, *drafters), on_host()
    expected = play(host, [1, 2], Turn(0, [], SETTINGS[1], 20, [], CAPACITY, False, None))
    subject.set_stop_conditions([])
    subject.begin_stream_ex([1, 2], SETTINGS[1], max_new_tokens=20)
    results: list[StreamResult] = []
    faults = ["queue", "logits"] * 3
    while not results or not results[-1].eos:
        if len(results) % 3 == 1 and faults:
            device.fault = faults.pop()
        try:
            results.append(subject.stream_ex())
        except (ChatError, RuntimeError):
            continue
    assert results == expected
    assert not faults


@pytest.mark.parametrize("drafters", [[], [Oracle(1)]], ids=["none", "drafts"])
def test_a_limit_is_not_overrun_by_steps_in_flight(drafters: list[Drafter]) -> None:
    subject, device = on_device(True, *drafters)
    play(subject, [1, 2], Turn(0, [], SETTINGS[0], 5, [], CAPACITY, False, None))
    assert device.memory.written[6:] == [-7] * (CAPACITY - 6)


@pytest.mark.parametrize("drafters", [[], [Oracle(1)]], ids=["none", "drafts"])
def test_the_cache_used_by_another_is_taken_up_again(drafters: list[Drafter]) -> None:
    (subject, device), host = on_device(True, *drafters), on_host()
    expected = play(host, [1, 2, 3], Turn(0, [], SETTINGS[1], 9, [], CAPACITY, False, None))
    subject.set_stop_conditions([])
    subject.begin_stream_ex([1, 2, 3], SETTINGS[1], max_new_tokens=9)
    results = [subject.stream_ex() for _ in range(4)]
    device.memory.truncate(2)
    device.forward(torch.tensor([9, 9, 9]), device.memory, last_only=True)
    device.memory.truncate(2)
    results += [subject.stream_ex() for _ in range(5)]
    assert results == expected


def test_a_token_is_told_as_often_as_it_is_asked_for() -> None:
    """As when somebody was interrupted before it had a place in the sequence."""
    device = Device(Memory(), eager=True)
    subject = DeviceDecoder(device, device.memory, SETTINGS[1], CAPACITY, PacedDrafts())  # type: ignore[arg-type]
    tokens = [1, 2, 3]
    told = [subject.next(tokens), subject.next(tokens), subject.next(tokens)]
    assert told == [told[0]] * 3
    tokens.append(told[0])
    assert subject.next(tokens) != subject.next([1, 2])


@pytest.mark.parametrize("drafters", [[], [Oracle(0.8)]], ids=["none", "drafts"])
def test_the_host_takes_over_for_a_token_that_the_device_may_not_draw(drafters: list[Drafter]) -> None:
    """The first of a healed prompt, those where a banned string began, and those for which more is forbidden."""
    extras = Extras(token_healing=True, banned_strings=tuple("abcdefghijklmnopqrstuvwxyz0123456789"))
    for settings in SETTINGS:
        sequences, rewound, drawn = [], 0, 0
        (subject, device), host = on_device(True, *drafters), on_host()
        for generator in (subject, host):
            generator.begin_stream_ex([65, 66, 67], settings, extras=extras)
            while not (result := generator.stream_ex(banned=[1, 2] if len(generator.tokens) % 7 == 0 else ())).eos:
                rewound += result.suppressed != ""
            drawn = drawn or device.drawn
            sequences.append(generator.tokens)
        assert sequences[0] == sequences[1]
        assert rewound > 4
        assert drawn > 10


@pytest.mark.parametrize("settings", [Sampling(), Sampling(temperature=0), Sampling(top_k=3, min_p=0.1, seed=1)])
def test_the_device_knows_the_common_settings(settings: Sampling) -> None:
    assert known_to_device(settings)


def test_the_device_knows_no_other_field() -> None:
    others = {
        "top_n_sigma": 1.0, "top_a": 0.2, "tfs": 0.9, "typical_p": 0.9, "mirostat_tau": 2.0, "mirostat_eta": 0.2,
        "mirostat_mu": 3.0, "smoothing_factor": 0.3, "smoothing_curve": 2.0, "min_temperature": 0.5,
        "max_temperature": 2.0, "temperature_exponent": 2.0, "temperature_last": True, "skew": 0.5,
        "xtc_probability": 0.5, "xtc_threshold": 0.2, "xtc_ignore_tokens": (1,), "dry_multiplier": 0.8,
        "dry_base": 2.0, "dry_allowed_length": 3, "dry_range": 9, "dry_max_length": 9, "dry_breakers": (1,),
        "step_order": "top_k", "logit_bias": ((1, 1.0),), "allowed_tokens": (1,), "banned_tokens": (1,),
    }  # fmt: skip
    assert others.keys() | ON_DEVICE == set(Sampling.__struct_fields__)
    for name, value in others.items():
        assert not known_to_device(msgspec.structs.replace(Sampling(), **{name: value})), name


def test_the_token_after_a_row_of_embeddings_is_drawn_by_the_host() -> None:
    """A step of the device begins with a token."""
    picture = InputEmbeddings.of(torch.ones(2, 8))
    (subject, device), host = on_device(True), on_host()
    for each in (subject, host):
        each._model.embedded = (picture,)  # type: ignore[misc]
        each.set_stop_conditions([])
        each.begin_stream_ex([1, *picture.ids], SETTINGS[1], max_new_tokens=9, embeddings=[picture])
        while not each.stream_ex().eos:
            pass
    assert subject.tokens == host.tokens
    assert device.drawn == 8


# Drafts


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
