"""A measurement that is killed and resumed: the same bytes as one that ran through, and nothing foreign is taken up."""

import json
import subprocess
import sys
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch

from rheoscope.errors import RheoscopeError, Stopped
from rheoscope.instruments import partial as partials
from rheoscope.instruments.measure import INSTRUMENTS, measure, weights_hash
from rheoscope.instruments.partial import KEY, Partial, held
from rheoscope.instruments.scale import Scale, Stop, digest_of, key_of
from rheoscope.models.load import load
from rheoscope.models.view import ModelView
from rheoscope.surgery.edits import edited
from tests.tiny import tiny

from .test_measure import Mute
from .texts import random_corpus

CORPUS = random_corpus(lengths=(29,) * 12)
SOME = ("loss", "routing")


@pytest.fixture(scope="module")
def view():
    return ModelView(tiny("llama", dtype=torch.float32))


@pytest.fixture(scope="module")
def whole(view):
    return measured(view)


@pytest.fixture(autouse=True)
def _savings_cost_nothing(monkeypatch):
    monkeypatch.setattr(partials, "SHARE", np.inf)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run.nc.partial"


class Killed(BaseException):
    """What stands for the end of the process."""


def measured(view, scale=None, *, instruments=SOME, corpus=CORPUS, kill=None, **how):
    """A run in which every batch is kept; `kill` (task, windows): the end comes after so many windows of a task."""

    def progress(task, done, total):
        if (task, done) == kill:
            raise Killed

    scale = {} if scale is None else {"scale": scale}
    return measure(view, corpus, instruments=instruments, batch_size=2, progress=progress, **how, **scale)


def kept_in(folder, **how):
    return Scale(partial=folder, every=0.0, **how)


def assert_same_bytes(one, other):
    assert one.instruments == other.instruments
    for name in one.instruments:
        assert set(one[name]) == set(other[name])
        for variable in one[name]:
            assert one[name][variable].values.tobytes() == other[name][variable].values.tobytes(), (name, variable)
        assert one[name].attrs == other[name].attrs


@pytest.mark.parametrize("kill", [("measure", 2), ("measure", 8), ("measure", 12), ("untrained null", 2)])
def test_a_killed_run_goes_on_to_the_same_bytes(view, folder, whole, kill):
    with pytest.raises(Killed):
        measured(view, kept_in(folder), kill=kill)
    assert_same_bytes(measured(view, kept_in(folder, resume=True)), whole)


def test_every_instrument_goes_on_also_after_a_second_kill(view, folder):
    names = tuple(INSTRUMENTS)
    whole = measured(view, instruments=names)
    for resume, kill in ((False, ("measure", 4)), (True, ("measure", 10)), (True, ("shuffled null", 6))):
        with pytest.raises(Killed):
            measured(view, kept_in(folder, resume=resume), instruments=names, kill=kill)
    assert_same_bytes(measured(view, kept_in(folder, resume=True), instruments=names), whole)


def test_what_was_read_is_not_read_again(view, folder):
    with pytest.raises(Killed):
        measured(view, kept_in(folder), kill=("measure", 8))
    told = []
    again = kept_in(folder, resume=True)
    measure(view, CORPUS, instruments=SOME, batch_size=2, progress=lambda *step: told.append(step), scale=again)
    assert [step for step in told if step[0] == "measure"] == [("measure", done, 12) for done in (8, 10, 12)]


def test_nothing_is_kept_before_it_is_worth_a_minute(view, folder):
    measured(view, Scale(partial=folder))
    assert not folder.exists()


