"""The command as a whole: help, what importing costs, `check`, `models`, and Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
from functools import partial

import pytest

from rheoscope.models import check
from rheoscope.models.check import Finding

COMMANDS = ("check", "measure", "report", "models")


def python(*arguments):
    """A fresh interpreter on one thread, which heeds Ctrl-C even where the tests run in the background."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, text=True, preexec_fn=heeding, **pipes)


def test_help_lists_every_command_with_what_it_does(command):
    outcome = command("--help")
    assert outcome.code == 0
    for name in COMMANDS:
        assert f" {name} " in outcome.out
    assert "Measure a model on a text" in outcome.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_of_its_own(name, command):
    outcome = command(name, "--help")
    assert outcome.code == 0
    assert f"rheoscope {name}" in outcome.out
    assert outcome.err == ""


def test_without_a_command_help_is_shown(command):
    assert "Usage: rheoscope" in "".join(command()[1:])


@pytest.mark.parametrize(
    "arguments",
    [
        ("meassure",),
        ("measure",),
        ("measure", "builtin:nobody", "--windw", 3),
        ("measure", "builtin:nobody", "--windows", "few"),
        ("measure", "builtin:nobody", "--seed", -1),
        ("measure", "builtin:nobody", "--seed", 10**20),
    ],
)
def test_an_unknown_or_incomplete_command_is_refused(command, arguments):
    outcome = command(*arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    assert "Traceback" not in outcome.err


def test_neither_importing_rheoscope_nor_its_command_line_imports_torch():
    program = (
        "import sys, rheoscope, rheoscope.cli.app\n"
        "rheoscope.RheoscopeError, dir(rheoscope)\n"
        "print(sorted({'torch', 'transformers', 'plotly', 'datasets'} & sys.modules.keys()))"
    )
    with python("-W", "error", "-c", program) as process:
        assert process.communicate() == ("[]\n", "")


def test_ctrl_c_in_the_middle_leaves_no_file_and_exit_code_130(model, text, tmp_path):
    long = tmp_path / "long.txt"
    long.write_text(text.read_text() * 200)
    options = ("--instruments", "loss", "--window", 40, "--windows", 0, "--batch-size", 1)
    arguments = ("-m", "rheoscope", "measure", model, "--text", long, "--out", tmp_path / "run.nc", *options)
    with python(*arguments) as process:
        opened = process.stderr.readline()  # printed when the pass is about to begin
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert " layers, " in opened
    assert process.returncode == 130
    assert err == "rheoscope: interrupted; no file was left half-written\n"
    assert out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["long.txt"]


def test_check_says_of_every_identity_what_came_of_it(command, model):
    outcome = command("check", model)
    assert outcome.code == 0, outcome.out
    assert "identity" in outcome.out
    assert "holds" in outcome.out
    assert "fails" not in outcome.out
    assert outcome.err.strip() == ""


def test_check_prints_json_for_programs(command, model):
    findings = json.loads(command("check", model, "--json").out)
    assert {finding["status"] for finding in findings} == {"holds"}
    assert all(finding["error"] <= finding["floor"] for finding in findings)


def test_numbers_that_there_are_not_are_null_in_json(command, encoder):
    def refuse(name):
        raise ValueError(f"{name} is no JSON")

    findings = json.loads(command("check", encoder, "--json").out, parse_constant=refuse)
    refused = [finding for finding in findings if finding["status"] == "refused"]
    assert refused
    assert all(finding["error"] is finding["floor"] is None for finding in refused)


def test_check_ends_in_exit_code_1_where_an_identity_fails(command, model, monkeypatch):
    finding = Finding(identity="scores", status="fails", error=0.5, floor=1e-6, dtype="float64", reason="off by half")
    monkeypatch.setattr(check, "check", lambda *_, **__: [finding])
    outcome = command("check", model)
    assert outcome.code == 1
    assert "off by half" in outcome.out


def test_models_lists_the_families(command):
    outcome = command("models")
    assert outcome.code == 0
    assert "families with a row: bert, cohere" in outcome.out
    assert "refused: " in outcome.out
