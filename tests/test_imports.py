"""Imports go one way: a room knows those below it, never those above."""

import ast
from pathlib import Path

import rheoscope

PACKAGE = Path(rheoscope.__file__).parent
FLOORS = (
    {"errors"},
    {"linalg", "stats", "soundness", "storage", "tables", "run"},
    {"models", "corpus"},
    {"instruments", "theory"},
    {"surgery", "nets"},
    {"report"},
    {"cli", "registration"},
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
UPWARD = {
    ("run", "report"),  # `Run.report`, which imports the page when it is called
    ("models", "nets"),  # `load`, which makes our own model types known to transformers when it is called
    ("models", "surgery"),  # the same for models that were edited
}


def imports():
    """(room, room it imports) for every import inside the package, wherever it stands in a file."""
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                base = list(parts[: -node.level]) if node.level else []
                names = [(*base, *(node.module or "").split("."), alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name.split(".") for alias in node.names]
            else:
                continue
            for name in names:
                inside = [part for part in name if part]
                if inside[0] == "rheoscope" and len(inside) > 1 and len(parts) > 1:
                    yield parts[1], inside[1]


def test_every_room_has_its_floor():
    rooms = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert rooms - {"__init__", "__main__"} == set(FLOOR)


def test_no_room_imports_one_above_it():
    entrances = {"__init__", "__main__"}
    upward = {(room, other) for room, other in imports() if room not in entrances and FLOOR[room] < FLOOR[other]}
    assert upward == UPWARD
