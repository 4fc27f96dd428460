"""Embeddings in prompts of scripts. Rows of the model's own table must say what the tokens do that they are of."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from exl2chat.errors import UsageError
from exl2chat.exllamav2 import ExLlamaV2, ExLlamaV2Cache, ExLlamaV2Tokenizer
from exl2chat.exllamav2.embedding import EMBEDDING_INDEX, MARKER
from exl2chat.exllamav2.generator import (
    ExLlamaV2BaseGenerator,
    ExLlamaV2DynamicGenerator,
    ExLlamaV2DynamicJob,
    ExLlamaV2MMEmbedding,
    ExLlamaV2Sampler,
    ExLlamaV2StreamingGenerator,
)

GREEDY = ExLlamaV2Sampler.Settings.greedy()
BEFORE, HIDDEN, AFTER = "Once upon", " a time there was", " a town"
COUNT = 12


def rows(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, text: str = HIDDEN) -> Tensor:
    """What the model reads for the tokens of a text, [N, hidden]."""
    ids = tokenizer.encode(text)
    assert isinstance(ids, Tensor)
    return model.transformer.weights.embedding[ids[0]]


def plain(tokenizer: ExLlamaV2Tokenizer, *texts: str) -> Tensor:
    """The same prompt in tokens alone."""
    return torch.cat([tokenizer.encode(text) for text in texts], 1)  # type: ignore[misc]


@pytest.fixture
def picture(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> ExLlamaV2MMEmbedding:
    return ExLlamaV2MMEmbedding(model, rows(model, tokenizer), text_alias="<picture>")


@pytest.fixture
def base(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> ExLlamaV2BaseGenerator:
    return ExLlamaV2BaseGenerator(model, ExLlamaV2Cache(model, max_seq_len=256), tokenizer)


@pytest.fixture
def dynamic(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> ExLlamaV2DynamicGenerator:
    return ExLlamaV2DynamicGenerator(model, ExLlamaV2Cache(model, max_seq_len=512), tokenizer)


def streamed(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, ids: Tensor, embeddings: Any = None) -> list[int]:
    stream = ExLlamaV2StreamingGenerator(model, ExLlamaV2Cache(model, max_seq_len=256), tokenizer)
    stream.set_stop_conditions([])
    stream.begin_stream_ex(ids, GREEDY, input_embeddings=embeddings)
    for _ in range(COUNT):
        stream.stream_ex()
    written: list[int] = stream.sequence_ids[0, ids.shape[1] :].tolist()
    return written


@pytest.fixture
def expected(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> list[int]:
    return streamed(model, tokenizer, plain(tokenizer, BEFORE, HIDDEN, AFTER))


def test_an_alias_is_encoded_as_the_ids_of_its_rows(
    tokenizer: ExLlamaV2Tokenizer, picture: ExLlamaV2MMEmbedding
) -> None:
    ids = tokenizer.encode(f"{BEFORE}<picture>{AFTER}", embeddings=[picture])
    assert torch.equal(ids, torch.cat([plain(tokenizer, BEFORE), picture.get_ids_tensor(), plain(tokenizer, AFTER)], 1))
    assert tokenizer.decode(ids) == [f"{BEFORE}{AFTER}"]
    padded, offsets = tokenizer.encode(["a", "<picture>"], embeddings=[picture], return_offsets=True)
    assert padded[1].tolist() == picture.get_ids()
    assert offsets.tolist() == [1 - picture.length, 0]


def test_what_an_embedding_says_of_itself(model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer) -> None:
    tensor = rows(model, tokenizer)
    one = ExLlamaV2MMEmbedding(model, tensor, pre_tokens=1, post_tokens=2)
    again = ExLlamaV2MMEmbedding(model, tensor.clone())
    assert (one.get_ids(), one.text_alias) == (again.get_ids(), again.text_alias)
    assert one.text_alias == f"<$EMB_{one.first_index}$>"
    assert one.get_vision_token_range() == (one.first_index + 1, one.first_index + one.length - 2)
    assert one.get_size_in_bytes() == tensor.nbytes


def test_a_stream_reads_rows(
    model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, picture: ExLlamaV2MMEmbedding, expected: list[int]
) -> None:
    ids = tokenizer.encode(f"{BEFORE}<picture>{AFTER}", embeddings=[picture])
    assert isinstance(ids, Tensor)
    assert streamed(model, tokenizer, ids, [picture]) == expected
    index = torch.arange(picture.length)[None] + EMBEDDING_INDEX
    given = torch.cat([plain(tokenizer, BEFORE), index, plain(tokenizer, AFTER)], 1)
    assert streamed(model, tokenizer, given, picture.embeddings[None]) == expected


def test_the_base_generator_puts_rows_at_the_marker(
    base: ExLlamaV2BaseGenerator, picture: ExLlamaV2MMEmbedding, dynamic: ExLlamaV2DynamicGenerator
) -> None:
    tensor = torch.stack([picture.embeddings, picture.embeddings * 2])
    prompts = [f"{BEFORE} \t{MARKER} \ta town", f"{MARKER}{AFTER}"]
    replies = base.generate_simple(prompts, GREEDY, COUNT, input_embeddings=tensor, completion_only=True)
    doubled = ExLlamaV2MMEmbedding(base.model, tensor[1])
    aliased = [f"{BEFORE}<picture>a town", f"{doubled.text_alias}{AFTER.lstrip()}"]
    embeddings = [[picture], [doubled]]
    assert replies == dynamic.generate(
        aliased, COUNT, gen_settings=GREEDY, embeddings=embeddings, stop_conditions=base.tokenizer.eos_ids,
        completion_only=True,
    )  # fmt: skip
    assert base.generate_simple(
        aliased, GREEDY, COUNT, input_embeddings=[picture, doubled], completion_only=True
    ) == replies  # fmt: skip
    whole = base.generate_simple(prompts[0], GREEDY, COUNT, input_embeddings=tensor[:1])
    assert whole == f"{BEFORE}a town{replies[0]}"


def test_rows_are_tokens_to_forward(
    model: ExLlamaV2, tokenizer: ExLlamaV2Tokenizer, picture: ExLlamaV2MMEmbedding
) -> None:
    ids = tokenizer.encode(f"{BEFORE}<picture>{AFTER}", embeddings=[picture])
    assert isinstance(ids, Tensor)
    expected = model.forward(plain(tokenizer, BEFORE, HIDDEN, AFTER))
    torch.testing.assert_close(model.forward(ids, indexed_embeddings=[picture]), expected)


def test_jobs_read_rows(dynamic: ExLlamaV2DynamicGenerator, picture: ExLlamaV2MMEmbedding, expected: list[int]) -> None:
    tokenizer, text = dynamic.tokenizer, f"{BEFORE}<picture>{AFTER}"
    ids = tokenizer.encode(text, embeddings=[picture])
    assert isinstance(ids, Tensor)
    dynamic.enqueue(ExLlamaV2DynamicJob(ids, COUNT, gen_settings=GREEDY, embeddings=[picture]))
    written = []
    while dynamic.num_remaining_jobs():
        written += [result["token_ids"] for result in dynamic.iterate() if "token_ids" in result]
    assert torch.cat(written, 1)[0].tolist() == expected
    other = ExLlamaV2MMEmbedding(dynamic.model, picture.embeddings * 2, "<picture>")
    first, second, third = dynamic.generate(
        [text, text, BEFORE], COUNT, gen_settings=GREEDY, embeddings=[[picture], [other], []], completion_only=True
    )
    assert first != second
    assert first == tokenizer.decode(torch.tensor([*ids[0].tolist(), *expected]))[len(BEFORE + AFTER) :]
    assert third == dynamic.generate(BEFORE, COUNT, gen_settings=GREEDY, completion_only=True)
    assert dynamic.generate(text, COUNT, gen_settings=GREEDY, embeddings=[picture]) == text + first


@pytest.mark.parametrize(
    ("prompt", "shape", "message"),
    [
        ("no marker", (1, 2, 128), "has {{EMBED_HERE}} 0 times"),
        (f"{MARKER} and {MARKER}", (1, 2, 128), "has {{EMBED_HERE}} 2 times"),
        (MARKER, (2, 2, 128), "shape [2, 2, 128] (it is [1, N, hidden] for 1 prompts)"),
        (MARKER, (2, 128), "shape [2, 128]"),
        (MARKER, (1, 0, 128), "shape [0, 128]"),
        (MARKER, (1, 2, 100), "100 wide (those of this model are 256)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    base: ExLlamaV2BaseGenerator, prompt: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        base.generate_simple(prompt, GREEDY, COUNT, input_embeddings=torch.ones(shape))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda model, _: ExLlamaV2MMEmbedding(model, torch.ones(2, 100)), "100 wide"),
        (lambda model, _: ExLlamaV2MMEmbedding(model, torch.ones(2, 128, dtype=torch.int32)), "of int32"),
        (lambda model, _: ExLlamaV2MMEmbedding(model, torch.ones(2, 128), thw_grid=torch.ones(3)), "thw_grid"),
        (lambda model, one: model.forward(one.get_ids_tensor()), "ids that are no tokens"),
        (lambda model, _: model.forward(torch.tensor([[1]]), indexed_embeddings=torch.ones(1, 2, 100)), "100 wide"),
        (
            lambda model, one: model.forward(torch.tensor([[EMBEDDING_INDEX + 9]]), indexed_embeddings=one.embeddings),
            "rows beyond the",
        ),
        (lambda model, _: model.forward(torch.tensor([[1]]), indexed_embeddings=[object()]), "a object is among"),
        (lambda _, one: ExLlamaV2DynamicJob(one.get_ids_tensor(), 5, embeddings=[object()]), "a object is among"),
        (
            lambda model, one: ExLlamaV2DynamicJob(
                one.get_ids_tensor(), 5, embeddings=[one, ExLlamaV2MMEmbedding(model, -one.embeddings, one.text_alias)]
            ),
            "two embeddings have the text alias <picture>",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    model: ExLlamaV2, picture: ExLlamaV2MMEmbedding, act: Callable[..., object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        act(model, picture)


def test_embeddings_are_one_list_or_a_list_each(
    dynamic: ExLlamaV2DynamicGenerator, picture: ExLlamaV2MMEmbedding
) -> None:
    with pytest.raises(UsageError, match="embeddings are not as many"):
        dynamic.generate(["a", "b"], 5, embeddings=[[picture]])
