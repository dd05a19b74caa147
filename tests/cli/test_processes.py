"""One measurement shared by processes: the numbers of one, and a plain end where one of them fails or is killed."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from rheoscope.cli.jobs import refuse_shared
from rheoscope.errors import RheoscopeError
from rheoscope.instruments.measure import INSTRUMENTS
from rheoscope.instruments.processes import Processes
from rheoscope.run import Run

from .running import run

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2")
QUICK = ("--window", 29, "--windows", 18, "--split", "line", "--batch-size", 2)
FEW = ("--instruments", "loss,routing", "--no-nulls")
pytestmark = pytest.mark.slow

# What happens to process 1 once it has read its third batch.
MISHAPS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "refused": "raise RheoscopeError('the third batch is refused')",
    "broken": "raise ZeroDivisionError('a fault of the program')",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
}
SCRIPT = """
import os, signal, time
from rheoscope.cli.app import main
from rheoscope.errors import RheoscopeError
from rheoscope.instruments import processes
from rheoscope.instruments.loss import Loss
processes.PATIENCE, processes.BEAT = 6.0, 0.5
original, read = Loss.observe_output, []
def observe_output(self, output, batch):
    original(self, output, batch)
    read.append(batch)
    if len(read) == 3 and os.environ["RANK"] == "1":
        {mishap}
