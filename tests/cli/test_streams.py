"""Where a command prints to: broken, closed or poor in letters, it loses no result."""

import io
import os
import subprocess
import sys
from contextlib import chdir, contextmanager

import pytest

from rheoscope.cli.app import main
from rheoscope.cli.console import err, out
from rheoscope.run import Run

QUICK = ("--window", "29", "--windows", "6", "--split", "line", "--no-nulls", "--instruments", "loss")


@pytest.fixture(autouse=True)
def _heard(monkeypatch):
    """Consoles that speak, and speak again after the test."""
    for console in (out, err):
        monkeypatch.setattr(console, "quiet", False)


def broken():
    """A stream that nobody reads any more."""
    read, write = os.pipe()
    os.close(read)
    return open(write, "w", encoding="utf-8")


STREAMS = {
    "broken": broken,
    "closed": lambda: None,
    "of ASCII letters": lambda: io.TextIOWrapper(io.BytesIO(), encoding="ascii"),
}


@contextmanager
def speaking_to(make):
    """The program's streams, as `make` makes them."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = make(), make()
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.close()
        sys.stdout, sys.stderr = before


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("several", [False, True])
def test_a_stream_that_takes_nothing_more_loses_no_run(kind, several, model, text, tmp_path, monkeypatch):
    models = [str(model), *(["builtin:manual-sd"] if several else [])]
    monkeypatch.setattr(sys, "argv", ["rheoscope", "measure", *models, "--text", str(text), *QUICK])
    with chdir(tmp_path), speaking_to(STREAMS[kind]), pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    for name in ("runs/gpt2.nc", "runs/manual-sd.nc") if several else ("run.nc",):
        assert "loss" in Run.load(tmp_path / name)
    assert not list(tmp_path.rglob("*.partial"))


def test_a_run_is_whole_before_anything_is_said_of_it(model, text, tmp_path, monkeypatch):
    def unprintable(_readings):
        raise RuntimeError("a fault of the table")

    monkeypatch.setattr("rheoscope.cli.measure.summary_table", unprintable)
    outputs = ["--report", "a.html", "--tables", "tables"]
    monkeypatch.setattr(sys, "argv", ["rheoscope", "measure", str(model), "--text", str(text), *QUICK, *outputs])
    with chdir(tmp_path), pytest.raises(RuntimeError, match="a fault of the table"):
        main()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "run.nc", "tables"]
    assert (tmp_path / "tables" / "provenance.json").is_file()


def test_the_command_starts_with_its_streams_closed():
    code = "import os; os.close(1); os.close(2); from rheoscope.cli.app import main; main()"
    script = f"import sys; sys.argv = ['rheoscope', 'models']; sys.stdout = sys.stderr = None; {code}"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
