"""The tests that need a GPU are run on few machines. That they can be imported, every machine sees."""

import importlib
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parent / "gpu").glob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_can_be_imported_without_a_gpu(file: Path) -> None:
    assert importlib.import_module(f"tests.gpu.{file.stem}").__doc__
