"""`exl2chat pull`: the folder on stdout, progress on stderr, errors as errors."""

import argparse
import io
from pathlib import Path

import pytest
from rich.console import Console

from exl2chat import pull
from exl2chat.errors import ModelError
from exl2chat.model import smollm2
from exl2chat.paths import Paths
from exl2chat.settings import Settings


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths.default(tmp_path / "home")


def run(paths: Paths, *arguments: str, settings: Settings | None = None) -> int:
    parser = argparse.ArgumentParser()
    pull.add_arguments(parser)
    return pull.main(parser.parse_args(arguments), settings or Settings(), paths)


def test_the_default_model_that_is_there_is_printed(paths: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    folder = paths.models / smollm2.FOLDER
    folder.mkdir(parents=True)
    assert run(paths) == 0
    assert run(paths, "smollm2") == 0
    assert capsys.readouterr().out.splitlines() == [str(folder)] * 2


def test_a_folder_is_printed_and_nothing_else(paths: Paths, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(paths, str(tmp_path)) == 0
    output = capsys.readouterr()
    assert output.out == f"{tmp_path}\n"
    assert "\x1b" not in output.err


def test_without_a_reference_the_model_of_the_settings_is_meant(
    paths: Paths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings().with_layer("environment", {"model": str(tmp_path)})
    assert run(paths, settings=settings) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    with pytest.raises(ModelError, match="neither a folder nor a model on the hub"):
        run(paths, "", settings=settings)


def test_what_cannot_be_had_is_an_error(paths: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        run(paths, "./no-such-model")
    assert capsys.readouterr().out == ""


def test_the_list_has_name_size_and_folder(
    paths: Paths, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "no-cache"))
    folder = paths.models / smollm2.FOLDER
    folder.mkdir(parents=True)
    (folder / "output.safetensors").write_bytes(bytes(3_400_000))
    assert run(paths, "--list") == 0
    assert capsys.readouterr().out == f"smollm2\t3 MB\t{folder}\n"


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        ((0, 0, ""), ""),
        ((500_000, 92_871_040, "B"), "0.5 of 92.9 MB"),
        ((7, 211, "matrices"), "7 of 211 matrices"),
    ],
)
def test_amounts_read_well(amount: tuple[int, int, str], text: str) -> None:
    screen = io.StringIO()
    with pull.bar(Console(file=screen, force_terminal=True, width=100)) as show:
        show("fetching\x1b]0;title\x07 it", *amount)
    assert text in screen.getvalue()
    assert "fetching" in screen.getvalue()
    assert "\x1b]0" not in screen.getvalue()


def test_where_there_is_nothing_to_do_no_bar_is_drawn() -> None:
    screen = io.StringIO()
    with pull.bar(Console(file=screen, force_terminal=True)):
        pass
    assert screen.getvalue() == ""


def test_off_a_terminal_no_bar_is_drawn() -> None:
    screen = io.StringIO()
    with pull.bar(Console(file=screen)) as show:
        show("fetching", 1, 2, "files")
    assert screen.getvalue() == ""
