"""What tests of opening models share."""

import pytest
from huggingface_hub import constants

from tests.models.checkpoints import saved


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """The hub switched off; tests of a hub that does not answer switch it on themselves."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path):
    """A whole checkpoint of a tiny llama, which a test may break."""
    return saved("llama", tmp_path / "model")
