"""The committed GPU report belongs to these sources, and says that every GPU test passed there."""

import json
import warnings
from pathlib import Path

import pytest

from exl2chat.gpu_report import source_hash

FILE = Path(__file__).parent.parent / "benchmarks" / "gpu-report.json"
COMMAND = "run `exl2chat bench --report benchmarks/gpu-report.json` on a machine with a GPU"
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
