"""Rows in the place of tokens: the record, and the forward pass against transformers given the same rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from exl2chat.engine.embeddings import FIRST_ID, IDS, InputEmbeddings, check_prompt, encode_marked
from exl2chat.engine.transformer import Transformer
from exl2chat.errors import UsageError
from tests.engine.transformers_models import HIDDEN, TOLERANCE, VARIANTS, load, make_model, rows, tokens


@pytest.fixture(scope="module", params=["llama", "gemma2"])  # one that scales embeddings, too
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Transformer]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    theirs = make_model(folder, *VARIANTS[request.param])
    return theirs, load(folder)


def test_a_text_with_rows_in_it_matches_transformers(pair: tuple[Any, Transformer]) -> None:
    theirs, model = pair
    picture, other = InputEmbeddings.of(rows(7)), InputEmbeddings.of(rows(5, 1))
    text = tokens(30).tolist()
    ids = [*picture.ids, *text[:10], *other.ids, *picture.ids, *text[10:]]
    with torch.inference_mode():
        first, second = theirs.get_input_embeddings()(torch.tensor(text)).split([10, 20])
        given = torch.cat([picture.rows, first, other.rows, picture.rows, second])
        expected = theirs(inputs_embeds=given.unsqueeze(0)).logits[0]
    model = replace(model, embedded=(picture, other))
    whole = model.forward(model.inputs(ids), model.new_cache(64))
    torch.testing.assert_close(whole, expected, rtol=0, atol=TOLERANCE)
    cache = model.new_cache(64)  # and cut anywhere, tokens and rows apart or not
    parts = [model.forward(model.inputs(part), cache) for part in (ids[:3], ids[3:4], ids[4:20], ids[20:48], ids[48:])]
    torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=TOLERANCE)


def test_inputs_without_rows_are_token_ids(pair: tuple[Any, Transformer]) -> None:
    _, model = pair
    assert torch.equal(replace(model, embedded=(InputEmbeddings.of(rows(3)),)).inputs([1, 2]), torch.tensor([1, 2]))


def test_what_forward_is_given_stays_as_it_is(pair: tuple[Any, Transformer]) -> None:
    _, model = pair
    picture = InputEmbeddings.of(rows(3))
    given = replace(model, embedded=(picture,)).inputs(picture.ids)
    torch.testing.assert_close(given, picture.rows)
    model.forward(given, model.new_cache(16))
    torch.testing.assert_close(given, picture.rows)


def test_rows_that_a_draft_model_does_not_know_are_zeros(pair: tuple[Any, Transformer]) -> None:
    _, model = pair
    given = model.inputs([5, *InputEmbeddings.of(rows(2, width=20)).ids])
    assert given[0].any()
    assert not given[1:].any()


def test_equal_rows_have_equal_ids_and_others_do_not() -> None:
    one = InputEmbeddings.of(rows(9))
    assert InputEmbeddings.of(rows(9).half().float()).ids == InputEmbeddings.of(rows(9).half()[None]).ids
    assert one.ids == InputEmbeddings.of(rows(9).clone()).ids
    assert len(one.ids) == 9
    assert FIRST_ID <= one.ids.start < FIRST_ID + IDS
    changed = rows(9)
    changed[4, 7] += 1e-6
    others = [rows(9, 1), rows(8), changed, rows(9).view(18, -1)]
    for other in map(InputEmbeddings.of, others):
        assert not set(other.ids) & set(one.ids)


def test_the_record_does_not_change_with_the_tensor_it_was_made_of() -> None:
    tensor = rows(2)
    one = InputEmbeddings.of(tensor)
    tensor.zero_()
    assert one.rows.any()


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (rows(2)[0], r"shape \[48\]"),
        (rows(2).view(2, 1, HIDDEN), r"shape \[2, 1, 48\]"),
        (rows(0), r"shape \[0, 48\]"),
        (torch.ones(2, HIDDEN, dtype=torch.int64), "int64"),
        (rows(2) / 0, "not finite"),
    ],
)
def test_what_is_no_rows_is_refused(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        InputEmbeddings.of(tensor)


def test_the_width_is_that_of_the_model() -> None:
    picture = InputEmbeddings.of(rows(2))
    with pytest.raises(UsageError, match=r"48 wide.*this model are 64"):
        check_prompt([1, *picture.ids], 10, 64, [picture])


def test_ids_are_tokens_or_of_an_embedding_that_was_given() -> None:
    picture = InputEmbeddings.of(rows(2))
    ids = [3, *picture.ids, 9]
    check_prompt([3, 9], 10, HIDDEN, [])
    check_prompt(ids, 10, HIDDEN, [picture])
    with pytest.raises(UsageError, match="that are given"):
        check_prompt(ids, 10, HIDDEN, [])
    with pytest.raises(UsageError, match="no tokens: 10"):
        check_prompt([10, *ids], 10, HIDDEN, [picture])
    with pytest.raises(UsageError, match="no tokens: -1"):
        check_prompt([-1], 10, HIDDEN, [])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "no tokens"),
        ([1, 2.0], "no list of token ids"),
        ([-1, 2.0], "are no tokens: -1"),
        (["a"], "no list of"),
        (None, "no list of"),
    ],
)
def test_what_is_no_prompt_is_refused(ids: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_prompt(ids, 10, HIDDEN, [])


def test_floats_are_no_tokens_beside_an_embedding_either() -> None:
    picture = InputEmbeddings.of(rows(2))
    with pytest.raises(UsageError, match="no list of token ids"):
        check_prompt([*picture.ids, 2.0], 10, HIDDEN, [picture])  # type: ignore[list-item]


class Letters:
    """A tokenizer of letters, which tells how it was called."""

    def encode(self, text: str, special: bool = False, add_bos: bool = False) -> list[int]:
        return [-1] * add_bos + [-2] * special + [ord(letter) for letter in text]


def test_marks_become_ids() -> None:
    one, other = InputEmbeddings.of(rows(2)), InputEmbeddings.of(rows(3, 1))
    marks = {"<p>": one, "<p>?": other, "(.)": one}

    def encoded(
        text: str, marks: dict[str, InputEmbeddings], special: bool = False, add_bos: bool = False
    ) -> list[int]:
        return encode_marked(Letters(), text, marks, special, add_bos)  # type: ignore[arg-type]

    assert encoded("a<p>b<p>?<p>", marks) == [97, *one.ids, 98, *other.ids, *one.ids]
    assert encoded("(x)(.)", marks, add_bos=True) == [-1, 40, 120, 41, *one.ids]
    assert encoded("a<p>b", marks, special=True) == [-2, 97, *one.ids, -2, 98]
    assert encoded("a<p>b", {}, special=True, add_bos=True) == [-1, -2, *map(ord, "a<p>b")]
