"""The estimate of memory: what it counts, the batch size that keeps within a bound, and what is refused."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from rheoscope.errors import RheoscopeError
from rheoscope.instruments.fields.fields import Fields
from rheoscope.instruments.loss import Loss
from rheoscope.instruments.measure import measure
from rheoscope.instruments.memory import Memory, estimate, fitting, in_use, parsed, written
from rheoscope.instruments.scale import Scale
from rheoscope.models.view import ModelView
from tests.tiny import tiny

from .texts import random_corpus

CORPUS = random_corpus(lengths=(29,) * 12)
MIB = 2**20


@pytest.fixture(scope="module")
def view():
    return ModelView(tiny("llama", dtype=torch.float32))


def told(view, **how):
    """The estimate that a measurement gave."""
    said = []
    scale = Scale(tell=said.append, max_memory=how.pop("max_memory", None))
    run = measure(view, CORPUS, instruments=["loss"], nulls=False, scale=scale, **how)
    return said[0], run.provenance["config"]["batch_size"]


def test_the_estimate_is_told_before_anything_is_run(view):
    events = []
    hook = view.model.register_forward_pre_hook(lambda *_: events.append("run"))
    try:
        measure(view, CORPUS, instruments=["loss"], nulls=False, scale=Scale(tell=lambda _: events.append("told")))
    finally:
        hook.remove()
    assert events[0] == "told"
    assert "run" in events


def test_it_grows_with_windows_at_a_time_and_with_their_length(view):
    loss = [Loss(view, CORPUS)]
    one, four = (estimate(view, loss, window=29, batch_size=size, nulls=False) for size in (1, 4))
    assert four.per_window == one.per_window
    assert (
        four.least - four.before == one.peak - one.before == pytest.approx(four.peak - four.before - 3 * one.per_window)
    )
    longer = estimate(view, loss, window=58, batch_size=1, nulls=False)
    assert longer.per_window >= 2 * one.per_window


def test_snapshots_and_a_second_copy_for_the_null_count(view):
    fields = [Fields(view, CORPUS)]
    kept = estimate(view, fields, window=29, batch_size=1, nulls=False).kept
    n_entries = 29 * 30 // 2
    assert kept >= 12 * n_entries * 4 * view.n_layers
    alone, nulls = (estimate(view, [Loss(view, CORPUS)], window=29, batch_size=1, nulls=null).spare for null in (0, 1))
    block = sum(p.numel() * 4 for p in view.blocks[0].parameters())
    assert nulls - alone >= block


def test_the_batch_size_is_the_largest_that_fits():
    needed = Memory(before=100 * MIB, kept=10 * MIB, spare=5 * MIB, per_window=20 * MIB, batch_size=8)
    assert fitting(needed, None) == fitting(needed, 275 * MIB) == 8
    assert fitting(needed, 275 * MIB - 1) == 7
    assert fitting(needed, 135 * MIB) == 1
    for size in range(1, 8):
        bound = replace(needed, batch_size=size).peak
        assert fitting(needed, bound) == size


def test_a_bound_below_one_window_is_refused_with_the_least_that_would_do():
    needed = Memory(before=100 * MIB, kept=10 * MIB, spare=5 * MIB, per_window=20 * MIB, batch_size=8)
    with pytest.raises(RheoscopeError, match=r"at most 134 MiB of memory asked for; this takes about 135 MiB with one"):
        fitting(needed, 134 * MIB)


def test_a_measurement_heeds_its_bound(view):
    free, size = told(view)
    assert size > 8
    bound = free.before + free.kept + free.spare + 4 * free.per_window + free.per_window // 2 + 8 * MIB
    needed, smaller = told(view, max_memory=bound, batch_size=4096 * 1024)
    assert needed.peak <= bound
    assert 1 <= smaller < 4096 * 1024
    with pytest.raises(RheoscopeError, match="of memory asked for"):
        told(view, max_memory=MIB)


def test_a_resumed_run_keeps_the_batch_size_that_it_was_begun_with(view, tmp_path):
    folder = tmp_path / "run.nc.partial"

    class Killed(BaseException):
        pass

    def kill(task, done, total):
        if done == 6:
            raise Killed

    kept = Scale(folder, every=0.0)
    with pytest.raises(Killed):
        measure(view, CORPUS, instruments=["loss"], batch_size=3, nulls=False, progress=kill, scale=kept)
    run = measure(view, CORPUS, instruments=["loss"], nulls=False, scale=replace(kept, resume=True))
    assert run.provenance["config"]["batch_size"] == 3


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 * 2**30), ("500MB", 500 * 10**6), ("1.5 gib", 3 * 2**29), ("2e9", 2 * 10**9), ("64B", 64)],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parsed(text) == size


@pytest.mark.parametrize("text", ["", "lots", "4 parsecs", "-1GiB", "0", "GiB", "1e999", "1e308TB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(RheoscopeError, match="write a size such as 4GiB or 500MB"):
        parsed(text)


def test_sizes_are_written_as_people_read_them():
    assert (written(3 * 2**29), written(300 * MIB)) == ("1.50 GiB", "300 MiB")


def test_what_the_process_takes_now_is_read_from_the_system(view):
    before = in_use(view)
    block = torch.ones(64 * MIB // 4)
    assert in_use(view) - before > 48 * MIB
    del block


PROGRAM = """
import re, sys
from pathlib import Path
from rheoscope.cli.app import main
sys.argv = ["rheoscope", *sys.argv[1:]]
try:
    main()
finally:
    print("peak", re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1], file=sys.stderr)
"""


@pytest.mark.slow
def test_the_estimate_holds_for_the_built_in_model(tmp_path):
    arguments = ("measure", "builtin:manual", "--window", "256", "--windows", "16", "--batch-size", "8")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    value, unit = re.search(r"memory: about ([\d.]+) (GiB|MiB)", done.stderr).groups()
    said = float(value) * (2**30 if unit == "GiB" else MIB)
    peak = int(re.search(r"peak (\d+)", done.stderr)[1]) * 1024
    assert 0.95 * peak < said < 1.5 * peak
