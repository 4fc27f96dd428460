"""Prompts with rows in them: the replies of all three generators, what they keep, and what they refuse."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from exl2chat.engine.cache import PAGE
from exl2chat.engine.embeddings import InputEmbeddings
from exl2chat.engine.generators.base import BaseGenerator
from exl2chat.engine.generators.dynamic import DynamicGenerator
from exl2chat.engine.generators.streaming import Extras, StreamingGenerator
from exl2chat.engine.pages import PagedSequence
from exl2chat.engine.replies.jobs import Job
from exl2chat.engine.scheduler import Limits
from exl2chat.engine.transformer import Transformer
from exl2chat.errors import UsageError
from exl2chat.settings import Sampling
from tests.engine.dynamic_jobs import GREEDY, SETTINGS, prompt
from tests.engine.tiny_models import ByteTokenizer
from tests.engine.transformers_models import load, make_model, rows

PICTURE, OTHER = InputEmbeddings.of(rows(20)), InputEmbeddings.of(rows(20, 1))
TEXT = prompt(60)
PROMPTS = (
    [*PICTURE.ids, *TEXT],
    [*TEXT[:9], *PICTURE.ids, *TEXT[9:], *OTHER.ids, *PICTURE.ids, 7],
    [*TEXT, *OTHER.ids],
)
BOTH = (PICTURE, OTHER)
COUNT = 12
Pair = tuple[PreTrainedModel, Transformer]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model of transformers and ours over the same files, with a token for each byte."""
    folder: Path = tmp_path_factory.mktemp("model")
    theirs = make_model(folder, "Llama", {"vocab_size": 256, "max_position_embeddings": 2048})
    return theirs, load(folder)


@pytest.fixture(scope="module")
def model(pair: Pair) -> Transformer:
    return pair[1]


def continued(theirs: PreTrainedModel, ids: Sequence[int]) -> list[int]:
    """What transformers writes after the same rows."""
    table = theirs.get_input_embeddings().weight
    known = {token: row for one in BOTH for token, row in zip(one.ids, one.rows, strict=True)}
    given = torch.stack([known[token] if token in known else table[token] for token in ids])
    written: Any = theirs.generate(  # type: ignore[operator]
        inputs_embeds=given[None].detach(), attention_mask=torch.ones(1, len(ids)), max_new_tokens=COUNT,
        do_sample=False, eos_token_id=None,
    )  # fmt: skip
    return written[0].tolist()  # type: ignore[no-any-return]


def stream(model: Transformer, context: int = 1024, **more: Any) -> StreamingGenerator:
    subject = StreamingGenerator(model, model.new_cache(context), ByteTokenizer(), **more)  # type: ignore[arg-type]
    subject.set_stop_conditions([])
    return subject


def streamed(subject: StreamingGenerator, ids: Sequence[int], sampling: Sampling = GREEDY, **more: Any) -> list[int]:
    more = {"embeddings": BOTH, "max_new_tokens": COUNT, **more}
    subject.begin_stream_ex(ids, sampling, **more)
    while not subject.stream_ex().eos:
        pass
    return subject.tokens[-COUNT:]


def dynamic(model: Transformer, drafts: int = 0, **more: Any) -> DynamicGenerator:
    limits = Limits(batch=8, queue=100, chunk=64, drafts=drafts)
    return DynamicGenerator(model, model.new_cache(8 * PAGE), ByteTokenizer(), limits, **more)  # type: ignore[arg-type]


def job(
    ids: Sequence[int], sampling: Sampling = GREEDY, embeddings: tuple[InputEmbeddings, ...] = (PICTURE, OTHER)
) -> Job:
    return Job((tuple(ids),), COUNT, sampling, embeddings=embeddings)


def replies(subject: DynamicGenerator, jobs: Sequence[Job]) -> list[list[int]]:
    """The tokens of each job's reply."""
    serials = [subject.enqueue(one) for one in jobs]
    found: dict[int, list[int]] = {serial: [] for serial in serials}
    while subject.remaining:
        for result in subject.iterate():
            found[result.serial] += [token.id for token in getattr(result, "tokens", ())]
    return [found[serial] for serial in serials]


def test_replies_are_those_of_transformers(pair: Pair) -> None:
    theirs, model = pair
    expected = [continued(theirs, ids) for ids in PROMPTS]
    assert len({tuple(reply) for reply in expected}) == len(PROMPTS)  # or the rows make no difference
    assert [streamed(stream(model), ids) for ids in PROMPTS] == expected
    assert replies(dynamic(model), [job(ids) for ids in PROMPTS]) == expected
    base = BaseGenerator(model, model.new_cache(1024), ByteTokenizer())  # type: ignore[arg-type]
    assert [done.reply for done in base.generate([job(ids) for ids in PROMPTS])] == expected


