"""Malformed model folders: each gives one clear line that names the file, and the exit status of a model error.

A case is a golden model, a change to a copy of it, and what the message must say. Nothing else may escape.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from exl2chat.errors import ModelError
from exl2chat.model.checkpoint import open_checkpoint
from tests.model.malformed_config import CONFIG, GENERATION
from tests.model.malformed_files import FOLDER, HEADER, Change
from tests.model.malformed_tensors import TENSORS
from tests.model.model_files import EXL2, copy_golden, edit_json

CASES: dict[str, tuple[str, Change, str]] = {
    **{
        f"config {json.dumps({k: '(absent)' if v is ... else v for k, v in changes.items()})[:90]}": (
            EXL2, lambda folder, changes=changes: edit_json(folder, changes), says.removesuffix(" is"),
        )
        for changes, says in CONFIG
    },
    **{
        f"generation {json.dumps(changes)}": (
            EXL2, lambda folder, changes=changes: edit_json(folder, changes, "generation_config.json"), says,
        )
        for changes, says in GENERATION
    },
    **{f"header: {name[:60]}": (EXL2, change, says) for name, change, says in HEADER},
    **{f"tensors of {model[:10]}: {name}": (model, change, says) for name, model, change, says in TENSORS},
    **{f"folder: {name[:60]}": (EXL2, change, says) for name, change, says in FOLDER},
}  # fmt: skip


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A folder that is gone after the test: together the cases write half a gigabyte."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_a_malformed_folder_gives_one_clear_line(case: str, scratch: Path) -> None:
    golden, change, says = CASES[case]
    folder = copy_golden(golden, scratch)
    open_checkpoint(folder)
    change(folder)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert says in message
    assert str(folder) in message
    assert message.isprintable()
    assert len(message) < 600
    assert caught.value.remedy
    assert caught.value.status == 3


def test_the_corpus_is_as_large_as_promised() -> None:
    parts = (CONFIG, GENERATION, HEADER, TENSORS, FOLDER)
    assert len(CASES) == sum(map(len, parts))  # no case hides another of the same name
    assert len(CASES) >= 150
