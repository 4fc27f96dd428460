"""How jobs are drawn and how they end: stop conditions, banned strings, constraints, hooks and guidance."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from exl2chat.engine.compile_grammar import compile_regex
from exl2chat.engine.replies.jobs import Choice, Job
from exl2chat.engine.replies.language import Language
from exl2chat.engine.replies.task import Task
from exl2chat.engine.stopping import StopConditions
from exl2chat.engine.token_table import TokenTable
from exl2chat.errors import ChatError, ContextError, UsageError
from exl2chat.settings import Sampling
from tests.engine.dynamic_jobs import (
    GREEDY,
    LIMITS,
    SETTINGS,
    drain,
    final,
    generator,
    job,
    prompt,
    reply,
    streamed,
    text,
)
from tests.engine.fake_model import END, VOCABULARY
from tests.engine.tiny_models import ByteTokenizer, byte_model


def test_a_stop_id_ends_a_reply_and_is_no_text() -> None:
    ids = prompt(12)
    expected = streamed(ids, 10)
    stop = expected[6]
    subject = generator()
    subject.enqueue(job(ids, 10, stops=StopConditions.of([stop])))
    results = drain(subject)
    at = expected.index(stop)
    assert reply(results, 0) == expected[:at]
    assert (final(results, 0).reason, final(results, 0).token) == ("stop_token", stop)
    assert final(results, 0).new_tokens == at + 1


def test_a_stop_id_is_not_drawn_before_its_time() -> None:
    ids = prompt(12)
    stop = streamed(ids, 1)[0]
    subject = generator()
    subject.enqueue(job(ids, 10, stops=StopConditions.of([stop]), min_new_tokens=3))
    assert final(drain(subject), 0).new_tokens > 3


def test_without_stop_conditions_a_reply_ends_at_its_limit_to_the_token() -> None:
    """exllamav2 stops short by the length of a draft (appendix B-7)."""
    subject = generator()
    for count in (1, 2, 7):
        serial = subject.enqueue(job(prompt(9), count))
        results = drain(subject)
        assert len(reply(results, serial)) == final(results, serial).new_tokens == count


def test_banned_strings_are_taken_back_from_the_cache_too() -> None:
    """Up to the last token. The oracle computes every token from the whole text."""
    model, ids = byte_model(), prompt(250)
    settings = Sampling(temperature=0, allowed_tokens=tuple(b"abcde"))
    plain = text(streamed(ids, 40, settings))
    wanted = job(ids, 40, settings, banned=(plain[3:5], plain[11:14], plain[-2:]))
    task = Task(wanted, Language(ByteTokenizer(), VOCABULARY))  # type: ignore[arg-type]
    rewound, ended = 0, False
    while not ended:
        tokens = torch.tensor(task.chooser.tokens)
        logits = model.forward(tokens, model.new_cache(512), last_only=True).numpy()
        advance = task.push(task.chooser.draw(logits))
        rewound += advance.rewound
        ended = advance.end is not None
    assert rewound > 2
    subject = generator()
    serials = [subject.enqueue(wanted), subject.enqueue(job(ids, 40, settings))]
    results = drain(subject)
    assert reply(results, serials[0]) == task.chooser.reply
    assert final(results, serials[0]).new_tokens == 40
    assert reply(results, serials[1]) == list(plain.encode())


def test_what_a_job_lacks_is_said_when_it_is_enqueued() -> None:
    subject = generator(pages=2)
    with pytest.raises(ContextError, match="do not fit"):
        subject.enqueue(job(prompt(500), 100))
    with pytest.raises(UsageError, match="no tokens"):
        subject.enqueue(job((), 1))
    with pytest.raises(UsageError, match="are no tokens"):
        subject.enqueue(job((VOCABULARY,), 1))
    with pytest.raises(UsageError, match="max_new_tokens"):
        subject.enqueue(job((1,), 0))
    with pytest.raises(UsageError, match="2 prompts"):
        Job(((1,), (2,)), 1, GREEDY)
    with pytest.raises(UsageError, match="no list of texts"):
        subject.enqueue(job((1,), 1, banned=("",)))
    assert subject.remaining == 0
    crowded = generator(limits=replace(LIMITS, queue=1))
    crowded.enqueue(job((1,), 1))
    with pytest.raises(ChatError, match="waiting"):
        crowded.enqueue(job((1,), 1))


def test_a_hook_sees_the_draw_and_may_change_it() -> None:
    """exllamav2 ignores hooks here (appendix B-15)."""
    seen: list[Choice] = []

    def shout(choice: Choice) -> None:
        seen.append(replace(choice))
        choice.token = ord("!")

    subject = generator()
    subject.enqueue(job(prompt(10), 3, hooks=(shout,)))
    assert final(drain(subject), 0).text == "!!!"
    assert seen[0].token == streamed(prompt(10), 1)[0] == int(np.argmax(seen[0].logits))


def test_guidance_between_equal_prompts_changes_nothing_and_otherwise_does() -> None:
    ids, other = prompt(30), prompt(45, 1)
    subject = generator()
    subject.enqueue(Job((ids, ids), 20, SETTINGS[1], guidance=3.0))
    subject.enqueue(Job((ids, other), 20, SETTINGS[1], guidance=1.0))
    subject.enqueue(Job((ids, other), 20, SETTINGS[1], guidance=3.0))
    results = drain(subject)
    expected = streamed(ids, 20, SETTINGS[1])
    assert reply(results, 0) == reply(results, 1) == expected != reply(results, 2)


def test_one_constraint_may_be_that_of_several_jobs() -> None:
    table = TokenTable(ByteTokenizer(), VOCABULARY, {END})  # type: ignore[arg-type]
    rule = compile_regex(table, "[ab]{9}")
    subject = generator()
    finals = subject.generate([job(prompt(10, n), 20, SETTINGS[1], constraint=rule) for n in range(2)])
    assert finals is not None
    assert [(len(end.text), set(end.text) <= set("ab"), end.reason) for end in finals] == [(9, True, "end_filter")] * 2
