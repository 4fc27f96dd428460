"""Tests of this folder need a GPU: `pytest -m gpu` runs them."""

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, so that none can run where there is no GPU by being forgotten."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("gpu")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer that the code under test allocates begins as NaN."""
    empty = torch.empty

    def filled(*shape: object, **options: object) -> torch.Tensor:
        made: torch.Tensor = empty(*shape, **options)  # type: ignore[call-overload]
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", filled)