Loss.observe_output = observe_output
main()
"""


def environment(**more):
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | more


def shared(folder, *arguments, mishap="pass"):
    """`rheoscope` by two processes that torchrun starts in `folder`."""
    script = folder / "shared.py"
    script.write_text(SCRIPT.format(mishap=mishap))
    command = [sys.executable, *TORCHRUN, str(script), *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=200, check=False
    )


def assert_equal_runs(one, other, *, rtol=1e-10):
    assert one.instruments == other.instruments
    for name in one.instruments:
        assert set(one[name]) == set(other[name])
        for variable, values in one[name].items():
            expected = values.values
            if expected.dtype.kind not in "fc":
                np.testing.assert_array_equal(other[name][variable], expected)
                continue
            scale = np.abs(expected[np.isfinite(expected)]).max(initial=0)
            np.testing.assert_allclose(other[name][variable], expected, rtol=rtol, atol=rtol * scale, err_msg=variable)


def sentences(outcome):
    return [line for line in outcome.stderr.splitlines() if line.startswith("rheoscope: ")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, model, text):
    """What one process measures with few instruments."""
    folder = tmp_path_factory.mktemp("alone")
    assert run(folder, "measure", model, "--text", text, *QUICK, *FEW).code == 0
    return Run.load(folder / "run.nc")


def test_two_processes_give_the_numbers_of_one_of_every_instrument_with_its_nulls(tmp_path, model, text):
    outcome = shared(tmp_path, "measure", model, "--text", text, *QUICK, "--out", "two.nc")
    assert outcome.returncode == 0, outcome.stderr
    assert run(tmp_path, "measure", model, "--text", text, *QUICK, "--out", "one.nc").code == 0
    one, two = (Run.load(tmp_path / name) for name in ("one.nc", "two.nc"))
    assert set(one.instruments) == set(INSTRUMENTS)
    assert_equal_runs(one, two)
    assert (one.provenance["processes"], two.provenance["processes"]) == (1, 2)
    assert outcome.stdout.splitlines().count("two.nc") == 1  # only the first process prints
    assert outcome.stderr.count("18 windows of 29 tokens") == 1
    assert not (tmp_path / "two.nc.partial").exists()


def test_a_killed_process_ends_the_run_which_says_so_keeps_what_it_has_and_can_be_finished(
    tmp_path, model, text, alone
):
    arguments = ("measure", model, "--text", text, *QUICK, *FEW)
    killed = shared(tmp_path, *arguments, mishap=MISHAPS["killed"])
    assert killed.returncode != 0
    assert not (tmp_path / "run.nc").exists()
    (sentence,) = sentences(killed)
    assert "process 0 of 2" in sentence
    assert "another process" in sentence or "told to stop" in sentence
    assert (tmp_path / "run.nc.partial" / "pass-0-of-0.npz").is_file()
    refused = shared(tmp_path, *arguments)
    assert "holds an unfinished run: add --resume" in sentences(refused)[0]
    finished = shared(tmp_path, *arguments, "--resume")
    assert finished.returncode == 0, finished.stderr
    assert "measure: 2/" not in finished.stderr  # process 0 had read its share
    assert_equal_runs(alone, Run.load(tmp_path / "run.nc"))
    assert not (tmp_path / "run.nc.partial").exists()


def test_an_error_of_one_process_is_one_sentence_and_ends_all(tmp_path, model, text):
    outcome = shared(tmp_path, "measure", model, "--text", text, *QUICK, *FEW, mishap=MISHAPS["refused"])
    assert outcome.returncode != 0
    assert sentences(outcome) == ["rheoscope: process 1 of 2: the third batch is refused"]


def test_a_fault_of_one_process_shows_itself_and_ends_all(tmp_path, model, text):
    outcome = shared(tmp_path, "measure", model, "--text", text, *QUICK, *FEW, mishap=MISHAPS["broken"])
    assert outcome.returncode != 0
    assert "ZeroDivisionError: a fault of the program" in outcome.stderr


def test_what_is_refused_by_all_processes_is_said_once(tmp_path, model):
    outcome = shared(tmp_path, "measure", model, "--text", "nowhere.txt", *QUICK)
    assert outcome.returncode != 0
    (sentence,) = sentences(outcome)
    assert "nowhere.txt" in sentence


def by_hand(folder, *per_process, mishap="pass", apart=False):
    """Two processes started without torchrun, as a scheduler would; each with arguments of its own.

    apart: each in a folder of its own, as on machines that share none.
    """
    script = folder / "shared.py"
    script.write_text(SCRIPT.format(mishap=mishap))
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    places = [folder / str(rank) if apart else folder for rank in range(len(per_process))]
    for place in places:
        place.mkdir(exist_ok=True)
    return [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            cwd=places[rank],
            env=environment(RANK=str(rank), **meeting),
            **pipes,
        )
        for rank, arguments in enumerate(per_process)
    ]


def test_a_process_that_shows_no_sign_of_life_ends_the_run_also_without_torchrun(tmp_path, model, text):
    arguments = ("measure", model, "--text", text, *QUICK, *FEW)
    first, second = by_hand(tmp_path, arguments, arguments, mishap=MISHAPS["stopped"])
    try:
        _, err = first.communicate(timeout=150)
        assert first.returncode == 2
        assert "process 0 of 2: process 1 has given no sign of life for 6 s" in err
        assert (tmp_path / "run.nc.partial" / "pass-0-of-0.npz").is_file()
    finally:
        with suppress(ProcessLookupError):
            second.send_signal(signal.SIGKILL)
        second.communicate()


def test_machines_without_a_shared_folder_find_a_run_finished(tmp_path, model, text):
    arguments = ("measure", model, "--text", text, *QUICK, *FEW, "--resume", "--report", "run.html")
    for said in ("measure: ", "run.nc was finished before, and is as it was"):
        processes = by_hand(tmp_path, arguments, arguments, apart=True)
        errors = [process.communicate(timeout=60)[1] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], errors
        assert said in errors[0]
        assert errors[1] == ""
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == ["run.html", "run.nc"]
    assert not list((tmp_path / "1").iterdir())


def test_processes_that_measure_different_things_are_refused(tmp_path, model, text):
    arguments = ("measure", model, "--text", text, *QUICK, *FEW)
    processes = by_hand(tmp_path, arguments, (*arguments, "--seed", 3))
    errors = [process.communicate(timeout=150)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert "process 1 measures something else than process 0 (it differs in options)" in "".join(errors)
    assert not (tmp_path / "run.nc").exists()


@pytest.mark.parametrize(
    ("models", "text", "sentence"),
    [
        (["a", "b"], ["text.txt"], "2 models asked for by 2 processes: give each its own torchrun"),
        (["a"], ["-"], "standard input asked for by 2 processes: write the text to a file first"),
    ],
)
def test_what_processes_cannot_share_is_refused(models, text, sentence):
    refuse_shared(Processes(), models, text)
    with pytest.raises(RheoscopeError, match=sentence):
        refuse_shared(Processes(rank=1, size=2), models, text)
