"""`measure` and `report` from a model and a text to files, and what a person sees meanwhile."""

import io
import json

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from rheoscope.cli import console
from rheoscope.instruments.loss import Loss
from rheoscope.instruments.routing.routing import Routing
from rheoscope.run import Run

from .running import run

QUICK = ("--window", 29, "--windows", 6, "--split", "line", "--no-nulls")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("measured")


@pytest.fixture(scope="module")
def measured(folder, model, text):
    """A measurement of loss and routing with its run file, in `folder`."""
    outcome = run(folder, "measure", model, "--text", text, "--instruments", "loss, routing", *QUICK)
    assert outcome.code == 0, outcome.err
    return outcome, Run.load(folder / "run.nc")


def test_measure_writes_a_run_prints_a_table_and_says_where_it_is(measured):
    outcome, found = measured
    assert found.instruments == ("loss", "routing")
    assert outcome.out.splitlines()[-1] == "run.nc"
    assert "instrument  reading" in outcome.out
    loss = next(line for line in outcome.out.splitlines() if "nats" in line)
    assert f"{float(found['loss'].nll_mean):.4g}" in loss
    assert "3 layers, 6 heads (6 of keys)" in outcome.err
    assert "6 windows of 29 tokens from 1 document" in outcome.err


def test_the_run_holds_the_options_and_the_command(measured, model, text):
    record = measured[1].provenance
    assert record["command"].startswith(f"rheoscope measure {model} --text {text} --instruments 'loss, routing'")
    assert record["model"]["ref"] == str(model)
    assert record["text"]["sources"] == [str(text)]
    assert record["text"]["window"] == 29
    assert record["config"]["nulls"] is False


@pytest.mark.usefixtures("measured")
def test_report_draws_a_run_that_measure_wrote(folder):
    assert run(folder, "report", "run.nc") == (0, "run.html\n", "")
    page = (folder / "run.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")


def test_one_command_writes_run_page_and_tables(command, model, text, tmp_path):
    outputs = ("--out", "a.nc", "--report", "a.html", "--tables", "a", "--table-format", "parquet")
    outcome = command("measure", model, "--text", text, "--instruments", "loss", *QUICK, *outputs)
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[-3:] == ["a.nc", "a", "a.html"]
    table = pd.read_parquet(tmp_path / "a" / "loss.scalars.parquet")
    found = Run.load(tmp_path / "a.nc")
    assert table.set_index("quantity").value["nll_mean"] == float(found["loss"].nll_mean)
    assert json.loads((tmp_path / "a" / "provenance.json").read_text()) == found.provenance
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.html", "a.nc"]


def test_options_of_instruments_come_from_set(command, model, text, tmp_path):
    chosen = ("--set", "routing.n_spectra=2", "--set", "routing.n_null=0")
    outcome = command("measure", model, "--text", text, "--instruments", "routing", *QUICK, *chosen)
    assert outcome.code == 0, outcome.err
    found = Run.load(tmp_path / "run.nc")
    assert found.provenance["config"]["options"]["routing"] == {"n_spectra": 2, "n_lag": 4, "n_null": 0}
    assert found["routing"].routing_k90.attrs["n"] == 2


def test_the_window_is_the_models_context_where_that_is_shorter_than_512(command, model, text, tmp_path):
    assert command("measure", model, "--text", text, "--instruments", "loss").code == 0
    assert Run.load(tmp_path / "run.nc").provenance["text"]["window"] == 40


def test_what_an_encoder_lacks_is_left_out_with_the_reason(command, encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "rheoscope.instruments.measure.INSTRUMENTS", {"loss": Loss, "routing": Routing}
    )  # the quick two
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 40)
    outcome = command("measure", encoder, "--text", "text.txt", "--window", 16, "--windows", 1, "--no-nulls")
    assert outcome.code == 0, outcome.err
    found = Run.load(tmp_path / "run.nc")
    assert "loss" not in found
    assert "routing" in found
    assert "without loss: loss asked for; bert reads both ways" in outcome.err


def test_overwrite_replaces_the_run_and_only_when_it_is_said(command, model, text, tmp_path):
    arguments = ("measure", model, "--text", text, "--instruments", "loss", *QUICK)
    assert command(*arguments).code == 0
    first = (tmp_path / "run.nc").read_bytes()
    assert command(*arguments).code == 2
    assert (tmp_path / "run.nc").read_bytes() == first
    assert command(*arguments, "--seed", 1, "--overwrite").code == 0
    assert Run.load(tmp_path / "run.nc").provenance["seed"] == 1


def test_text_comes_from_standard_input(command, model, text, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.read_bytes())))
    assert command("measure", model, "--text", "-", "--instruments", "loss", *QUICK).code == 0
    assert Run.load(tmp_path / "run.nc").provenance["text"]["sources"] == ["-"]


def test_without_a_terminal_progress_is_lines_and_no_bars(measured):
    outcome, _ = measured
    assert outcome.err.splitlines()[-1] == "measure: 6/6 windows"
    assert "━" not in outcome.err
    assert "\x1b" not in outcome.err + outcome.out


def test_on_a_terminal_progress_is_one_bar_for_each_task(monkeypatch):
    drawn = io.StringIO()
    monkeypatch.setattr(console, "err", Console(file=drawn, force_terminal=True, color_system=None, width=120))
    with console.progress() as update:
        for done in (1, 2):
            update("measure", done, 2)
        update("untrained null", 1, 3)
    for part in ("━", "measure ", "2/2 windows", "untrained null", "1/3 windows", "left"):
        assert part in drawn.getvalue()


def test_lines_come_at_intervals_with_the_time_left(monkeypatch, capsys):
    clock = iter(np.arange(0.0, 100.0, 4.0))
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    update = console._Lines()
    for done in range(1, 7):
        update("measure", done, 6)
    lines = capsys.readouterr().err.splitlines()
    # called every 4 s from second 4 on, when the first window was done: lines at 12 and at the end
    assert lines == ["measure: 3/6 windows, 8 s left", "measure: 6/6 windows"]
