"""The peak of memory of a measurement does not depend on how many documents are read."""

import sys
from pathlib import Path

import numpy as np
import pytest

from rheoscope.instruments.measure import measure
from rheoscope.instruments.memory import window_bytes
from rheoscope.instruments.sinks.sinks import SinkReadings
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


@pytest.mark.parametrize(("name", "needed"), [("llama", False), ("gemma2", True), ("gpt_oss", True)])
def test_a_model_that_needs_its_maps_is_estimated_with_them(name, needed):
    view, window = ModelView(tiny(name)), 512
    assert view.needs_maps is needed
    maps = view.n_heads * window**2 * view.dtype.itemsize
    per_window = window_bytes(view, [SinkReadings(view, random_corpus())], window, head=False)
    without = window_bytes(view, [], 1, head=False) * window
    assert (per_window >= without + maps) is view.needs_maps