def test_rows_that_are_not_the_jobs_own_are_not_read(pair: Pair) -> None:
    """Jobs with different pictures share steps."""
    theirs, model = pair
    subject = dynamic(model)
    jobs = [job(PROMPTS[0], embeddings=(PICTURE,)), job(PROMPTS[2], embeddings=(OTHER,)), job(TEXT, embeddings=())]
    assert replies(subject, jobs) == [continued(theirs, ids) for ids in (PROMPTS[0], PROMPTS[2], TEXT)]


@pytest.mark.parametrize("sampling", SETTINGS)
def test_penalties_pass_over_rows(model: Transformer, sampling: Sampling) -> None:
    ids = PROMPTS[1]
    (written,) = replies(dynamic(model), [job(ids, sampling)])
    assert streamed(stream(model), ids, sampling) == written
    assert max(written) < 256


def test_a_row_at_the_end_of_a_prompt_is_not_healed(model: Transformer) -> None:
    expected = streamed(stream(model), PROMPTS[2])
    assert streamed(stream(model), PROMPTS[2], extras=Extras(token_healing=True)) == expected


@pytest.mark.parametrize("drafts", ["ngram", "draft"])
def test_drafts_pass_over_rows(model: Transformer, drafts: str) -> None:
    """What followed the same words before was a picture; and a draft model does not see it."""
    ids = [*TEXT, *PICTURE.ids, *TEXT]
    more: dict[str, Any] = {"draft_model": model} if drafts == "draft" else {}
    expected = streamed(stream(model, speculate="off"), ids)
    assert streamed(stream(model, speculate=drafts, **more), ids) == expected
    assert replies(dynamic(model, drafts=4, speculate=drafts, **more), [job(ids), job(TEXT)])[0] == expected


def test_a_stream_keeps_what_is_before_another_picture(model: Transformer) -> None:
    subject = stream(model)
    first, second = [*TEXT, *PICTURE.ids, 1, 2], [*TEXT, *OTHER.ids, 1, 2]
    streamed(subject, first)
    again = subject.begin_stream_ex(first, GREEDY, embeddings=[InputEmbeddings.of(PICTURE.rows.clone())])
    assert again.cached_tokens == len(first) - 1
    assert subject.begin_stream_ex(second, GREEDY, embeddings=[OTHER]).cached_tokens == len(TEXT)
    assert streamed(subject, second) == streamed(stream(model), second)


def test_a_stream_reads_rows_again_where_another_used_the_cache(model: Transformer) -> None:
    subject, ids = stream(model), PROMPTS[1]
    expected = streamed(stream(model), ids)
    subject.begin_stream_ex(ids, GREEDY, embeddings=BOTH)
    subject.stream_ex()
    streamed(StreamingGenerator(model, subject._cache, ByteTokenizer()), TEXT)  # type: ignore[arg-type]
    for _ in range(COUNT - 1):
        subject.stream_ex()
    assert subject.tokens[-COUNT:] == expected


def test_pages_are_shared_by_the_same_picture_alone(model: Transformer) -> None:
    """In exllamav2 a picture that is loaded twice has other ids the second time."""
    subject = dynamic(model)
    text = prompt(PAGE + 100)
    first, second = ([*text, *one.ids, *prompt(PAGE, 1)] for one in (PICTURE, OTHER))

    def cached(ids: Sequence[int], one: InputEmbeddings) -> int:
        (final,) = subject.generate([job(ids, embeddings=(one,))]) or ()
        return final.cached_tokens

    assert cached(first, PICTURE) == 0
    assert cached(first, InputEmbeddings.of(PICTURE.rows.clone())) == len(first) - 1
    assert cached(second, OTHER) == len(text)
    assert replies(subject, [job(second)]) == replies(dynamic(model), [job(second)])


def test_digests_tell_pictures_apart() -> None:
    first, other, again = (
        PagedSequence([*TEXT, *one.ids]).digest(4, 20) for one in (PICTURE, OTHER, InputEmbeddings.of(rows(20)))
    )
    assert first == again != other


def test_rows_of_another_width_are_refused(model: Transformer) -> None:
    wide = InputEmbeddings.of(rows(3, width=50))
    ids = [*TEXT, *wide.ids]
    for begin in (
        lambda: stream(model).begin_stream_ex(ids, GREEDY, embeddings=[wide]),
        lambda: dynamic(model).enqueue(job(ids, embeddings=(wide,))),
    ):
        with pytest.raises(UsageError, match="50 wide"):
            begin()


def test_ids_without_their_rows_are_refused(model: Transformer) -> None:
    ids = [*TEXT, *PICTURE.ids]
    for begin in (
        lambda: stream(model).begin_stream_ex(ids, GREEDY, embeddings=[OTHER]),
        lambda: dynamic(model).enqueue(job(ids, embeddings=(OTHER,))),
    ):
        with pytest.raises(UsageError, match="embeddings that are given"):
            begin()
