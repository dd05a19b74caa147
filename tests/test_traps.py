"""Every class of traps has its row in docs/traps.md, and every test named there is there."""

import re
from pathlib import Path

HERE = Path(__file__).parent
CLASSES = range(1, 29)
ROW = re.compile(r"\| (\d+) \| [^|]+ \| ([^|]+) \|")


def rows():
    """Number of each class, and the tests named beside it as (file, function or nothing)."""
    lines = (HERE.parent / "docs" / "traps.md").read_text(encoding="utf-8").splitlines()
    found = [ROW.fullmatch(line) for line in lines if line.startswith("| ") and line[2].isdigit()]
    assert all(found), "a row is not of the form | number | class | tests |"
    return [(int(row[1]), re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", row[2])) for row in found]


def test_every_class_of_traps_has_one_row_in_order():
    assert [number for number, _ in rows()] == list(CLASSES)


def test_every_class_names_a_test():
    assert [number for number, tests in rows() if not tests] == []


def test_the_tests_named_beside_the_traps_exist():
    for _, tests in rows():
        for file, test in tests:
            defined = re.findall(r"^def (test_\w+)\(", (HERE / file).read_text(encoding="utf-8"), re.MULTILINE)
            assert test in defined or (not test and defined), f"{file}::{test}"
