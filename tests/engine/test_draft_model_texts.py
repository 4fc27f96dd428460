"""What a draft model has read of the texts of jobs: all that it drafts from, and nothing that is not true."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest

from exl2chat.engine import batch_drafting
from exl2chat.engine.batch_drafting import ModelDrafts
from exl2chat.engine.compile_grammar import compile_regex
from exl2chat.engine.device_draws import Drawing
from exl2chat.engine.executor import Computed
from exl2chat.engine.replies.jobs import Job
from exl2chat.engine.scheduler import Row, StepPlan
from exl2chat.engine.token_table import TokenTable
from exl2chat.settings import Sampling
from tests.engine.dynamic_jobs import SETTINGS, drain, final, job, prompt
from tests.engine.fake_model import END, VOCABULARY
from tests.engine.speculative import Always
from tests.engine.test_batch_drafting import with_model
from tests.engine.tiny_models import ByteTokenizer, byte_model


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_drafting, "Pace", Always)


def test_rejected_drafts_before_a_forced_run_are_not_taken_for_the_text() -> None:
    """Guesses are wrong where the grammar has other plans, and right wherever it has none."""
    rule = compile_regex(
        TokenTable(ByteTokenizer(), VOCABULARY, {END}),  # type: ignore[arg-type]
        r"([a-z]{6}thequickbrownfox){2}[a-z]{40}",
    )
    letters = Sampling(temperature=1.0, top_p=1.0, seed=3, allowed_tokens=tuple(range(97, 123)))
    for seed in range(3):
        subject = with_model()
        subject.enqueue(job(prompt(30, seed), 84, letters, constraint=rule))
        end = final(drain(subject), 0)
        assert (end.drafted, end.accepted) == (72, 66)  # the other 6 are guesses of where a forced run begins


def read_by(drafts: ModelDrafts | None, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], int]:
    """How many tokens of each text a draft model reads from now on, beside those that it drafts behind."""
    assert drafts is not None
    counts: dict[tuple[int, int], int] = {}
    run = drafts._executor.run

    def counting(plan: StepPlan, draws: Mapping[int, Drawing]) -> Computed:
        for row in plan.prefill:
            counts[row.job, row.branch] = counts.get((row.job, row.branch), 0) + len(row.tokens)
        return run(plan, draws)

    monkeypatch.setattr(drafts._executor, "run", counting)
    return counts


@dataclass
class Likeliest:
    """The chooser of a text."""

    tokens: list[int]
    sampling: Sampling = SETTINGS[0]

    def guess(self, logits: np.ndarray, position: int) -> int:  # noqa: ARG002
        return int(logits.argmax())


def test_a_text_without_room_for_drafts_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = byte_model()
    drafts = ModelDrafts(model, model.new_cache(1024), 4, 256)
    counts = read_by(drafts, monkeypatch)
    texts = {serial: Likeliest(list(prompt(20, serial))) for serial in range(2)}
    for step in range(4):
        ends = {serial: len(text.tokens) - 1 for serial, text in texts.items()}
        rows = [Row(n, 0, ends[n], (text.tokens[-1],), (n,), drafts=1 - n) for n, text in texts.items()]
        drafts.follow(StepPlan((), (), (), (), tuple(replace(row, start=0) if step == 0 else row for row in rows)))
        drafts.propose(rows, texts, 1)  # type: ignore[arg-type]
        for text in texts.values():
            text.tokens.append(70)
    assert counts == {(0, 0): 19}


def test_only_the_text_that_a_reply_is_drafted_for_is_read_of_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = with_model()
    counts = read_by(subject._draft_model, monkeypatch)
    subject.enqueue(Job((prompt(30), prompt(45, 1)), 20, SETTINGS[1], guidance=1.0))
    end = final(drain(subject), 0)
    assert end.accepted == end.drafted > 10
    assert counts.keys() == {(0, 0)}
