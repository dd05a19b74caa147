"""What a person sees while and after a command runs: progress, tables."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:  # torch is loaded by the commands that need it, not by --help
    from rheoscope.instruments.engine import Progress as Report
    from rheoscope.tables import Reading

INTERVAL = 10.0  # seconds between lines where there is no terminal to draw on

UNITS = {"clock": "turns", "distillation": "steps"}  # by the first word of a task; windows for all others

WIDTH = 120  # columns where there is no terminal to ask


class Voice(Console):
    """A console that falls silent where nobody reads any more: a run of hours is worth more than its last lines."""

    def __init__(self, *, stderr: bool = False):
        stream = sys.stderr if stderr else sys.stdout  # None where it is closed
        super().__init__(stderr=stderr, highlight=False, width=None if stream and stream.isatty() else WIDTH)

    def on_broken_pipe(self) -> None:
        """What is still to be written goes nowhere."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)

    def line(self, text: object) -> None:
        """One line, letter by letter as it is."""
        if self.quiet:
            return
        try:
            print(text, file=self.file, flush=True)
        except BrokenPipeError:
            self.on_broken_pipe()


out = Voice()
err = Voice(stderr=True)


def prepare_streams() -> None:
    """No letter and no closed stream ends a command: letters that an encoding lacks become question marks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for as long as the program runs
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextmanager
def progress() -> Iterator[Report]:
    """Bars with the time left on a terminal; elsewhere a line now and then; nothing from a process that is quiet."""
    if err.quiet:
        yield lambda task, done, total: None
        return
    if not err.is_terminal:
        yield _Lines()
        return
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err) as bars:
        tasks: dict[str, int] = {}

        def update(task: str, done: int, total: int) -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, total=total, unit=unit_of(task))
            bars.update(tasks[task], completed=done, total=total)

        yield update


def unit_of(task: str) -> str:
    """What is counted while a task runs."""
    return next((unit for name, unit in UNITS.items() if task.startswith(name)), "windows")


class _Lines:
    """One line per INTERVAL and one when a task ends, with the time left."""

    def __init__(self) -> None:
        self.started: dict[str, float] = {}
        self.last = time.monotonic()

    def __call__(self, task: str, done: int, total: int) -> None:
        now = time.monotonic()
        started = self.started.setdefault(task, now)
        if done < total and now - self.last < INTERVAL:
            return
        self.last = now
        left = f", {(now - started) * (total - done) / done:.0f} s left" if done < total and now > started else ""
        err.line(f"{task}: {done}/{total} {unit_of(task)}{left}")


def summary_table(readings: list[Reading]) -> Table:
    """The few numbers that stand for a run."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("instrument", "reading", "unit"):
        table.add_column(heading)
    for heading in ("value", "spread", "by chance"):
        table.add_column(heading, justify="right")
    for reading in readings:
        spread = f"± {reading.se:.2g}" if reading.se is not None else ""
        if reading.low is not None:
            spread = f"{reading.low:.3g} … {reading.high:.3g}"
        name = reading.long_name if reading.how == "value" else f"{reading.long_name} ({reading.how})"
        chance = " / ".join(f"{value:.3g}" for value in reading.nulls.values())
        unit = "" if reading.unit == "1" else reading.unit
        table.add_row(reading.instrument, name, unit, f"{reading.value:.4g}", spread, chance)
    return table
