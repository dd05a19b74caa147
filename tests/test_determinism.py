"""The same seed gives the same bytes of numbers: twice in one process, in two processes; nearly so on two threads."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from rheoscope.corpus import read
from rheoscope.instruments.measure import measure
from rheoscope.models.load import load

PROGRAM = """
import sys, torch
from tests.test_determinism import digest, numbers
torch.set_num_threads(int(sys.argv[1]))
first = numbers()
second = numbers()
print(digest(first), digest(second))
if len(sys.argv) > 2:
    import numpy as np
    np.savez(sys.argv[2], **first)
"""
# Largest change by another number of threads, over the largest value of a variable; measured: see docs/trust.md.
TOLERANCE = 1e-12


def numbers():
    """Every number of a run of the built-in model by all instruments, with nulls."""
    view = load("builtin:manual")
    corpus = read("builtin:manual", tokenizer=view.tokenizer, window=64, n_windows=24, windows_per_document=1)
    run = measure(view, corpus, batch_size=4, seed=7)
    return {
        f"{instrument}.{name}": variable.values
        for instrument in run.instruments
        for name, variable in run[instrument].data_vars.items()
        if variable.dtype.kind in "fiubc"
    }


def digest(values):
    """SHA-256 over names, shapes, types and bytes."""
    found = hashlib.sha256()
    for name in sorted(values):
        array = np.ascontiguousarray(values[name])
        found.update(f"{name} {array.shape} {array.dtype}".encode() + array.tobytes())
    return found.hexdigest()


def in_a_process(threads, *arguments):
    """Digests of two runs in a process of their own with so many threads."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-c", PROGRAM, str(threads), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_in_two_processes_and_nearly_the_same_numbers_on_two_threads(tmp_path):
    one = in_a_process(1, tmp_path / "one.npz")
    again = in_a_process(1)
    two = in_a_process(2, tmp_path / "two.npz")
    assert len({*one, *again}) == 1
    with np.load(tmp_path / "one.npz") as first, np.load(tmp_path / "two.npz") as second:
        changes = {name: change(first[name], second[name]) for name in first.files}
    assert len(two) == 2
    assert {name: value for name, value in changes.items() if value > TOLERANCE} == {}


def change(first, second):
    """Largest difference of two arrays over the largest value of the first; infinite where one alone is defined."""
    assert (first.shape, first.dtype) == (second.shape, second.dtype)
    if first.dtype.kind in "ib":
        return float(np.abs(first.astype(float) - second.astype(float)).max(initial=0.0))
    if not (np.isfinite(first) == np.isfinite(second)).all():
        return float("inf")
    defined = np.isfinite(first)
    size = float(np.abs(first[defined]).max(initial=0.0))
    return float(np.abs(first[defined] - second[defined]).max(initial=0.0)) / size if size else 0.0
