"""`import exllamav2` after one call."""

import importlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import exl2chat.exllamav2
from exl2chat.errors import UsageError

MODEL = Path(__file__).parents[1] / "data" / "golden" / "llama-6.0bpw-exl2"
SCRIPT = Path(__file__).parent / "scripts" / "jobs.py"


@pytest.fixture(autouse=True)
def _modules() -> Iterator[None]:
    """What is installed is gone after the test."""
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "exllamav2"]:
        del sys.modules[name]


def test_every_module_under_their_name_is_ours() -> None:
    exl2chat.exllamav2.install()
    exl2chat.exllamav2.install()
    names = [name for name in sys.modules if name == "exllamav2" or name.startswith("exllamav2.")]
    assert {"exllamav2", "exllamav2.generator", "exllamav2.generator.filters.base", "exllamav2.model"} <= set(names)
    for name in names:
        assert importlib.import_module(name) is importlib.import_module("exl2chat." + name)


def test_exllamav2_itself_is_not_mixed_with_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "exllamav2", ModuleType("exllamav2"))
    with pytest.raises(UsageError, match="imported already"):
        exl2chat.exllamav2.install()


def test_a_script_of_all_generators_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And all of them write the same."""
    monkeypatch.setattr("exl2chat.exllamav2.model.choose_dtype", lambda *_: torch.float32)
    exl2chat.exllamav2.install()
    monkeypatch.setattr(sys, "argv", ["jobs.py", str(MODEL)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = dict(line.split("|", 1) for line in capsys.readouterr().out.splitlines() if "|" in line)
    assert lines["choice"] in (" yes", " no")
    assert lines["dynamic"].startswith("Once upon a time")
    assert lines["dynamic"] == lines["jobs"] == lines["base"] == lines["async"]
