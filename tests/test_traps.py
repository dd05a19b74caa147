"""Every test that docs/traps.md names is there."""

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_the_tests_named_beside_the_traps_exist():
    named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", (HERE.parent / "docs" / "traps.md").read_text())
    assert len(named) > 20
    for file, test in named:
        assert f"def {test}" in (HERE / file).read_text(), f"{file}::{test}"
