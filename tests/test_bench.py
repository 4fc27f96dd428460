"""`exl2chat bench` on a tiny model: what is reported, not how fast it is."""

import json
from pathlib import Path

import pytest

from exl2chat import bench, cli

GOLDEN = Path(__file__).parent / "data" / "golden"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets up its process; the process of the tests must stay as it is."""
    monkeypatch.setattr(bench, "complete_environment", lambda _defaults: None)


def run(model: str, *flags: str, tmp_path: Path) -> int:
    return cli.main(["bench", "--model", str(GOLDEN / model), "--device", "cpu", "--home", str(tmp_path), *flags])


@pytest.mark.parametrize(
    ("model", "flags", "dtype"),
    [
        ("llama-3.0bpw-exl2", ["--dtype", "float16"], "float16"),
        ("llama-gptq4-g128-asym", [], "bfloat16"),
        ("phi3-4.0bpw-exl2", ["--dtype", "float32"], "float32"),
    ],
)
def test_json_is_one_object_on_stdout(
    model: str, flags: list[str], dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, *flags, "--json", tmp_path=tmp_path) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["device"], report["dtype"], report["threads"] > 0) == ("cpu", dtype, True)
    assert report["prefill_per_second"] > 0
    assert [row["context"] for row in report["decode"]] == [128, 1024]
    for row in report["decode"]:
        assert row["ratio"] == pytest.approx(row["per_second"] / row["matrices_per_second"])
        assert row["read_bytes_per_second"] > row["per_second"] * report["weight_bytes"] / 2


def test_the_table_names_the_model_and_both_contexts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("llama-3.0bpw-exl2", tmp_path=tmp_path) == 0
    shown, errors = capsys.readouterr()
    assert errors == ""
    assert [line for line in shown.splitlines() if not line.strip()] == []
    for text in ("llama-3.0bpw-exl2", "EXL2", "bfloat16", "prompt of 512", "reply at 128", "reply at 1024", "load"):
        assert text in shown


def test_a_context_bounds_what_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("llama-3.0bpw-exl2", "--json", "--ctx", "256", tmp_path=tmp_path) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["prefill_tokens"], [row["context"] for row in report["decode"]]) == (256, [128])


def test_a_context_beyond_the_models_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("llama-3.0bpw-exl2", "--ctx", "1000000", tmp_path=tmp_path) == 2
    assert "made for 2048 tokens" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_one_line_and_status_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("nothing-here", tmp_path=tmp_path) == 3
    assert len(capsys.readouterr().err.strip().splitlines()) <= 2
