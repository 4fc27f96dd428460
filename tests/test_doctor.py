"""`exl2chat doctor` on machines of all kinds: what it says, and that it never ends in a traceback."""

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from exl2chat import cli, doctor
from exl2chat.engine.checkup import FAMILIES
from exl2chat.errors import ModelError
from exl2chat.kernels import FOLDER
from exl2chat.paths import Paths


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets up its process; the process of the tests must stay as it is."""
    monkeypatch.setattr(doctor, "complete_environment", lambda _defaults: None)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path / "no driver")


def find(tmp_path: Path, name: str) -> doctor.Finding:
    return next(finding for finding in doctor.examine(Paths.default(tmp_path)) if finding.name == name)


def test_a_machine_without_a_gpu_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--home", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("OK") for line in lines)
    for words in ("GPU", "the model runs on the processor", "torch", "GiB free", "cores", str(tmp_path)):
        assert any(words in line for line in lines), words


def test_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json", "--home", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"]
    assert {finding["name"] for finding in report["findings"]} >= {"torch", "memory", "GPU"}
    assert all(set(finding) == {"name", "found", "remedy", "ok"} for finding in report["findings"])


def test_a_broken_config_file_is_a_finding_with_a_remedy_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.toml").write_text("temperature = 'hot'")
    assert cli.main(["doctor", "--home", str(tmp_path)]) == 1
    problem, remedy = capsys.readouterr().out.partition("PROBLEM ")[2].splitlines()[:2]
    assert "config.toml" in problem
    assert remedy.strip()


def test_chats_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    sessions = Paths.default(tmp_path).sessions
    sessions.mkdir(parents=True)
    (sessions / "torn.jsonl").write_bytes(b"garbage")
    finding = find(tmp_path, "folders")
    assert not finding.ok
    assert "torn.jsonl" in finding.found


@pytest.mark.parametrize("full", ["data", "cache", "state"])
def test_a_folder_on_a_full_disk_is_named_with_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    place = tmp_path / full
    place.mkdir()
    free = {place: 4096}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free.get(path, 64 << 20)))
    finding = find(tmp_path, "folders")
    assert str(place) in finding.found
    assert "4,096 bytes free" in finding.found
    assert "--home" in finding.remedy
    free.clear()
    assert find(tmp_path, "folders").ok


def test_an_output_that_is_no_terminal_is_said_to_be_none_and_no_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["doctor", "--home", str(tmp_path)])
    line = next(line for line in capsys.readouterr().out.splitlines() if " terminal " in line)
    assert line.startswith("OK")
    assert "the output is not a terminal" in line


@pytest.mark.parametrize("fault", [RuntimeError("torn\nlibrary"), ImportError("no such .so"), OSError(5, "I/O")])
def test_whatever_a_check_raises_is_a_finding(fault: Exception) -> None:
    def check() -> doctor.Finding:
        raise fault

    finding = doctor.attempt("it", check)
    assert not finding.ok
    assert type(fault).__name__ in finding.found
    assert "\n" not in finding.found


@pytest.mark.parametrize("locked", ["", "data", "cache"])
def test_a_folder_that_may_not_be_entered_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: str
) -> None:
    """As the superuser, whom nothing is forbidden, would not find out."""
    home = tmp_path / "home"
    for name in ("config", "data", "cache", "state"):
        (home / name).mkdir(parents=True)
    place, real, access = home / locked, os.stat, os.access

    def stat(path: str | os.PathLike[str], **options: bool) -> os.stat_result:
        if place in Path(path).parents:
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return real(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != place and access(path, mode))
    for finding in (doctor.check_folders(Paths.default(home)), find(home, "models")):
        assert finding.ok or (str(place) in finding.found and "--home" in finding.remedy), finding
    assert not doctor.check_folders(Paths.default(home)).ok


def test_our_own_errors_keep_their_remedy() -> None:
    def check() -> doctor.Finding:
        raise ModelError("kernel x.cu does not compile", "install y")

    assert doctor.attempt("it", check) == doctor.Finding("it", "kernel x.cu does not compile", "install y")


def test_a_driver_without_a_torch_for_it_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path / "version")
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed Aug 27 2025\n")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "with CUDA" in find(tmp_path, "torch").remedy
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    finding = find(tmp_path, "GPU")
    assert "580.82.07" in finding.found
    assert "driver" in finding.remedy


def test_little_memory_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exl2chat.engine.placement.free_bytes", lambda _: 1 << 30)
    assert not find(tmp_path, "memory").ok


def test_a_gpu_without_cupy_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_cupy() -> doctor.Finding:
        raise ModuleNotFoundError("No module named 'cupy'")

    monkeypatch.setattr(doctor, "has_gpu", lambda: True)
    monkeypatch.setattr(doctor, "check_cupy", no_cupy)
    findings = {finding.name: finding for finding in doctor.examine(Paths.default(tmp_path))}
    assert "exl2chat[cuda13]" in findings["CuPy"].remedy
    assert not FAMILIES.keys() & findings.keys()


def test_the_families_cover_every_kernel() -> None:
    """read.cu measures the bandwidth."""
    checked = {file for family in FAMILIES.values() for file in family.files} | {"read.cu"}
    assert checked == {file.name for file in FOLDER.glob("*.cu")}
