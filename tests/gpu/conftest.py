"""Tests of this folder need a GPU: `pytest -m gpu` runs them."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, so that none can run where there is no GPU by being forgotten."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("gpu")