def test_savings_take_a_small_share_of_the_time(folder, monkeypatch):
    monkeypatch.setattr(partials, "SHARE", 0.05)
    now = [0.0]
    monkeypatch.setattr(partials.time, "monotonic", lambda: now[0])
    kept = Partial(folder, {}, every=60.0)
    now[0] = 59.0
    assert not kept.is_due
    now[0] = 60.0
    assert kept.is_due
    kept.saved, kept.cost = 60.0, 30.0  # a saving that took half a minute is worth ten
    now[0] = 659.0
    assert not kept.is_due
    now[0] = 660.0
    assert kept.is_due


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "options"),
        ({"nulls": False}, "options"),
        ({"instruments": ("loss",)}, "options"),
        ({"corpus": random_corpus(lengths=(29,) * 12, seed=1)}, "text"),
        ({"corpus": replace(CORPUS, n_bytes=CORPUS.n_bytes + 1)}, "text"),
        ({"corpus": replace(CORPUS, starts=CORPUS.starts + 1)}, "text"),
        ({"corpus": replace(CORPUS, framing=replace(CORPUS.framing, suffix=(7,)))}, "text"),
        ({"corpus": replace(CORPUS, packed=True, separator=2)}, "text"),
        ({"view": ModelView(tiny("llama", seed=1, dtype=torch.float32))}, "weights"),
        ({"view": ModelView(tiny("llama", dtype=torch.float32, rms_norm_eps=0.1))}, "configuration"),
    ],
)
def test_the_state_of_something_else_is_refused_and_stays_as_it_is(view, folder, change, named):
    with pytest.raises(Killed):
        measured(view, kept_in(folder), kill=("measure", 8))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(RheoscopeError, match=rf"unfinished run of something else \(it differs in {named}\)"):
        measured(**{"view": view, "scale": kept_in(folder, resume=True)} | change)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"n_head": 3}),
        ("gpt2", {"layer_norm_epsilon": 0.1}),
        ("gemma2", {"attn_logit_softcapping": 5.0}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}),
    ],
)
def test_the_same_weights_under_another_configuration_are_another_model(name, entries):
    def keys(view):
        return key_of(view, CORPUS, {}, weights=weights_hash(view), processes=1)

    one, other = (keys(ModelView(tiny(name, dtype=torch.float32, **more))) for more in ({}, entries))
    assert one["weights"] == other["weights"]
    assert digest_of(one) != digest_of(other)


def test_where_a_model_was_found_is_in_no_key(view, tmp_path):
    view.model.save_pretrained(tmp_path)
    again = load(tmp_path)
    one, other = (key_of(each, CORPUS, {}, weights=weights_hash(each), processes=1) for each in (view, again))
    assert one == other


def test_the_state_of_other_code_or_another_number_of_processes_is_refused(view, folder, monkeypatch):
    with pytest.raises(Killed):
        measured(view, kept_in(folder), kill=("measure", 8))
    key = json.loads((folder / KEY).read_text())
    for name, other in (("code", "0" * 64), ("number of processes", 2), ("versions", {"torch": "1.0"})):
        (folder / KEY).write_text(json.dumps(key | {name: other}))
        with pytest.raises(RheoscopeError, match=rf"differs in {name}\)"):
            measured(view, kept_in(folder, resume=True))


def test_an_unfinished_run_is_neither_used_nor_lost_unless_one_says_so(view, folder):
    with pytest.raises(Killed):
        measured(view, kept_in(folder), kill=("measure", 8))
    with pytest.raises(RheoscopeError, match=r"holds an unfinished run: add --resume to go on with it, or --overwrite"):
        measured(view, kept_in(folder))
    with pytest.raises(Killed):  # from the beginning, after 2 windows
        measured(view, kept_in(folder, anew=True), kill=("measure", 2))


def test_a_folder_of_something_else_is_never_removed(view, folder):
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    for how in ({}, {"resume": True}, {"anew": True}):
        with pytest.raises(RheoscopeError, match="is no unfinished run of rheoscope"):
            measured(view, kept_in(folder, **how))
    assert (folder / "thesis.tex").read_text() == "years of work"


def test_what_is_no_part_of_a_state_is_never_removed(view, folder):
    with pytest.raises(Killed):
        measured(view, kept_in(folder), kill=("measure", 8))
    (folder / "notes").mkdir()
    (folder / "notes" / "thesis.tex").write_text("years of work")
    with pytest.raises(RheoscopeError, match=r"holds notes, which is no part of an unfinished run: remove it"):
        measured(view, kept_in(folder, anew=True))
    assert (folder / "pass-0-of-0.npz").is_file()
    assert (folder / "notes" / "thesis.tex").read_text() == "years of work"


