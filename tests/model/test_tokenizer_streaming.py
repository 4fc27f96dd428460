"""The streaming detokeniser: pieces concatenate to the decode of all ids, characters stay whole."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from exl2chat.model.tokenizer import Tokenizer, open_tokenizer
from tests.model.tokenizer_files import (
    HUGGINGFACE,
    KINDS,
    SENTENCEPIECE,
    TEXTS,
    sentencepiece_model,
    tokenizer_json,
    write_tokenizer,
)

BYTE_KINDS = ["byte_level", "llama2", "phi3", "gemma", "spm_bpe"]  # those that can write any text


@cache
def opened(kind: str) -> Tokenizer:
    with TemporaryDirectory() as folder:
        return open_tokenizer(write_tokenizer(Path(folder), kind))


@cache
def library(kind: str) -> Any:
    if kind in HUGGINGFACE:
        return tokenizers.Tokenizer.from_str(tokenizer_json(kind))
    return sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(kind))


def pieces(tokenizer: Tokenizer, ids: list[int], special: bool = False) -> list[str]:
    detokenizer = tokenizer.detokenizer(special)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", BYTE_KINDS)
@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(TEXTS))
def test_any_text_comes_back_whole(kind: str, text: str) -> None:
    tokenizer = opened(kind)
    ids = tokenizer.encode(text)
    streamed = pieces(tokenizer, ids)
    assert "".join(streamed) == library(kind).decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in streamed)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_ids_stream_to_the_decode_at_every_split(kind: str, data: st.DataObject) -> None:
    tokenizer = opened(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=12))
    streamed = pieces(tokenizer, ids)
    assert "".join(streamed) == tokenizer.decode(ids)
    for length in range(len(ids)):
        before = "".join(streamed[:length])
        assert tokenizer.decode(ids[:length]).startswith(before)  # what is shown is never taken back
        assert tokenizer.decode(ids[:length]).removeprefix(before) in ("", "\ufffd", "\ufffd" * 2, "\ufffd" * 3)


@pytest.mark.parametrize("kind", [*HUGGINGFACE, *SENTENCEPIECE])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_ids_decode_as_the_library_does_but_for_broken_bytes(kind: str, data: st.DataObject) -> None:
    tokenizer = opened(kind)
    known = [i for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids]
    ids = data.draw(st.lists(st.sampled_from(known), max_size=12))
    expected, text = library(kind).decode(ids), tokenizer.decode(ids)
    if "\ufffd" in expected:  # how many U+FFFD a broken run gives, and how far back it reaches, is the library's taste
        assert "\ufffd" in text
    else:
        assert text == expected


@pytest.mark.parametrize("kind", ["llama2", "phi3", "unigram", "spm_bpe", "gemma"])
def test_each_token_alone_decodes_as_the_library_does(kind: str) -> None:
    tokenizer = opened(kind)
    for token_id in set(range(tokenizer.vocab_size)) - tokenizer.special_ids:
        expected = library(kind).decode([token_id])
        assert "\ufffd" in expected or tokenizer.decode([token_id]) == expected, tokenizer.token_of(token_id)


@pytest.mark.parametrize("kind", ["llama2", "phi3", "unigram", "spm_bpe"])
def test_the_leading_space_belongs_to_the_text_only_when_continuing(kind: str) -> None:
    tokenizer = opened(kind)
    ids = tokenizer.encode("Hello world")
    assert tokenizer.decode(ids) == "Hello world"
    continuing = tokenizer.detokenizer(continuing=True)
    assert "".join(map(continuing.push, ids)) == " Hello world"


def test_a_character_split_over_tokens_waits() -> None:
    tokenizer = opened("byte_level")
    ids = tokenizer.encode("a\U0001f6f8b")  # an emoji that is not in the training text: four tokens of a byte each
    assert [piece for piece in pieces(tokenizer, ids) if piece] == ["a", "\U0001f6f8", "b"]
    assert pieces(tokenizer, ids[:3])[-1] == "\ufffd"


def test_special_tokens_do_not_break_a_character() -> None:
    tokenizer = opened("byte_level")
    ids = tokenizer.encode("\U0001f6f8")
    assert tokenizer.decode([*ids[:2], tokenizer.bos_id or 0, *ids[2:]]) == "\U0001f6f8"
