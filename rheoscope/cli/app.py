"""The `rheoscope` command. Bad input ends in one sentence and exit code 2, Ctrl-C in exit code 130."""

from __future__ import annotations

import sys

import typer

from ..errors import RheoscopeError
from .measure import measure, report
from .models import check, models

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
app.command()(models)


@app.callback()
def _app() -> None:
    """Shows the flow inside a transformer and lets you act on it."""


def main() -> None:
    """Run the command line of this process."""
    try:
        app()
    except RheoscopeError as error:
        print(f"rheoscope: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("rheoscope: interrupted; nothing was written", file=sys.stderr)
        sys.exit(130)
