"""Jobs whose tokens a device draws, with an executor that does what a GPU would."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from exl2chat.engine.device_draws import Drawing
from exl2chat.engine.executor import Computed
from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.replies.jobs import Failed, Job
from exl2chat.engine.sampler import Sampler
from exl2chat.engine.scheduler import Row, StepPlan
from exl2chat.settings import Sampling
from tests.engine.dynamic_jobs import GREEDY, SETTINGS, drain, final, generator, job, prompt, reply, streamed


class Device:
    """Draws from an executor's logits, with a sampler that knows no more than a `Drawing` says. `drew`: how many tokens
    of each job."""

    def __init__(self, subject: DynamicGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drew: dict[int, int] = {}
        self.broken = False
        self._run = subject._executor.run
        monkeypatch.setattr(subject._executor, "run", self.run)

    def run(self, plan: StepPlan, draws: Mapping[int, Drawing], *meanwhile: Callable[[], None]) -> Computed:
        computed = self._run(plan, {}, *meanwhile)
        drawn = {}
        for place, row in enumerate(plan.decode):
            if row.job in draws:
                drawn[row.job] = self.draw(row, draws[row.job], computed.logits(place))
                self.drew[row.job] = self.drew.get(row.job, 0) + len(row.tokens)
        return replace(computed, drawn=drawn)

    def draw(self, row: Row, drawing: Drawing, logits: np.ndarray) -> list[int]:
        """After each token of a row, which begins with the last one of the text, or with some before it."""
        known = len(drawing.text) - row.start
        assert list(drawing.text[row.start :]) == list(row.tokens[:known])
        assert known == len(row.tokens) or not drawing.counts
        sampler = Sampler(drawing.settings, drawing.text)
        tokens = [sampler.sample(each, row.start + place + 1) for place, each in enumerate(logits)]
        return [-1] * len(tokens) if self.broken else tokens


def test_replies_are_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last settings it draws every token itself: no kernel knows mirostat."""
    subject = generator()
    device = Device(subject, monkeypatch)
    wanted = [(prompt(20 + 9 * n, n), 20, settings) for n, settings in enumerate(SETTINGS)]
    serials = [subject.enqueue(job(*each)) for each in wanted]
    results = drain(subject)
    assert [reply(results, serial) for serial in serials] == [streamed(*each) for each in wanted]
    assert device.drew == dict.fromkeys(serials[:3], 20)


def test_the_host_draws_where_a_token_may_not_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a banned text was taken back, its place is the host's; the rest is the device's."""
    settings = Sampling(temperature=1.0, seed=3, repetition_penalty=1.3)
    subject = generator()
    serial = subject.enqueue(job(prompt(9), 30, settings))
    said = final(drain(subject), serial).text
    wanted = Job((tuple(prompt(9)),), 30, settings, banned=(said[10:12],))
    expected = generator()
    serial = expected.enqueue(wanted)
    expected_reply = reply(drain(expected), serial)
    subject = generator()
    device = Device(subject, monkeypatch)
    serial = subject.enqueue(wanted)
    assert reply(drain(subject), serial) == expected_reply
    assert device.drew[serial] > 0


def test_logits_that_are_not_numbers_fail_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = generator()
    device = Device(subject, monkeypatch)
    device.broken = True
    serial = subject.enqueue(job(prompt(9), 5, GREEDY))
    [failed] = [result for result in drain(subject) if isinstance(result, Failed)]
    assert (failed.serial, subject.remaining) == (serial, 0)
    assert "not numbers" in str(failed.error)


class Counted(torch.Tensor):
    """Logits that know how many rows of them came to the host."""

    rows = 0

    def numpy(self, *, force: bool = False) -> np.ndarray:
        Counted.rows += len(self)
        return super().numpy(force=force)


def test_only_logits_that_a_token_is_drawn_from_come_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is given the last tokens of a prompt in the step that draws the first of the reply."""
    subject = generator()
    subject._scheduler._last = 8
    run = subject._executor.run

    def counted(*arguments: Any) -> Computed:
        computed = run(*arguments)
        return replace(computed, rows=[row.as_subclass(Counted) for row in computed.rows])

    monkeypatch.setattr(subject._executor, "run", counted)
    monkeypatch.setattr(Counted, "rows", 0)
    serial = subject.enqueue(job(prompt(6), 5, GREEDY))
    assert reply(drain(subject), serial) == streamed(prompt(6), 5)
    assert Counted.rows == 5
