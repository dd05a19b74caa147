"""One short training run that several tests look at."""

import pytest
import torch

from rheoscope.nets.ranks import training_ranks
from rheoscope.nets.train import train

TEXT = "".join(
    f"the {a} of the {b} sees the {c}. " for a in range(12) for b in ["river", "hill", "stone"] for c in "abcd"
)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


def short(kind, text, out, **changes):
    """A run of 24 steps in float32, in a second or two."""
    recipe = {"steps": 24, "window": 32, "batch": 8, "log_every": 2, "save_every": 6, "precision": "float32"}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads add in another order from run to run
    try:
        return train(kind, text=text, out=out, **(recipe | changes))
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def trained(text, tmp_path_factory):
    """A short S-D run with dropout and a probe every five steps."""
    out = tmp_path_factory.mktemp("run") / "sd"
    return short("sd", text, out, dropout=0.1, probe=training_ranks, probe_every=5)
