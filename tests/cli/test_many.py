"""`measure` of several models in one command, and runs that are killed: what is left, and how they are finished."""

import os
import signal
import subprocess
import sys
import time

import pytest

from rheoscope.cli.jobs import run_names
from rheoscope.errors import RheoscopeError
from rheoscope.run import Run

QUICK = ("--window", 29, "--windows", 6, "--split", "line", "--no-nulls", "--instruments", "loss")


@pytest.mark.parametrize(
    ("models", "names"),
    [
        (["org/net"], ["net"]),
        (["org/net@step1", "org/net@step2"], ["net@step1", "net@step2"]),
        (["org/net", "other/net"], ["org-net", "other-net"]),
        (["builtin:manual", "builtin:manual-sd"], ["manual", "manual-sd"]),
        (["/a/b/net-1/", "/a/c/net-1/"], ["b-net-1", "c-net-1"]),
        (["folder/net.Q4_0.gguf", "folder/net.Q8_0.gguf"], ["net.Q4_0", "net.Q8_0"]),
        (["a/net v1", "./net"], ["net-v1", "net"]),
    ],
)
def test_every_model_has_a_file_name_of_its_own(models, names):
    assert run_names(models) == names


@pytest.mark.parametrize("models", [["org/net", "org/net"], ["org/net", "org//net"]])
def test_models_that_would_share_a_file_are_refused(models):
    with pytest.raises(RheoscopeError, match=r"is given twice|would be written to one file"):
        run_names(models)


def test_several_models_have_a_run_each_in_one_folder_and_can_be_compared(command, model, text, tmp_path):
    models = ("builtin:manual-softmax", "builtin:manual-ega")
    extra = ("--report", "pages", "--tables", "tables")
    outcome = command("measure", *models, "--text", text, *QUICK, "--out", "runs", *extra)
    assert outcome.code == 0, outcome.err
    files = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert files == ["manual-ega.nc", "manual-softmax.nc"]
    assert [Run.load(tmp_path / "runs" / name).provenance["model"]["ref"] for name in files] == [models[1], models[0]]
    assert sorted(path.name for path in (tmp_path / "pages").iterdir()) == ["manual-ega.html", "manual-softmax.html"]
    assert (tmp_path / "tables" / "manual-ega" / "provenance.json").is_file()
    assert "2 of 2 models measured" in outcome.err
    assert command("compare", *(f"runs/{name}" for name in files)).code == 0


def test_a_model_that_fails_does_not_lose_the_others(command, model, text, tmp_path):
    outcome = command("measure", "nowhere/at-all/here", model, "builtin:nobody", "--text", text, *QUICK)
    assert outcome.code == 1
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["gpt2.nc"]
    assert "1 of 3 models measured" in outcome.err
    *_, first, second = outcome.err.splitlines()
    assert first.startswith("without nowhere/at-all/here: ")
    assert second.startswith("without builtin:nobody: no built-in model is called 'nobody'")


def test_a_fault_of_the_program_with_one_model_does_not_lose_the_others(command, model, text, tmp_path, monkeypatch):
    from rheoscope.instruments.loss import Loss

    original = Loss.finalize

    def finalize(self):
        if "manual" in self.view.ref:
            raise RuntimeError("a fault")
        return original(self)

    monkeypatch.setattr(Loss, "finalize", finalize)
    outcome = command("measure", "builtin:manual-sd", model, "--text", text, *QUICK)
    assert outcome.code == 1
    assert "Traceback" in outcome.err
    assert "without builtin:manual-sd: RuntimeError: a fault" in outcome.err
    assert (tmp_path / "runs" / "gpt2.nc").is_file()


