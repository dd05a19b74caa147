"""`rheoscope measure` and `rheoscope report`: from a model and a text to a run, a table and a page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from rheoscope.cli.console import err, out, progress, summary_table
from rheoscope.cli.inputs import (
    BatchSize,
    Device,
    Dtype,
    Field,
    Models,
    Overwrite,
    PerDocument,
    Seed,
    Split,
    Text,
    Trust,
    Window,
    Windows,
    opened,
)
from rheoscope.cli.jobs import Job, each, jobs, own_device, refuse_shared, shared, stoppable
from rheoscope.errors import RheoscopeError
from rheoscope.storage import refuse_output, refuse_replaced

if TYPE_CHECKING:
    from rheoscope.corpus import Corpus
    from rheoscope.instruments.memory import Memory
    from rheoscope.models.view import ModelView
    from rheoscope.run import Run


def measure(
    models: Models,
    text: Text = ("builtin:manual",),
    out_file: Annotated[
        Path | None,
        typer.Option("--out", help="The run file to write (netCDF), run.nc; of several models a folder, runs."),
    ] = None,
    report_file: Annotated[Path | None, typer.Option("--report", help="Write the report page as well.")] = None,
    tables: Annotated[Path | None, typer.Option(help="Write tidy tables into this folder as well.")] = None,
    table_format: Annotated[str, typer.Option(help="csv or parquet.")] = "csv",
    instruments: Annotated[
        str | None, typer.Option(help="Comma-separated; all that the model has if left out.")
    ] = None,
    window: Window = None,
    windows: Windows = 64,
    windows_per_document: PerDocument = None,
    split: Split = "file",
    field: Field = "text",
    tail: Annotated[str, typer.Option(help="drop what does not fill a window, or keep it, padded.")] = "drop",
    pack: Annotated[bool, typer.Option("--pack", help="Let windows cross documents.")] = False,
    bos: Annotated[str, typer.Option(help="Begin windows with the BOS token: auto, always or never.")] = "auto",
    batch_size: BatchSize = None,
    choose: Annotated[list[str], typer.Option("--set", help="An instrument's option: routing.n_spectra=16.")] = (),
    no_nulls: Annotated[bool, typer.Option("--no-nulls", help="Leave the nulls out.")] = False,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: Trust = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was killed (OUT.partial).")] = False,
    max_memory: Annotated[str | None, typer.Option(help="Memory that the process may take, such as 4GiB.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Measure a model on a text: one pass, all instruments, a run file and a summary. Several models: a file each."""
    from rheoscope.run import refuse_format

    refuse_format(table_format)
    options = instrument_options(choose)
    todo = jobs(models, out_file, report_file, tables)
    loading = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    reading = {"windows_per_document": windows_per_document, "split": split, "field": field, "tail": tail}
    reading |= {"pack": pack, "bos": bos, "window": window, "n_windows": windows or None}
    names = None if instruments is None else [name.strip() for name in instruments.split(",") if name.strip()]
    measuring = {
        "instruments": names,
        "options": options,
        "batch_size": batch_size,
        "nulls": not no_nulls,
        "seed": seed,
    }
    from rheoscope.instruments.memory import parsed
    from rheoscope.instruments.partial import held, partial_of, remove_partial
    from rheoscope.instruments.scale import Stop

    scale: dict[str, Any] = {"resume": resume, "anew": overwrite and not resume}
    scale["max_memory"] = None if max_memory is None else parsed(max_memory)

    with shared() as processes:
        loading["device"] = own_device(device, processes)

        def one(job: Job) -> None:
            if processes.first:
                _refuse_outputs(job, text, names, resume=resume, overwrite=overwrite)
            own = scale | {"processes": processes, "stop": Stop()}
            with held(job.out) if processes.first else nullcontext():
                with stoppable(own["stop"], partial_of(job.out)):
                    view, corpus = opened(job.model, text, loading=loading, **reading)
                    run, is_new = _measured(job, view, corpus, measuring, own, overwrite=overwrite)
                if processes.first:
                    _write(job, run, table_format, is_new=is_new, overwrite=overwrite)
                    remove_partial(partial_of(job.out))
                processes.written()  # then the others drop theirs, which may lie on other machines
                remove_partial(partial_of(job.out))
            if processes.first:
                _say(job, run, is_new=is_new)  # last, as whoever reads it may have gone

        refuse_shared(processes, models, text)

        each(todo, one)


def _measured(
    job: Job, view: ModelView, corpus: Corpus, measuring: dict[str, Any], scale: dict[str, Any], *, overwrite: bool
) -> tuple[Run, bool]:
    """The run of one model, and whether it is a new one: one that is over is read back where it is to be resumed."""
    from rheoscope.instruments.measure import measure as measured
    from rheoscope.instruments.partial import partial_of
    from rheoscope.instruments.scale import Scale

    def told(needed: Memory) -> None:
        err.print(str(needed), markup=False, soft_wrap=True)

    is_new = overwrite or not job.out.exists()
    how = Scale(partial=partial_of(job.out), output=None if is_new else job.out, tell=told, **scale)
    command = ["rheoscope", *sys.argv[1:]]
    with progress() as shown:
        return measured(view, corpus, **measuring, command=command, progress=shown, scale=how), is_new


