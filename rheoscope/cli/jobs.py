"""What one command measures: one model, or several with a file each; and the processes that share it."""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rheoscope.cli.console import err, out
from rheoscope.errors import RheoscopeError, Stopped

if TYPE_CHECKING:
    from rheoscope.instruments.processes import Processes
    from rheoscope.instruments.scale import Stop

SINGLE, FOLDER = Path("run.nc"), Path("runs")  # where runs go if nothing is said


@dataclass(frozen=True)
class Job:
    """One model and where its results go."""

    model: str
    out: Path
    report: Path | None
    tables: Path | None


def jobs(models: Sequence[str], out_path: Path | None, report: Path | None, tables: Path | None) -> list[Job]:
    """One job per model. Several share folders, in which each has files under a name of its own."""
    if len(models) == 1:
        return [Job(models[0], out_path or SINGLE, report, tables)]
    folders = [folder for folder in (out_path or FOLDER, report, tables) if folder is not None]
    for folder in folders:
        if folder.exists() and not folder.is_dir():
            raise RheoscopeError(f"{len(models)} models asked for, whose files need a folder, and {folder} is a file")
    names = run_names(models)
    for folder in folders:
        _make(folder)
    return [
        Job(
            model,
            (out_path or FOLDER) / f"{name}.nc",
            report and report / f"{name}.html",
            tables and tables / name,
        )
        for model, name in zip(models, names, strict=True)
    ]


def run_names(models: Sequence[str]) -> list[str]:
    """A file name for every model: the last part of its name, the part before it too where that is not enough."""
    twice = [model for model, count in Counter(models).items() if count > 1]
    if twice:
        raise RheoscopeError(f"model {twice[0]} is given twice: give each model once")
    for depth in range(1, max(len(_parts(model)) for model in models) + 1):
        names = ["-".join(_parts(model)[-depth:]) for model in models]
        if len({name.casefold() for name in names}) == len(names):
            return names
    raise RheoscopeError(f"two of the models {', '.join(models)} would be written to one file: measure them apart")


def _parts(model: str) -> list[str]:
    """The parts of a model's name that a file name can be made of."""
    path = Path(model).with_suffix("") if model.endswith(".gguf") else model
    parts = [re.sub(r"[^\w.@+-]", "-", part).strip(".-") for part in re.split(r"[/\\:]", str(path))]
    return [part for part in parts if part] or ["model"]


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise RheoscopeError(f"the folder {folder} cannot be made: {error.strerror}") from error


def each(todo: Sequence[Job], measured: Callable[[Job], None]) -> None:
    """One model after the other. Of several, one that fails does not stop the rest; the exit code is then 1."""
    if len(todo) == 1:
        measured(todo[0])
        return
    failed: dict[str, str] = {}
    for place, job in enumerate(todo):
        err.print(f"[{place + 1}/{len(todo)}] {job.model}", markup=False, soft_wrap=True)
        try:
            measured(job)
        except Stopped:  # which is asked of the whole command
            raise
        except RheoscopeError as error:
            failed[job.model] = str(error)
        except (RuntimeError, MemoryError, OSError, ValueError) as error:  # a fault that the other models may not have
            traceback.print_exc()
            failed[job.model] = f"{type(error).__name__}: {error}"
        if job.model in failed:
            err.print(f"{job.model}: {failed[job.model]}", markup=False, soft_wrap=True)
    err.print(f"{len(todo) - len(failed)} of {len(todo)} models measured", markup=False)
    for model, reason in failed.items():
        err.print(f"without {model}: {reason}", markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


@contextmanager
def shared() -> Iterator[Processes]:
    """The processes of this run: those that torchrun started, or this one alone. Only the first of them prints.

    Where one fails, all end, and the sentence of the first to fail is the only one printed.
    """
    from rheoscope.instruments.processes import Processes, joined

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Processes()
        return
    with joined() as processes:
        out.quiet = err.quiet = not processes.first
        try:
            yield processes
        except RheoscopeError as error:
            if not processes.fail():
                sys.exit(2)
            raise type(error)(f"process {processes.rank} of {processes.size}: {error}") from error
        except BaseException:
            processes.fail()
            raise


def own_device(device: str, processes: Processes) -> str:
    """The device of this process, where several share the accelerators of a machine."""
    if processes.size == 1 or device not in ("auto", "cuda"):
        return device
    import torch

    if not torch.cuda.is_available():
        return device
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"


def refuse_shared(processes: Processes, models: Sequence[str], text: Sequence[str]) -> None:
    """Raise RheoscopeError for what several processes cannot share."""
    if processes.size == 1:
        return
    if len(models) > 1:
        raise RheoscopeError(
            f"{len(models)} models asked for by {processes.size} processes: give each its own torchrun"
        )
    if "-" in text:
        raise RheoscopeError(f"standard input asked for by {processes.size} processes: write the text to a file first")


@contextmanager
def stoppable(stop: Stop, partial: Path) -> Iterator[None]:
    """A block in which SIGTERM, as schedulers and torchrun send it, ends the run with its state kept if possible."""

    def asked(_signal: int, _frame: object) -> None:
        if stop.heeded and not stop.asked:
            stop.asked = True
            return
        kept = f"what was kept is in {partial}: go on with --resume" if partial.exists() else "nothing was kept yet"
        raise Stopped(f"told to stop (SIGTERM, which torchrun sends when another process has ended); {kept}")

    before = signal.signal(signal.SIGTERM, asked)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
