"""The peak of memory of a measurement does not depend on how many documents are read."""

import sys
from pathlib import Path

import numpy as np
import pytest

from rheoscope.instruments.measure import measure
from rheoscope.models.view import ModelView
from tests.tiny import tiny

from .texts import random_corpus

SLACK = 8 * 2**20  # bytes; the scores of one layer alone are 12 MB for the windows that the longer text has more


def peak_of(view, corpus):
    """Bytes of memory that a measurement takes at most beyond those held before it."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = held("VmHWM")
    measure(view, corpus, instruments=["loss", "routing", "steering", "sinks"], batch_size=4, nulls=False)
    return held("VmHWM") - before


def held(what):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a part of a process is told by Linux alone")
def test_the_peak_of_memory_does_not_grow_with_the_number_of_documents():
    view = ModelView(tiny("llama"))
    few = random_corpus(lengths=(29,) * 8, documents=tuple(range(8)))
    many = random_corpus(lengths=(29,) * 320, documents=tuple(range(320)))
    assert many.tokens.size * 6 * 29 * 8 > SLACK
    peak_of(view, few)  # what is set up once
    first = peak_of(view, few)
    assert peak_of(view, many) < first + SLACK
    assert np.unique(many.documents).size == 320