def _write(job: Job, run: Run, table_format: str, *, is_new: bool, overwrite: bool) -> None:
    """The run, and what was asked for beside it; of a run that was finished before, what is not there yet."""
    from rheoscope.run import PROVENANCE

    if is_new:
        run.save(job.out, overwrite=overwrite)
    if job.tables is not None and (is_new or not (job.tables / PROVENANCE).exists()):  # which is written last
        run.export(job.tables, table_format, overwrite=overwrite or not is_new)
    if job.report is not None and (is_new or not job.report.exists()):
        run.report(job.report, overwrite=overwrite)


def _say(job: Job, run: Run, *, is_new: bool) -> None:
    """A table of what a run says, and where it is."""
    for name, reason in run.provenance["config"]["left_out"].items():
        err.print(f"without {name}: {reason}", markup=False, soft_wrap=True)
    if not is_new:
        err.line(f"{job.out} was finished before, and is as it was; so is what was already there beside it")
    out.print(summary_table(run.summary()))
    for path in (job.out, job.tables, job.report):
        if path is not None:
            out.line(path)


def report(
    run_file: Annotated[Path, typer.Argument(metavar="RUN", help="A run file that `rheoscope measure` wrote.")],
    out_file: Annotated[Path | None, typer.Option("--out", help="The page; RUN with .html if left out.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Draw a run as one HTML page that opens from disk and loads nothing from a network."""
    from rheoscope.run import Run

    run = Run.load(run_file)
    page = out_file or run_file.with_suffix(".html")
    refuse_replaced(page, run_file)
    out.line(run.report(page, overwrite=overwrite))


def _refuse_outputs(
    job: Job, text: Sequence[str], instruments: list[str] | None, *, resume: bool, overwrite: bool
) -> None:
    """Raise RheoscopeError, before any work is done, where the outputs could not be written in the end."""
    from rheoscope.instruments.measure import INSTRUMENTS
    from rheoscope.instruments.partial import partial_of, refuse_unfinished
    from rheoscope.run import PROVENANCE, tables_in

    files = [path for path in (job.out, job.report) if path is not None]
    for place, path in enumerate(files):
        if path.resolve() in [other.resolve() for other in (*files[:place], *([job.tables] if job.tables else []))]:
            raise RheoscopeError(f"two of run, report and tables cannot both be written to {path}: name two places")
    replaced = overwrite or (resume and job.out.exists())  # what is there beside a finished run is left as it is
    for path in files:
        refuse_output(path, overwrite=replaced)
        refuse_replaced(path, job.model, *text)
    if (folder := job.tables) is not None:
        if folder.exists() and not folder.is_dir():
            raise RheoscopeError(f"tables cannot be written into {folder}: it is no folder")
        refuse_output(folder / PROVENANCE if folder.is_dir() else folder, overwrite=replaced)
        for path in tables_in(folder, instruments or list(INSTRUMENTS)):
            refuse_output(path, overwrite=replaced)
    if not (resume or overwrite):
        refuse_unfinished(partial_of(job.out))


def instrument_options(choices: list[str]) -> dict[str, Any]:
    """`NAME.OPTION=VALUE` strings as the Options of each instrument; values are read as YAML scalars or lists."""
    from rheoscope.instruments.measure import INSTRUMENTS

    chosen: dict[str, dict[str, Any]] = {}
    for choice in choices:
        key, equals, value = choice.partition("=")
        name, dot, option = key.partition(".")
        if not equals or not dot:
            raise RheoscopeError(f"--set {choice!r} cannot be read: write --set INSTRUMENT.OPTION=VALUE")
        if name not in INSTRUMENTS:
            raise RheoscopeError(f"--set {choice!r}: no instrument {name!r}; there are {', '.join(INSTRUMENTS)}")
        known = {field.name: field for field in fields(INSTRUMENTS[name].Options)}
        if option not in known:
            raise RheoscopeError(
                f"--set {choice!r}: {name} has no option {option!r}; it has {', '.join(known) or 'none'}"
            )
        chosen.setdefault(name, {})[option] = _parsed(choice, value, known[option].default)
    return {name: INSTRUMENTS[name].Options(**values) for name, values in chosen.items()}


def _parsed(choice: str, text: str, default: Any) -> Any:
    """A value of the default's type; a list becomes a tuple."""
    try:
        value = yaml.safe_load(text)
        value = tuple(value) if isinstance(value, list) else value
        value = float(value) if isinstance(default, float) and isinstance(value, int) else value
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError):  # the latter of dates and numbers there are not
        raise RheoscopeError(f"--set {choice!r}: the value cannot be read as a number, a word or a list") from None
    if default is not None and type(value) is not type(default):
        raise RheoscopeError(f"--set {choice!r}: the value must be of the kind of {default!r}")
    return value
