"""The note on exllamav2's defects names tests that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_defect_is_guarded_by_a_test_that_exists() -> None:
    rows = [line for line in (ROOT / "docs" / "defects.md").read_text().splitlines() if line.startswith("| B-")]
    assert [row.split()[1] for row in rows] == [f"B-{number}" for number in range(1, 17)]
    for row in rows:
        guards = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert guards
        for path, name in guards:
            assert f"def {name}(" in (ROOT / path).read_text(), f"{path} has no {name}"
