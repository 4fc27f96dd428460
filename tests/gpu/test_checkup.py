"""What `exl2chat doctor` runs on a GPU."""

import json
from pathlib import Path

import pytest
import torch

from exl2chat import cli
from exl2chat.engine.checkup import FAMILIES, TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_agrees_with_the_reference(name: str) -> None:
    """Numbers are rounded; drawn tokens are the same or not."""
    error = FAMILIES[name].error(torch.device("cuda"))
    assert error == 0 if name == "drawing" else 0 < error <= TOLERANCE


def test_the_doctor_finds_nothing_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json", "--home", str(tmp_path)]) == 0
    found = {finding["name"]: finding["found"] for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert FAMILIES.keys() <= found.keys()
    assert "GB/s" in found["read bandwidth"]
