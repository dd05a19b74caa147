"""What tests of experiments share: scripts that import one another by name."""

import sys

import pytest


@pytest.fixture
def scripts(monkeypatch):
    """A function that imports scripts of an experiment's folder, by name; they are forgotten afterwards."""
    imported = []

    def scripts_of(folder, *names):
        monkeypatch.syspath_prepend(str(folder))
        imported.extend(names)
        for name in names:
            sys.modules.pop(name, None)
        return [pytest.importorskip(name) for name in names]

    yield scripts_of
    for name in imported:
        sys.modules.pop(name, None)
