"""Tokenizers against the libraries they wrap, and the files that describe them."""

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers

from exl2chat.errors import ModelError, UsageError
from exl2chat.model.folder import open_folder
from exl2chat.model.huggingface_tokenizer import library_faults
from exl2chat.model.tokenizer import open_tokenizer
from tests.model.tokenizer_files import (
    ADDED,
    CONFIG,
    HUGGINGFACE,
    KINDS,
    SENTENCEPIECE,
    TEXTS,
    tokenizer_json,
    write_tokenizer,
)


@pytest.mark.parametrize("kind", HUGGINGFACE)
def test_ids_and_text_equal_the_tokenizers_library(kind: str, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write_tokenizer(tmp_path, kind))
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        ids = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == library.decode(ids)
        marked = f"<s>{text}<|im_end|>{text}<think>"
        ids = library.encode(marked, add_special_tokens=False).ids
        assert tokenizer.encode(marked, special=True) == ids
        assert tokenizer.decode(ids) == library.decode(ids)
        assert tokenizer.decode(ids, special=True) == library.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("special", [False, True])
def test_what_is_no_text_is_the_fault_of_who_gives_it(kind: str, special: bool, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write_tokenizer(tmp_path, kind))
    with pytest.raises(UsageError, match="is half of a surrogate pair"):
        tokenizer.encode("a\ud800b", special)
    with pytest.raises(UsageError, match="a NoneType"):
        tokenizer.encode(None, special)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_ids_and_text_equal_the_sentencepiece_library(kind: str, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write_tokenizer(tmp_path, kind))
    library = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in TEXTS:
        ids = library.encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, special=True) == library.decode(ids)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "unigram" not in kind and kind != "spm_no_prefix"])
def test_text_behind_other_text_gets_no_space_and_no_control_token(kind: str, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write_tokenizer(tmp_path, kind))
    for text in [*TEXTS, "<|im_end|>"]:
        ids = tokenizer.encode_following(text)
        pieces = [tokenizer.piece(token_id) for token_id in ids]
        assert b"".join(piece.rest for piece in pieces if piece is not None).decode() == text
        assert tokenizer.special_ids.isdisjoint(ids)
    assert all(tokenizer.piece(token_id) is None for token_id in tokenizer.special_ids)


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_sentencepiece_puts_a_space_in_front_of_the_text_only(kind: str, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write_tokenizer(tmp_path, kind))
    ids = tokenizer.encode("Hello<|im_end|>Hello <|im_start|>", special=True)
    assert ids.count(tokenizer.id_of("<|im_end|>")) == 1
    assert ids[-1] == tokenizer.id_of("<|im_start|>")
    assert tokenizer.decode(ids, special=True) == "Hello<|im_end|>Hello <|im_start|>"


def test_legacy_sentencepiece_puts_a_space_after_control_tokens_too(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write_tokenizer(tmp_path, "spm_bpe", legacy=True))
    alone = tokenizer.encode("Hello")
    assert tokenizer.encode("<|im_start|>Hello", special=True)[1:] == alone


@pytest.mark.parametrize("kind", KINDS)
def test_named_tokens(kind: str, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write_tokenizer(tmp_path, kind, pad_token={"content": "</s>"}, eos_token="<|im_end|>"))
    assert tokenizer.bos_id == tokenizer.id_of("<s>")
    assert tokenizer.eos_ids == {tokenizer.id_of("<|im_end|>")}
    assert tokenizer.pad_id == tokenizer.id_of("</s>")
    assert {tokenizer.bos_id, *tokenizer.eos_ids, tokenizer.pad_id} <= tokenizer.special_ids
    assert tokenizer.encode("Hello", add_bos=True) == [tokenizer.bos_id, *tokenizer.encode("Hello")]
    assert all(tokenizer.id_of(tokenizer.token_of(i)) == i for i in range(tokenizer.vocab_size))


@pytest.mark.parametrize("kind", KINDS)
def test_ids_beyond_the_vocabulary_are_nothing(kind: str, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write_tokenizer(tmp_path, kind))
    assert tokenizer.token_of(tokenizer.vocab_size + 5) == ""
    assert tokenizer.decode([tokenizer.vocab_size + 5, *tokenizer.encode("Hello")]) == "Hello"
    assert tokenizer.id_of("no such token") is None


@pytest.mark.parametrize("name", ["added_tokens.json", "added_tokens_decoder"])
@pytest.mark.parametrize("kind", ["byte_level", "spm_bpe"])
def test_tokens_added_by_other_files(kind: str, name: str, tmp_path: Path) -> None:
    size = open_tokenizer(write_tokenizer(tmp_path, kind)).vocab_size
    config: dict[str, Any] = {}
    if name == "added_tokens.json":
        (tmp_path / name).write_text(json.dumps({"<|new|>": size}))
    else:
        config[name] = {str(size): {"content": "<|new|>", "special": True}}
    tokenizer = open_tokenizer(write_tokenizer(tmp_path, kind, **config))
    assert tokenizer.vocab_size == size + 1
    assert tokenizer.encode("a<|new|>", special=True)[-1] == tokenizer.id_of("<|new|>") == size
    assert size in tokenizer.special_ids
    assert size not in tokenizer.encode("a<|new|>")


