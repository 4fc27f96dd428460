"""Prompts side by side: each is completed as if it were alone."""

import numpy as np
import pytest

from exl2chat.engine.cache import PAGE
from exl2chat.engine.generators.base import BaseGenerator
from exl2chat.engine.replies.jobs import Choice, Job
from exl2chat.engine.stopping import StopConditions
from exl2chat.errors import ContextError, UsageError
from exl2chat.settings import Sampling
from tests.engine.dynamic_jobs import GREEDY, SETTINGS, prompt, streamed, text
from tests.engine.tiny_models import ByteTokenizer, byte_model


def generator(context: int = 4 * PAGE) -> BaseGenerator:
    model = byte_model()
    return BaseGenerator(model, model.new_cache(context), ByteTokenizer())  # type: ignore[arg-type]


def job(ids: tuple[int, ...], count: int, sampling: Sampling = GREEDY, **more: object) -> Job:
    return Job((ids,), count, sampling, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", SETTINGS)
def test_prompts_of_any_length_are_completed_as_they_would_be_alone(sampling: Sampling) -> None:
    """exllamav2 pads them, and one prompt's padding is in the others' attention (appendix B-1)."""
    prompts = [prompt(length, length) for length in (3, 280, 40, 120)]
    done = generator().generate([job(ids, 25, sampling) for ids in prompts])
    assert [completion.reply for completion in done] == [streamed(ids, 25, sampling) for ids in prompts]
    assert [completion.tokens[:-25] for completion in done] == [list(ids) for ids in prompts]
    assert {(completion.cut, completion.reason) for completion in done} == {(0, "max_new_tokens")}


def test_more_prompts_than_fit_take_turns() -> None:
    prompts = [prompt(200, n) for n in range(5)]
    done = generator(2 * PAGE).generate([job(ids, 20) for ids in prompts])
    assert [completion.reply for completion in done] == [streamed(ids, 20) for ids in prompts]


def test_a_prompt_that_is_too_long_loses_its_beginning_and_says_so() -> None:
    """exllamav2 cuts it without a word."""
    subject = generator(PAGE)
    ids = prompt(300)
    (completion,) = subject.generate([job(ids, 20)])
    assert completion.cut == 300 + 20 - PAGE
    assert completion.reply == streamed(ids[completion.cut :], 20)
    assert subject.full()
    subject.generate([job(prompt(5), 20)])
    assert not subject.full()
    with pytest.raises(ContextError, match="no room"):
        subject.generate([job(ids, PAGE)])


def test_a_stop_id_ends_its_own_reply_only() -> None:
    first, second = prompt(10), prompt(10, 1)
    stop = streamed(first, 10)[4]
    done = generator().generate([job(ids, 10, stops=StopConditions.of([stop])) for ids in (first, second)])
    assert done[0].reply == streamed(first, 10)[: streamed(first, 10).index(stop)]
    assert done[0].reason == "stop_token"
    assert done[0].text == text(done[0].reply)
    assert stop not in done[1].reply


def test_an_abort_keeps_what_is_written() -> None:
    asked: list[None] = []

    def abort() -> bool:
        asked.append(None)
        return len(asked) > 8

    subject = generator()
    (completion,) = subject.generate([job(prompt(10), 50)], abort)
    assert completion.reply == streamed(prompt(10), 50)[: len(completion.reply)]
    assert 0 < len(completion.reply) < 50
    assert completion.reason is None
    assert len(subject.generate([job(prompt(10), 5)])[0].reply) == 5


def test_an_error_ends_all_and_leaves_nothing_behind() -> None:
    def refuse(choice: Choice) -> None:
        raise ValueError(choice.token)

    subject = generator()
    with pytest.raises(ValueError):
        subject.generate([job(prompt(5), 5), job(prompt(5), 5, hooks=(refuse,))])
    with pytest.raises(UsageError):
        subject.generate([job(prompt(5), 5), job((), 5)])
    assert len(subject.generate([job(prompt(5), 5)])[0].reply) == 5


def test_guidance_is_refused() -> None:
    with pytest.raises(UsageError, match="guidance"):
        generator().generate([Job(((1,), (2,)), 5, GREEDY, guidance=2.0)])


def test_warming_up_leaves_no_trace() -> None:
    subject = generator()
    subject.warm_up()
    assert not subject.completions
    assert np.array_equal(subject.generate([job(prompt(30), 5)])[0].reply, streamed(prompt(30), 5))
