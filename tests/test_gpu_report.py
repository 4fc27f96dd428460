"""The committed GPU report belongs to these sources, and says that every GPU test passed there."""

import json
import re
import subprocess
import warnings
from pathlib import Path

import pytest
import torch

from exl2chat import gpu_report
from exl2chat.engine.checkup import FAMILIES
from exl2chat.errors import ModelError
from exl2chat.gpu_report import SANITIZERS, source_hash

FILE = Path(__file__).parent.parent / "benchmarks" / "gpu-report.json"
COMMAND = "run `exl2chat bench --report benchmarks/gpu-report.json` on a machine with a GPU"
KERNELS = ("qkv", "o", "gate_up", "down", "head", "all matrices of a token")
# The rows of the README's table, by shape: what exllamav2 reached on the same card.
SHAPES = {
    "llama-8b": {
        "reply at context 128": "252 tokens/s",
        "reply at context 4096": "140 tokens/s",
        "reply at context 32768": "35 tokens/s",
        "5 tokens at once at context 128": "8.5 ms",
        "prompt of 2048": "34,600 tokens/s",
        "prompt of 8192": "21,800 tokens/s",
        "32 jobs at context 128": "not measured",
    },
}


@pytest.fixture(scope="module")
def report() -> dict:
    return json.loads(FILE.read_text("utf-8"))


def test_the_report_is_of_these_sources(report: dict) -> None:
    if "stale" in report:
        warnings.warn(f"the GPU report is of an older commit: {report['stale']}", stacklevel=1)
    else:
        assert report["source_hash"] == source_hash(), COMMAND


def test_every_gpu_test_passed(report: dict) -> None:
    tests = report["tests"]
    assert tests["passed"] > 100
    assert not tests["failure"] + tests["error"] + tests["skipped"], COMMAND


@pytest.mark.parametrize("tool", SANITIZERS)
def test_the_sanitizer_found_nothing_in_any_family(report: dict, tool: str) -> None:
    """A report of an older commit knows the families there were."""
    families = report["sanitizer"].get(tool, {}) if "stale" in report else FAMILIES
    assert report["sanitizer"].get(tool, {}) == dict.fromkeys(families, 0), COMMAND


def test_no_kernel_is_missing(report: dict) -> None:
    rows = {(row["name"], row["rows"]): row for row in report["rows"]}
    assert not [(name, count) for name in KERNELS for count in (1, 5, 16) if (name, count) not in rows], COMMAND
    # Few rows of packed weights are faster than torch's float16 product, which reads four times as much.
    assert all(0 < row["ratio"] <= (1.05 if "read" in row["ceiling"] else 2) for row in rows.values())


@pytest.mark.parametrize("shape", SHAPES)
def test_no_row_of_a_whole_model_is_missing(report: dict, shape: str) -> None:
    rows = {row["name"]: row for row in report["shapes"][shape]}
    assert not SHAPES[shape].keys() - rows.keys(), COMMAND
    assert all(0 < row["ratio"] <= 1.05 for name, row in rows.items() if "drafts" not in name)


def test_the_generators_keep_what_they_promise(report: dict) -> None:
    found = gains(report)
    assert min(found[kind] for kind in found if "always right" in kind) >= 3, COMMAND
    assert min(found[kind] for kind in found if "always wrong" in kind) >= 0.95, COMMAND
    assert found["32 jobs at once"] >= 12, COMMAND
    assert found["next turn"] <= 0.05, COMMAND


def gains(report: dict) -> dict[str, float]:
    """How many times as fast a reply is with drafts, all jobs together are as one; and the time to the first token of a
    next turn as a part of that of the first."""
    rows = {row["name"]: row for row in report["shapes"]["llama-8b"]}
    speed = {name: row["tokens_per_second"] for name, row in rows.items()}
    plain = "8 jobs at context 128, 128 tokens each"
    return {
        "a reply with drafts always right": rows["reply with drafts always right"]["ratio"],
        "a reply with drafts always wrong": rows["reply with drafts always wrong"]["ratio"],
        "8 jobs with drafts always right": speed[f"{plain}, drafts always right"] / speed[plain],
        "8 jobs with drafts always wrong": speed[f"{plain}, drafts always wrong"] / speed[plain],
        "32 jobs at once": speed["32 jobs at context 128"] / speed["1 job at context 128"],
        "next turn": next(row["times_one"] for name, row in rows.items() if "next turn" in name),
    }