def test_an_output_is_held_by_one_process_alone_and_until_it_ends(tmp_path):
    output = tmp_path / "run.nc"
    script = "import os, time, pathlib; from rheoscope.instruments.partial import held\n"
    script += f"with held(pathlib.Path({str(output)!r})): print('held', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        sentence = rf"run\.nc is being measured already, by process {other.pid} on .+: wait until that ends"
        with pytest.raises(RheoscopeError, match=sentence), held(output):
            pytest.fail("held twice")
        with held(tmp_path / "other.nc"):
            pass
        other.kill()
    assert (tmp_path / ".run.nc.lock").exists()  # no hindrance
    with held(output):
        pass
    assert not list(tmp_path.iterdir())


def test_where_there_are_no_locks_none_is_held_and_nothing_left(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(partials.fcntl, "flock", none)
    with held(tmp_path / "run.nc"):
        assert not list(tmp_path.iterdir())


def test_an_empty_folder_that_a_kill_left_is_no_hindrance(view, folder):
    folder.mkdir()
    with pytest.raises(Killed):
        measured(view, kept_in(folder), kill=("measure", 8))
    assert (folder / KEY).is_file()


@pytest.mark.parametrize(
    "damage", [lambda bytes_: bytes_[: len(bytes_) // 2], lambda bytes_: b"", lambda bytes_: b"PK"]
)
def test_a_damaged_state_is_refused(view, folder, damage):
    with pytest.raises(Killed):
        measured(view, kept_in(folder), kill=("measure", 8))
    path = folder / "pass-0-of-0.npz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RheoscopeError, match=r"pass-0-of-0.npz is damaged \(\w+\): remove"):
        measured(view, kept_in(folder, resume=True))


def test_a_state_holds_plain_arrays_and_no_pickle(view, folder):
    with pytest.raises(Killed):
        measured(view, kept_in(folder), kill=("measure", 8))
    with zipfile.ZipFile(folder / "pass-0-of-0.npz") as archive:
        assert all(name.endswith(".npy") for name in archive.namelist())
    with np.load(folder / "pass-0-of-0.npz", allow_pickle=False) as state:
        assert int(state["batches"]) == 3  # the fourth had been read, and was not yet kept
        assert "1/shares/routing_share/2/sums" in state.files


def test_a_run_that_is_told_to_stop_keeps_what_it_has_read(view, folder, whole):
    stop = Stop()

    def progress(task, done, total):
        stop.asked = done == 6

    with pytest.raises(Stopped, match=r"told to stop; what was read is kept in .*run.nc.partial: go on with --resume"):
        measure(view, CORPUS, instruments=SOME, batch_size=2, progress=progress, scale=Scale(folder, stop=stop))
    with np.load(folder / "pass-0-of-0.npz") as state:
        assert int(state["batches"]) == 3
    assert_same_bytes(measured(view, kept_in(folder, resume=True)), whole)


def test_hooks_that_a_model_came_with_are_part_of_it(folder):
    def hooked(double):
        model = tiny("llama", dtype=torch.float32)
        if double:
            model.model.norm.register_forward_hook(lambda module, args, output: 2 * output)
        return ModelView(model)

    with pytest.raises(Killed):
        measured(hooked(True), kept_in(folder), kill=("measure", 8))
    with pytest.raises(RheoscopeError, match=r"differs in hooks\)"):
        measured(hooked(False), kept_in(folder, resume=True))
    assert_same_bytes(measured(hooked(True), kept_in(folder, resume=True)), measured(hooked(True)))


def test_inside_an_edit_no_state_is_kept(view, folder):
    with edited(view, Mute()), pytest.raises(RheoscopeError, match="inside an edit, which no key names"):
        measured(view, kept_in(folder))
