"""The committed GPU report belongs to these sources, and says that every GPU test passed there."""

import json
import warnings
from pathlib import Path

import pytest

from exl2chat.gpu_report import source_hash

FILE = Path(__file__).parent.parent / "benchmarks" / "gpu-report.json"
COMMAND = "run `exl2chat bench --report benchmarks/gpu-report.json` on a machine with a GPU"
STEPS = {
    "reply at context 128": ("step at context 128", 1, "252 tokens/s"),
    "reply at context 4096": ("step at context 4096", 1, "140 tokens/s"),
    "reply at context 32768": ("step at context 32768", 1, "35 tokens/s"),
    "5 tokens in one step at context 128": ("step at context 128", 5, "8.5 ms"),
    "prompt of 2048": ("prompt of 2048", 2048, "34,600 tokens/s"),
}
NAMES = ("qkv", "o", "gate_up", "down", "head", "all matrices of a token")


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


def test_no_benchmark_row_is_missing(report: dict) -> None:
    rows = {(row["name"], row["rows"]): row for row in report["rows"]}
    missing = [(name, count) for name in NAMES for count in (1, 5, 16) if (name, count) not in rows]
    assert not missing, COMMAND
    assert all(0 < row["ratio"] <= 1.05 for row in rows.values())


def test_the_readme_gives_the_figures_of_the_report(report: dict) -> None:
    rows = {(row["name"], row["rows"]): row for row in report["rows"]}
    readme = (FILE.parents[1] / "README.md").read_text("utf-8")
    for label, (name, count, reference) in STEPS.items():
        row = rows[name, count]
        per_second = (count if name == label else 1) * 1e6 / row["microseconds"]
        figure = f"{row['microseconds'] / 1000:.1f} ms" if count == 5 else f"{per_second:,.0f} tokens/s"
        assert f"| {label} | {figure} | {100 * row['ratio']:.0f} % | {reference} |" in readme
