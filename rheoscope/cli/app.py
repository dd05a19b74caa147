"""The `rheoscope` command. Bad input ends in one sentence and exit code 2, Ctrl-C in exit code 130."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise

import typer

from rheoscope.cli.act import ablate
from rheoscope.cli.compare import compare
from rheoscope.cli.console import err, prepare_streams
from rheoscope.cli.edit import edit
from rheoscope.cli.measure import measure, report
from rheoscope.cli.models import check, models
from rheoscope.cli.prescribe import prescribe
from rheoscope.cli.train import train
from rheoscope.errors import RheoscopeError, Stopped

INTERRUPTED = 130
TERMINATED = 143  # 128 + SIGTERM

app = typer.Typer(
    name="rheoscope",
    help="Shows the flow inside a transformer and lets you act on it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(check)
app.command()(measure)
app.command()(report)
app.command()(ablate)
app.command()(prescribe)
app.command()(edit)
app.command()(compare)
app.command()(train)
app.command()(models)


@app.callback()
def _app() -> None:
    """Shows the flow inside a transformer and lets you act on it."""


def _refuse_empty(arguments: Sequence[str]) -> None:
    """Raise RheoscopeError for an empty name, which would be taken for the folder one is in."""
    for before, given in pairwise(["rheoscope", *arguments]):
        option, equals, value = given.partition("=") if given.startswith("--") else (before, "=", given)
        if equals and not value.strip():
            raise RheoscopeError(f"an empty value given after {option}: name something, or leave it out")


def main() -> None:
    """Run the command line of this process."""
    prepare_streams()
    try:
        _refuse_empty(sys.argv[1:])
        app(prog_name=app.info.name)
    except RheoscopeError as error:
        err.quiet = False  # also where the process only shares a run
        err.line(f"rheoscope: {error}")
        sys.exit(TERMINATED if isinstance(error, Stopped) else 2)
    except OSError as error:
        if error.filename is None:
            raise
        err.line(f"rheoscope: {error.filename} cannot be used ({error.strerror}): look at its rights, or name another")
        sys.exit(2)
    except SystemExit as end:
        if end.code == INTERRUPTED:  # which typer makes of Ctrl-C
            err.line("rheoscope: interrupted; no file was left half-written")
        raise