def test_a_request_to_stop_is_heeded_by_the_whole_command(command, model, text, tmp_path, monkeypatch):
    from rheoscope.instruments.loss import Loss

    original = Loss.finalize

    def finalize(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(self)

    monkeypatch.setattr(Loss, "finalize", finalize)
    outcome = command("measure", model, "builtin:manual-sd", "--text", text, *QUICK)
    assert outcome.code == 143
    assert "rheoscope: told to stop" in outcome.err
    assert "[2/2]" not in outcome.err
    assert not list((tmp_path / "runs").iterdir())


def test_several_models_need_a_folder(command, model, text, tmp_path):
    (tmp_path / "run.nc").write_text("something")
    outcome = command("measure", model, "builtin:manual-sd", "--text", text, *QUICK, "--out", "run.nc")
    assert outcome.code == 2
    assert "2 models asked for, whose files need a folder, and run.nc is a file" in outcome.err


def test_one_model_goes_where_it_went_before(command, model, text, tmp_path):
    assert command("measure", model, "--text", text, *QUICK).out.splitlines()[-1] == "run.nc"
    assert (tmp_path / "run.nc").is_file()


def test_resuming_what_is_finished_returns_it_untouched(command, model, text, tmp_path):
    arguments = ("measure", model, "--text", text, *QUICK, "--resume")
    assert command(*arguments).code == 0
    before = (tmp_path / "run.nc").read_bytes()
    again = command(*arguments)
    assert (again.code, (tmp_path / "run.nc").read_bytes()) == (0, before)
    assert "run.nc was finished before, and is as it was" in again.err
    other = command(*arguments, "--seed", 2)
    assert other.code == 2
    assert "run.nc exists already and is the run of something else" in other.err
    assert (tmp_path / "run.nc").read_bytes() == before


@pytest.mark.parametrize("several", [False, True])
def test_a_command_with_pages_and_tables_can_be_repeated_until_it_succeeds(command, model, text, tmp_path, several):
    models = (model, "builtin:manual-sd") if several else (model,)
    arguments = ("measure", *models, "--text", text, *QUICK, "--resume", "--report", "page", "--tables", "tables")
    assert command(*arguments).code == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    again = command(*arguments)
    assert again.code == 0, again.err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    pages = [path for path in before if path.suffix == ".html" or path.name in ("page", "provenance.json")]
    for path in pages:  # as if the command had been killed before it came to them
        path.unlink()
    assert command(*arguments).code == 0
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {*before}


def test_a_page_that_is_there_before_its_run_is_not_replaced(command, model, text, tmp_path):
    (tmp_path / "page.html").write_text("precious")
    outcome = command("measure", model, "--text", text, *QUICK, "--resume", "--report", "page.html")
    assert (outcome.code, (tmp_path / "page.html").read_text()) == (2, "precious")


SLOWLY = """
import time
from rheoscope.cli.app import main
from rheoscope.instruments import partial
from rheoscope.instruments.loss import Loss
partial.SHARE = 1e9
partial.Partial.is_due = True
original = Loss.observe_output
def observe_output(self, output, batch):
    original(self, output, batch)
    time.sleep(0.3)
Loss.observe_output = observe_output
main()
"""


def killed(folder, arguments, number, *, after):
    """What is left of a slow run that is sent a signal once it has kept its state so many times."""
    (folder / "slow.py").write_text(SLOWLY)
    command = [sys.executable, "slow.py", *map(str, arguments)]
    process = subprocess.Popen(
        command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True
    )
    kept, states = folder / "run.nc.partial" / "pass-0-of-0.npz", set()
    while len(states) < after and process.poll() is None:
        if kept.exists():
            states.add(kept.stat().st_mtime_ns)
        time.sleep(0.01)
    process.send_signal(number)
    return process.wait(timeout=60), process.communicate()[1]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 143)])
def test_a_killed_command_is_finished_by_the_same_command_with_resume(command, model, text, tmp_path, number, code):
    arguments = ("measure", model, "--text", text, *QUICK, "--batch-size", 1)
    assert command(*arguments, "--out", "whole.nc").code == 0
    ended, err = killed(tmp_path, arguments, number, after=2)
    assert ended == code, err
    assert not (tmp_path / "run.nc").exists()
    if number == signal.SIGTERM:
        assert "told to stop; what was read is kept in run.nc.partial: go on with --resume" in err
    refused = command(*arguments)
    assert refused.code == 2
    assert "run.nc.partial holds an unfinished run: add --resume to go on with it, or --overwrite" in refused.err
    finished = command(*arguments, "--resume")
    assert finished.code == 0, finished.err
    assert not (tmp_path / "run.nc.partial").exists()
    whole, resumed = (Run.load(tmp_path / name)["loss"] for name in ("whole.nc", "run.nc"))
    for name in whole:
        assert whole[name].values.tobytes() == resumed[name].values.tobytes(), name


def test_overwrite_begins_anew_and_leaves_no_state(command, model, text, tmp_path):
    arguments = ("measure", model, "--text", text, *QUICK, "--batch-size", 1)
    killed(tmp_path, arguments, signal.SIGKILL, after=1)
    assert command(*arguments, "--overwrite").code == 0
    assert not (tmp_path / "run.nc.partial").exists()
