"""Steps in flight over a device made of lists: replies and cache are those of a host that takes one step at a time."""

import contextlib
from collections.abc import Callable

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exl2chat.engine.device_decoder import DeviceDecoder
from exl2chat.engine.drafting import Drafter, SuffixDrafter
from exl2chat.engine.embeddings import InputEmbeddings
from exl2chat.engine.generators.streaming import Extras, StreamingGenerator, StreamResult
from exl2chat.engine.paced_drafts import PacedDrafts
from exl2chat.engine.replies.choosing import ON_DEVICE, known_to_device
from exl2chat.errors import ChatError
from exl2chat.settings import Sampling
from tests.engine.fake_device import CAPACITY, SETTINGS, Device, Memory, Oracle, on_device, on_host


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
