"""Masks of constraints are made while a step is computed, and whose filter fails fails alone."""

from dataclasses import replace

import pytest
import torch

from exl2chat.engine.compile_grammar import compile_regex
from exl2chat.engine.replies.jobs import Failed
from exl2chat.engine.token_table import TokenTable
from tests.engine.dynamic_jobs import drain, generator, job, prompt, reply, streamed
from tests.engine.fake_model import END, VOCABULARY
from tests.engine.tiny_models import ByteTokenizer


def letters():
    return compile_regex(TokenTable(ByteTokenizer(), VOCABULARY, {END}), "[a-z]+")


def test_masks_are_made_before_logits_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = generator()
    serial = subject.enqueue(job(prompt(10), 8, constraint=letters()))
    chooser, made = subject._jobs[serial].task.chooser, []

    class Awaited:
        def __init__(self, tensor: torch.Tensor) -> None:
            self._tensor = tensor

        def __getitem__(self, at: slice) -> "Awaited":
            return Awaited(self._tensor[at])

        def numpy(self, force: bool = False):
            made.append(chooser._prepared)
            return self._tensor.numpy(force=force)

    run = subject._executor.run

    def running(*arguments):
        computed = run(*arguments)
        return replace(computed, rows=[Awaited(row) for row in computed.rows])

    monkeypatch.setattr(subject._executor, "run", running)
    drain(subject)
    assert made
    assert all(made)


def test_a_filter_that_fails_meanwhile_fails_its_own_job_alone() -> None:
    class Broken:
        accepting = finished = False

        def begin(self, *_: object) -> None:
            """Nothing to do."""

        def forced(self) -> list[int]:
            return []

        def clone(self) -> "Broken":
            return self

        def mask(self) -> None:
            assert not torch.is_inference_mode_enabled()  # tensors made here may be written again elsewhere
            raise OSError("no words left")

    subject = generator()
    broken = subject.enqueue(job(prompt(10), 8, constraint=Broken()))
    other = subject.enqueue(job(prompt(12, 1), 8))
    results = drain(subject)
    failed = [result for result in results if isinstance(result, Failed)]
    assert [(result.serial, str(result.error)) for result in failed] == [(broken, "no words left")]
    assert reply(results, other) == streamed(prompt(12, 1), 8)
