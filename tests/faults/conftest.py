"""The prepared folder of all fault tests."""

import pytest

from .commands import prepared


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A folder with a tiny model, texts and a plan."""
    return prepared(tmp_path_factory.mktemp("faults") / "base")