def test_special_tokens_map_and_extra_names(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "byte_level", eos_token=None, extra_special_tokens={"image": "<think>"})
    names = {"eos_token": {"content": "</s>"}, "additional_special_tokens": ["[INST]"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    tokenizer = open_tokenizer(open_folder(tmp_path))
    assert tokenizer.eos_ids == {tokenizer.id_of("</s>")}
    assert {tokenizer.id_of("<think>"), tokenizer.id_of("[INST]")} <= tokenizer.special_ids


def test_empty_names_are_no_names(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write_tokenizer(tmp_path, "byte_level", bos_token="", pad_token=None))
    assert tokenizer.bos_id is None
    assert tokenizer.pad_id is None
    assert tokenizer.encode("Hello", add_bos=True) == tokenizer.encode("Hello")


def test_added_tokens_that_are_not_special_are_shown(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write_tokenizer(tmp_path, "byte_level"))
    ids = tokenizer.encode("<|im_start|>a<think>b</think>c<|im_end|>", special=True)
    assert tokenizer.decode(ids) == "a<think>b</think>c"
    assert [tokenizer.id_of(token) in ids for token in ADDED] == [True, True, False]


def _edited(**changes: Any) -> str:
    return json.dumps({**json.loads(tokenizer_json("llama2")), **changes})


BAD_FILES = {
    "not JSON": "{",
    "a list": "[]",
    "no model": _edited(model=None),
    "unknown model": _edited(model={"type": "Magic", "vocab": {"a": 0}}),
    "empty vocabulary": _edited(model={"type": "BPE", "vocab": {}, "merges": []}),
    "merge of unknown tokens": _edited(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}),
    "unknown normaliser": _edited(normalizer={"type": "Exec"}),
    "normaliser is text": _edited(normalizer="NFC"),
    "sequence of nothing": _edited(normalizer={"type": "Sequence", "normalizers": [None]}),
    "sequence is text": _edited(normalizer={"type": "Sequence", "normalizers": "NFC"}),
    "replacement bomb": _edited(normalizer={"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 1000}),
    "huge pattern": _edited(normalizer={"type": "Replace", "pattern": {"Regex": "a" * 5000}, "content": ""}),
    "pattern is a number": _edited(normalizer={"type": "Replace", "pattern": {"Regex": 5}, "content": ""}),
    "broken pattern": _edited(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}),
    "unknown decoder": _edited(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}),
    "decoder replaces words": _edited(decoder={"type": "Replace", "pattern": {"String": "ab"}, "content": ""}),
    "decoder strips the end": _edited(decoder={"type": "Strip", "content": " ", "start": 0, "stop": 1}),
    "added token without id": _edited(added_tokens=[{"content": "<x>"}]),
    "added token without content": _edited(added_tokens=[{"id": 4}]),
    "added token is text": _edited(added_tokens=["<x>"]),
    "added tokens are a table": _edited(added_tokens={"<x>": 5}),
    "an id out of this world": _edited(added_tokens=[{"id": 1 << 40, "content": "<x>"}]),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_a_malformed_tokenizer_json_is_one_clear_line(fault: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "llama2")
    (tmp_path / "tokenizer.json").write_text(BAD_FILES[fault])
    with pytest.raises(ModelError, match=r"tokenizer\.json") as caught:
        open_tokenizer(open_folder(tmp_path))
    assert "\n" not in str(caught.value)


BAD_CONFIGS: dict[str, dict[str, Any]] = {
    "name is a number": {"bos_token": 5},
    "endless content": {"eos_token": "x" * 300},
    "decoder is a list": {"added_tokens_decoder": ["<y>"]},
    "decoder key is text": {"added_tokens_decoder": {"x": {"content": "<y>"}}},
    "decoder entry is text": {"added_tokens_decoder": {"900": "<y>"}},
    "additional is text": {"additional_special_tokens": "<y>"},
    "an id that cannot be": {"added_tokens_decoder": {"900000": {"content": "<y>"}}},
}


@pytest.mark.parametrize("fault", BAD_CONFIGS)
def test_a_malformed_tokenizer_config_is_one_clear_line(fault: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer"):
        open_tokenizer(write_tokenizer(tmp_path, "byte_level", **BAD_CONFIGS[fault]))


def test_damaged_sentencepiece_models_are_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "spm_bpe")
    for data in (b"", b"\x00" * 100, b"not a model"):
        (tmp_path / "tokenizer.model").write_bytes(data)
        with pytest.raises(ModelError, match=r"tokenizer\.model"):
            open_tokenizer(open_folder(tmp_path))


def test_a_sentencepiece_model_and_its_json_must_agree(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot have id 9"):
        open_tokenizer(write_tokenizer(tmp_path, "spm_bpe", added_tokens_decoder={"9": {"content": "<y>"}}))


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelError, match="no tokenizer"):
        open_tokenizer(open_folder(tmp_path))


def test_a_panic_of_the_library_is_an_error_and_an_interrupt_stays_one() -> None:
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(ModelError, match="here: regex gave up"), library_faults("here"):
        raise panic("regex gave up\nat line 1")
    with pytest.raises(KeyboardInterrupt), library_faults("here"):
        raise KeyboardInterrupt
