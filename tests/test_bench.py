"""`exl2chat bench` on a tiny model: what is reported, not how fast it is."""

import json
from pathlib import Path

import pytest
import torch

from exl2chat import bench, cli
from exl2chat.engine import placement, shapes
from exl2chat.engine.shapes import SHAPES

GOLDEN = Path(__file__).parent / "data" / "golden"
DRAFTS = ["reply with drafts always right", "reply with drafts always wrong"]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets up its process; the process of the tests must stay as it is."""
    monkeypatch.setattr(bench, "complete_environment", lambda _defaults: None)


def names(report: dict) -> list[str]:
    return [row["name"] for row in report["rows"]]


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
    assert names(report) == ["prompt of 512", "reply at context 128", "reply at context 1024", *DRAFTS]
    for row in report["rows"]:
        assert row["ratio"] == pytest.approx(row["ceiling_microseconds"] / row["microseconds"], rel=0.01)
        assert row["tokens_per_second"] == pytest.approx(row["rows"] * 1e6 / row["microseconds"], rel=0.01)


def test_the_table_names_the_model_and_both_contexts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("llama-3.0bpw-exl2", tmp_path=tmp_path) == 0
    shown, errors = capsys.readouterr()
    assert errors == ""
    assert [line for line in shown.splitlines() if not line.strip()] == []
    assert "of one" not in shown  # several tokens at once are measured on a GPU only
    for text in (
        "llama-3.0bpw-exl2",
        "EXL2",
        "bfloat16",
        "prompt of 512",
        "reply at context 1024",
        "load",
        "MiB",
        "ceiling of drafts: the same",
    ):
        assert text in shown


def test_a_context_bounds_what_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("llama-3.0bpw-exl2", "--json", "--ctx", "256", tmp_path=tmp_path) == 0
    report = json.loads(capsys.readouterr().out)
    assert names(report) == ["prompt of 256", "reply at context 128", *DRAFTS]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_shape_needs_no_model(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["bench", "--shape", "tiny", "--device", "cpu", "--dtype", dtype, "--json", "--home", str(tmp_path)]
    assert cli.main(flags) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(names(report)) == 5
    assert "tiny" in report["model"]
    assert report["weight_bytes"] == SHAPES["tiny"].weight_bytes(torch.device("cpu"), getattr(torch, dtype))


def test_a_shape_says_once_that_its_weights_are_random_and_counts_in_one_unit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--shape", "tiny", "--device", "cpu", "--ctx", "256", "--home", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count("random weights") == 1
    assert " MiB" in said
    assert " MB" not in said


def test_every_shape_can_be_asked_for() -> None:
    assert set(bench.SHAPES) == SHAPES.keys()


def test_a_shape_and_a_model_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("llama-fp16", "--shape", "tiny", tmp_path=tmp_path) == 2
    assert "--shape" in capsys.readouterr().err


def test_a_shape_that_does_not_fit_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "free_bytes", lambda _: 8 << 30)
    assert cli.main(["bench", "--shape", "llama-8b", "--device", "cpu", "--home", str(tmp_path)]) == 3
    said = capsys.readouterr().err
    assert "--shape llama-8b" in said
    assert "do not fit 8.0 GiB" in said


def test_a_shape_that_the_system_has_no_room_for_after_all_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(shapes, "random_model", full)
    assert cli.main(["bench", "--shape", "tiny", "--device", "cpu", "--home", str(tmp_path)]) == 3
    said = capsys.readouterr().err
    assert said.startswith("exl2chat: out of memory\n")
    assert "--ctx" in said


def test_a_context_beyond_the_models_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("llama-3.0bpw-exl2", "--ctx", "1000000", tmp_path=tmp_path) == 2
    assert "made for 2048 tokens" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_one_line_and_status_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("nothing-here", tmp_path=tmp_path) == 3
    assert len(capsys.readouterr().err.strip().splitlines()) <= 2
