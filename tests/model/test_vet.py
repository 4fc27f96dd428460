"""Unseen files are tried in a child that may die; what passed is remembered."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from exl2chat.errors import ModelError
from exl2chat.model import vet as module
from exl2chat.model.folder import ModelFolder, open_folder
from exl2chat.model.vet import vet
from exl2chat.paths import Paths
from tests.model.tokenizer_files import tokenizer_json, write_tokenizer

DOUBLING = "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
CATASTROPHIC = {"type": "Split", "pattern": {"Regex": "(a|aa)+$|(a*)*b"}, "behavior": "Isolated", "invert": False}
MULTIPLYING = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 64}


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths.default(tmp_path / "home")


@pytest.fixture
def model(tmp_path: Path) -> ModelFolder:
    (tmp_path / "model").mkdir()
    return write_tokenizer(tmp_path / "model", "byte_level")


def with_normalizer(model: ModelFolder, **changes: Any) -> ModelFolder:
    (model.path / "tokenizer.json").write_text(json.dumps({**json.loads(tokenizer_json("byte_level")), **changes}))
    return open_folder(model.path)


def test_what_passed_is_not_tried_again_until_it_changes(
    model: ModelFolder, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    run = subprocess.run
    monkeypatch.setattr(module.subprocess, "run", lambda *a, **k: started.append(a) or run(*a, **k))
    vet(model, paths)
    vet(model, paths)
    assert len(started) == 1
    assert (paths.cache / "vetted").stat().st_mode & 0o077 == 0
    (model.path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    vet(open_folder(model.path), paths)
    assert len(started) == 2


def test_where_nothing_can_be_remembered_models_still_pass(model: ModelFolder, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")
    vet(model, Paths.default(tmp_path / "home"))


def test_a_file_that_went_away_is_named(model: ModelFolder, paths: Paths) -> None:
    model.files["tokenizer.json"].unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json: No such file"):
        vet(model, paths)


def test_a_template_that_eats_all_memory_is_refused(model: ModelFolder, paths: Paths) -> None:
    (model.path / "chat_template.jinja").write_text(DOUBLING)
    with pytest.raises(ModelError, match="refused"):
        vet(open_folder(model.path), paths)
    assert not (paths.cache / "vetted").exists()


def test_a_normaliser_that_multiplies_text_is_refused(model: ModelFolder, paths: Paths) -> None:
    hostile = with_normalizer(model, normalizer={"type": "Sequence", "normalizers": [MULTIPLYING] * 6})
    with pytest.raises(ModelError, match="refused"):
        vet(hostile, paths)


def test_a_pattern_that_never_ends_is_refused(model: ModelFolder, paths: Paths) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: .*retry-limit"):
        vet(with_normalizer(model, pre_tokenizer=CATASTROPHIC), paths)


def test_code_in_the_current_folder_is_not_run(
    model: ModelFolder, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = model.path / "ran"
    (model.path / "tokenizers.py").write_text(f"open({str(ran)!r}, 'w')\nraise SystemExit(0)")
    monkeypatch.chdir(model.path)
    vet(model, paths)
    assert not ran.exists()


def test_malformed_files_are_named(model: ModelFolder, paths: Paths) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: normalizer 'Exec' is not supported"):
        vet(with_normalizer(model, normalizer={"type": "Exec"}), paths)
