"""What may be read from a model folder, and what is never touched."""

import os
import pickle
from pathlib import Path

import pytest

from exl2chat.errors import ModelError
from exl2chat.model.folder import MAX_JSON, PICKLES, open_folder
from exl2chat.model.strict_json import MAX_DEPTH, parse_object


def test_only_readable_kinds_are_listed(tmp_path: Path) -> None:
    for name in ("config.json", "chat_template.jinja", "tokenizer.model", "model.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
    for name in ("modeling_evil.py", "weights.zip", "weights.tar", "model.nemo", "README.md", "optimizer.pt"):
        (tmp_path / name).write_bytes(b"never read")
    assert sorted(open_folder(tmp_path).files) == [
        "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.model",
    ]  # fmt: skip


@pytest.mark.parametrize("suffix", sorted(PICKLES))
def test_pickled_weights_are_refused_unread(suffix: str, tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "code was run"),)

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / f"weights{suffix}").write_bytes(pickle.dumps(Touch()))
    with pytest.raises(ModelError, match=r"pickled.*safetensors"):
        open_folder(tmp_path)
    assert not (tmp_path / "code was run").exists()


def test_a_snapshot_of_the_hub_cache_opens_under_the_repository_s_name(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--small-model"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "f00d").write_text('{"a": 1}')
    (snapshot / "config.json").symlink_to("../../blobs/f00d")
    folder = open_folder(snapshot)
    assert folder.read_json("config.json") == {"a": 1}
    assert folder.name == "org/small-model"


def test_a_link_within_the_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "base.json").write_text('{"a": 1}')
    (tmp_path / "config.json").symlink_to("base.json")
    folder = open_folder(tmp_path)
    assert folder.read_json("config.json", required=True) == {"a": 1}
    assert folder.name == tmp_path.name


@pytest.mark.parametrize("target", ["../secret.json", "/etc/hostname", "missing.json", "config.json", "."])
def test_a_link_that_leads_astray_is_refused(target: str, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("{}")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").symlink_to(target)
    with pytest.raises(ModelError, match=r"config\.json: is "):
        open_folder(model)


def test_blobs_of_another_repository_are_out_of_bounds(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--c--d" / "blobs").mkdir(parents=True)
    (tmp_path / "models--c--d" / "blobs" / "x").write_text("{}")
    (snapshot / "config.json").symlink_to("../../../models--c--d/blobs/x")
    with pytest.raises(ModelError, match=r"config\.json: is a link that leads out.*\(name the folder that it leads to"):
        open_folder(snapshot)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelError, match="not a regular file"):
        open_folder(tmp_path)


@pytest.mark.parametrize("path", ["missing", "file.json"])
def test_what_is_no_folder(path: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text("{}")
    with pytest.raises(ModelError, match=r"config\.json"):
        open_folder(tmp_path / path)


def test_size_caps(tmp_path: Path) -> None:
    text = b'{"a": 1' + b" " * MAX_JSON + b"}"
    (tmp_path / "config.json").write_bytes(text)
    (tmp_path / "tokenizer.json").write_bytes(text)  # a tokenizer may be four times as large
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * 9)
    folder = open_folder(tmp_path)
    with pytest.raises(ModelError, match=r"config\.json: is larger than 16384 KiB"):
        folder.read_json("config.json")
    assert folder.read_json("tokenizer.json") == {"a": 1}
    assert folder.read_text("chat_template.jinja", 9) == "x" * 9
    with pytest.raises(ModelError, match=r"chat_template\.jinja: is larger"):
        folder.read_text("chat_template.jinja", 8)


def test_absent_files(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    assert folder.read_json("generation_config.json") is None
    assert folder.read_text("chat_template.jinja", 10) is None
    with pytest.raises(ModelError, match=r"there is no config\.json"):
        folder.read_json("config.json", required=True)


def nested(levels: int) -> bytes:
    return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "line 1"),
        (b"{", "line 1"),
        (b'{"a": 1,}', "line 1"),
        (b'{"a": 1}{', "Extra data"),
        (b"[1]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' is there twice"),
        (rb'{"a": [{"b": "x\uD800y"}]}', "half a surrogate pair"),
        (rb'{"\udc00": 1}', "half a surrogate pair"),
        (b'{"x": {"a": 1, "a": 1}}', "'a' is there twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b'{"a": "\n"}', "control character"),
        (nested(MAX_DEPTH + 1), "nested deeper"),
        (nested(100_000), "nested deeper"),
    ],
)
def test_json_is_parsed_strictly(data: bytes, says: str) -> None:
    with pytest.raises(ModelError, match=f"config: .*{says}"):
        parse_object(data, "config")


def test_a_whole_surrogate_pair_is_one_character() -> None:
    assert parse_object(rb'{"a": "\ud83d\ude00"}', "config") == {"a": "😀"}


def test_json_of_the_greatest_depth_is_parsed() -> None:
    assert "a" in parse_object(nested(MAX_DEPTH), "config")