def test_every_shape_was_measured(report: dict) -> None:
    assert "stale" in report or {"llama-8b", "llama-1b"} <= report["shapes"].keys(), COMMAND


def test_the_readme_says_of_which_commit_a_stale_report_is(report: dict) -> None:
    readme = (FILE.parents[1] / "README.md").read_text("utf-8")
    assert "stale" not in report or re.search(r"commit [0-9a-f]{7}", report["stale"])[0] in readme


@pytest.mark.parametrize("shape", SHAPES)
def test_the_readme_gives_the_figures_of_the_report(report: dict, shape: str) -> None:
    rows = {row["name"]: row for row in report["shapes"][shape]}
    readme = (FILE.parents[1] / "README.md").read_text("utf-8")
    for name, reference in SHAPES[shape].items():
        assert readme_row(rows[name], reference) in readme


def test_the_readme_gives_the_gains_of_the_report(report: dict) -> None:
    readme = (FILE.parents[1] / "README.md").read_text("utf-8")
    for name, gain in gains(report).items():
        assert (f"{100 * gain:.1f} %" if name == "next turn" else f"| {name} | {gain:.2f} times |") in readme


def readme_row(row: dict, reference: str) -> str:
    """Milliseconds for several tokens in one step, tokens per second for everything else."""
    is_step = "tokens at once" in row["name"]
    speed = row["rows"] * 1e6 / row["microseconds"]
    figure = f"{row['microseconds'] / 1000:.1f} ms" if is_step else f"{speed:,.0f} tokens/s"
    return f"| {row['name']} | {figure} | {100 * row['ratio']:.0f} % | {reference} |"


def test_what_a_sanitizer_says_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        family = command[-1]
        status, said = {"good": (0, "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"),
                        "bad": (0, "RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)"),
                        "dead": (1, "Segmentation fault")}[family]  # fmt: skip
        return subprocess.CompletedProcess(command, status, f"========= {said}\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert [gpu_report.sanitize("racecheck", name) for name in ("good", "bad")] == [0, 3]
    assert "Segmentation fault" in str(gpu_report.sanitize("racecheck", "dead"))


def test_a_machine_without_the_sanitizer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "compute-sanitizer" in str(gpu_report.sanitize("memcheck", "attention"))


def test_a_report_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refusal() -> ModelError:
        with pytest.raises(ModelError) as caught:
            gpu_report.write_report(tmp_path / "report.json", lambda *_: None)
        return caught.value

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "NVIDIA GPU" in refusal().message
    assert "exl2chat doctor" in refusal().remedy
    assert "without --report" in refusal().remedy
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_report.importlib.util, "find_spec", lambda _: None)
    assert "CuPy" in refusal().message
    monkeypatch.setattr(gpu_report.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(gpu_report, "TESTS", tmp_path / "none")
    assert "clone" in refusal().remedy


def test_how_each_test_ended_is_read_and_a_file_that_died_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    head = "import os, pytest\npytestmark = pytest.mark.gpu\n"
    tests = "def test_good(): pass\ndef test_bad(): assert 0\ndef test_skipped(): pytest.skip()\n"
    (tmp_path / "test_some.py").write_text(head + tests)
    (tmp_path / "test_dead.py").write_text(head + "os._exit(1)\n")
    (tmp_path / "test_last.py").write_text(head + "def test_alone(): pass\n")
    monkeypatch.setattr(gpu_report, "TESTS", tmp_path)
    monkeypatch.setattr(gpu_report, "ALONE", ("test_last.py",))
    monkeypatch.setattr(gpu_report, "run_sanitizer", lambda: {"memcheck": {"drawing": 0}})
    tests, sanitizer = gpu_report.run_checks()
    assert tests == {"passed": 2, "failure": ["test_bad"], "error": ["test_dead.py"], "skipped": ["test_skipped"]}
    assert sanitizer == {"memcheck": {"drawing": 0}}
