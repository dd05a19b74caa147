"""The command line run in this process, as a person would in a folder."""

import io
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest import mock

from rheoscope.cli.app import main


class Outcome(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


def run(folder, *arguments):
    """What `rheoscope` does with the given arguments in `folder`."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        chdir(folder),
        redirect_stdout(out),
        redirect_stderr(err),
        mock.patch.object(sys, "argv", ["rheoscope", *map(str, arguments)]),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    return Outcome(code, out.getvalue(), err.getvalue())
