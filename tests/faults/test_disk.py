"""A full disk, or a place where nothing can be written: one sentence, exit code 2, and everything as it was."""

import os
import resource
import signal
import sys
from functools import partial

import pytest

from .commands import COMMANDS, command_line, ended, fresh, started

LITTLE = 3000  # bytes that a file may have; smaller than any output

QUICK = ("--window", 29, "--windows", 12, "--windows-per-document", 1)
MEASURE = ("measure", "model", "--text", "texts", *QUICK, "--instruments", "loss", "--no-nulls")


def on_a_full_disk(work, seed):
    """A process whose files may not grow, which is what a full disk does to it."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LITTLE, LITTLE))
    work(seed)


def outcome(work, folder, *, disk_is_full=False):
    """Exit code and last line of what was said."""
    command = COMMANDS["measure"]
    at_work = type(command)(command.name, partial(on_a_full_disk, work) if disk_is_full else work, "", None)
    code = ended(started(at_work, folder, 1))
    return code, (folder / "log.txt").read_text().splitlines()[-1]


def contents(folder):
    """Size of every file; None for folders, whose own size depends on what they held before."""
    paths = (path for path in folder.rglob("*") if path.name != "log.txt")
    return {path.relative_to(folder): path.stat().st_size if path.is_file() else None for path in paths}


STATES = ("run.nc.partial", "net")  # what commands go on from

FULL = {
    "train": lambda _: command_line("train", "sd", "--text", "texts", "--steps", 2, "--window", 32, "--out", "net"),
    "measure": COMMANDS["measure"].work,
    "edit": COMMANDS["edit"].work,
    "report": lambda _: command_line("report", "run.nc"),
    "compare": lambda _: command_line("compare", "run.nc", "run.nc", "--report", "change.html"),
}


@pytest.mark.parametrize("name", FULL)
def test_a_full_disk(name, base, tmp_path):
    folder = fresh(base, tmp_path / name)
    if name in ("report", "compare"):
        assert outcome(lambda _: command_line(*MEASURE, "--out", "run.nc"), folder)[0] == 0
    before = contents(folder)
    code, said = outcome(FULL[name], folder, disk_is_full=True)
    assert code == 2, said
    assert said.startswith("rheoscope: ")
    assert "written" in said or "kept" in said
    left = {path: size for path, size in contents(folder).items() if path.parts[0] not in STATES}
    assert left == before
    if name in ("measure", "edit"):  # once there is room, the same command is finished
        assert ended(started(COMMANDS[name], folder, 1)) == 0


NOWHERE = "/proc/rheoscope"  # where the superuser cannot write either

UNWRITABLE = {
    "measure": (*MEASURE, "--out", f"{NOWHERE}.nc"),
    "a report": (*MEASURE, "--out", "run.nc", "--report", f"{NOWHERE}.html"),
    "tables": (*MEASURE, "--out", "run.nc", "--tables", NOWHERE),
    "several models": ("measure", "model", "model/.", "--text", "texts", *QUICK, "--out", NOWHERE),
    "edit": ("edit", "model", "plan.yaml", "--text", "texts", *QUICK, "--out", NOWHERE),
    "prescribe": ("prescribe", "older.nc", "--text", "texts", *QUICK, "--out", f"{NOWHERE}.yaml"),
    "ablate": ("ablate", "model", "--text", "texts", *QUICK, "--out", f"{NOWHERE}.nc"),
    "train": ("train", "sd", "--text", "texts", "--steps", 2, "--window", 16, "--batch", 2, "--out", NOWHERE),
    "report": ("report", "older.nc", "--out", f"{NOWHERE}.html"),
    "compare": ("compare", "older.nc", "older.nc", "--report", f"{NOWHERE}.html"),
}


@pytest.fixture(scope="module")
def measured(base, tmp_path_factory):
    """The prepared folder with a run in it."""
    folder = fresh(base, tmp_path_factory.mktemp("measured") / "folder")
    assert outcome(lambda _: command_line(*MEASURE, "--out", "older.nc"), folder)[0] == 0
    return folder


@pytest.mark.skipif(not os.path.isdir("/proc/self") or sys.platform != "linux", reason="there is no /proc here")
@pytest.mark.parametrize("name", UNWRITABLE)
def test_an_output_where_nothing_can_be_written(name, measured):
    before = contents(measured)
    code, said = outcome(lambda _: command_line(*UNWRITABLE[name]), measured)
    assert code == 2, said
    assert said.startswith("rheoscope: "), said
    assert contents(measured) == before
