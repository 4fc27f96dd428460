"""Steps in flight over a device made of lists: replies and cache are those of a host that takes one step at a time."""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exl2chat.engine.decoders import Decoder
from exl2chat.engine.device_decoder import DEPTH, DeviceDecoder
from exl2chat.engine.drafting import ModelDrafter
from exl2chat.engine.embeddings import InputEmbeddings
from exl2chat.engine.generators.streaming import Extras, StreamingGenerator, StreamResult
from exl2chat.engine.replies.choosing import ON_DEVICE, Chooser, known_to_device
from exl2chat.engine.sampler import Sampler
from exl2chat.errors import ChatError
from exl2chat.settings import Sampling
from tests.engine.fake_model import VOCABULARY, Claimed, FakeModel, FakeTokenizer
from tests.engine.speculative import RowsModel, plain, results_of, speculating

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
        self.fault: str | None = None
        self._logits = FakeModel().logits

    # the host's way

    def forward(self, tokens: torch.Tensor, _cache: Memory, last_only: bool) -> torch.Tensor:
        assert last_only
        self.run()
        for token in tokens.tolist():
            self.memory.write(self.memory.length, token)
            self.memory.length += 1
        return torch.from_numpy(self._logits(self.memory.written[: self.memory.length])).unsqueeze(0)

    def run(self) -> None:
        while self.stream:
            self.stream.popleft()()

    # its own: engine/device_steps.py

    def start(self, tokens: Sequence[int], settings: Sampling) -> None:
        missing = torch.tensor(tokens[self.memory.length : -1], dtype=torch.int64)
        if len(missing):
            self.forward(missing, self.memory, True)
        self.in_flight, self._position, self._token = 0, len(tokens) - 1, tokens[-1]
        self._sampler = Sampler(settings, tokens)

    def queue(self) -> Callable[[], int]:
        if self.fault == "queue":
            self.fault = None
            raise RuntimeError("out of memory")
        self.in_flight += 1
        assert self.in_flight <= DEPTH
        drawn: list[int] = []
        self.stream.append(lambda: drawn.append(self._step()))
        if self.eager:
            self.run()

        def take() -> int:
            self.run()
            self.drawn += 1
            self.in_flight -= 1
            return drawn[0]

        return take

    def _step(self) -> int:
        self.memory.write(self._position, self._token)
        self._position += 1
        if self.fault == "logits":
            self.fault = None
            return NO_NUMBERS
        self._token = self._sampler.sample(self._logits(self.memory.written[: self._position]), self._position)
        self._sampler.observe(self._token)
        return self._token


def on_device(eager: bool) -> tuple[StreamingGenerator, Device]:
    device = Device(Memory(), eager)
    subject = StreamingGenerator(device, device.memory, FakeTokenizer())  # type: ignore[arg-type]

    class OnDevice(Decoder):
        def begin(self, chooser: Chooser, longest: int) -> None:
            super().begin(chooser, longest)
            self._device = DeviceDecoder(device, device.memory, chooser.sampling, longest)  # type: ignore[arg-type]

    subject._decoder = OnDevice(device, device.memory, VOCABULARY)  # type: ignore[arg-type]
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


def play(subject: StreamingGenerator, prompt: list[int], turn: Turn) -> list[StreamResult]:
    stopped = False
    subject.set_stop_conditions(turn.stops)
    subject.begin_stream_ex(prompt, turn.settings, max_new_tokens=turn.limit, abort=lambda: stopped)
    results: list[StreamResult] = []
    while len(results) < turn.steps and not (results and results[-1].eos):
        results.append(subject.stream_ex())
    stopped = turn.aborted
    return [*results, subject.stream_ex()] if stopped else results


@given(st.booleans(), st.lists(TURNS, min_size=1, max_size=6))
def test_replies_and_cache_are_those_of_one_step_at_a_time(eager: bool, turns: list[Turn]) -> None:
    (subject, device), host = on_device(eager), on_host()
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


def test_a_failing_step_does_not_change_the_reply() -> None:
    (subject, device), host = on_device(True), on_host()
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


def test_a_limit_is_not_overrun_by_steps_in_flight() -> None:
    subject, device = on_device(True)
    play(subject, [1, 2], Turn(0, [], SETTINGS[0], 5, [], CAPACITY, False, None))
    assert device.memory.written[6:] == [-7] * (CAPACITY - 6)


def test_the_cache_used_by_another_is_taken_up_again() -> None:
    (subject, device), host = on_device(True), on_host()
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
    subject = DeviceDecoder(device, device.memory, SETTINGS[1], CAPACITY)  # type: ignore[arg-type]
    tokens = [1, 2, 3]
    told = [subject.next(tokens), subject.next(tokens), subject.next(tokens)]
    assert told == [told[0]] * 3
    tokens.append(told[0])
    assert subject.next(tokens) != subject.next([1, 2])


def test_the_host_takes_over_for_a_token_that_the_device_may_not_draw() -> None:
    """The first of a healed prompt, those where a banned string began, and those for which more is forbidden."""
    extras = Extras(token_healing=True, banned_strings=tuple("abcdefghijklmnopqrstuvwxyz0123456789"))
    for settings in SETTINGS:
        sequences, rewound, drawn = [], 0, 0
        (subject, device), host = on_device(True), on_host()
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
