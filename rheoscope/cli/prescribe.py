"""`rheoscope prescribe`: from a run to a plan of edits, with the control beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from rheoscope.cli.console import err, out, progress
from rheoscope.cli.inputs import (
    Device,
    Dtype,
    FieldOfRun,
    Overwrite,
    PerDocument,
    Seed,
    SplitOfRun,
    Trust,
    Window,
    Windows,
    opened,
)
from rheoscope.errors import RheoscopeError
from rheoscope.storage import refuse_output, refuse_replaced

if TYPE_CHECKING:
    from rheoscope.run import Run
    from rheoscope.surgery.prescribe import Measured, Prescription


def prescribe(
    run_file: Annotated[Path, typer.Argument(metavar="RUN", help="A run file that `rheoscope measure` wrote.")],
    text: Annotated[list[str], typer.Option(help="Text to choose and check on; that of the run if left out.")] = (),
    max_loss: Annotated[float, typer.Option(help="Most that the loss may rise, nats/token, before recovery.")] = 0.02,
    only: Annotated[
        str | None,
        typer.Option(help="With commas: drop, constant, linearize, parallelize, shrink; all if left out."),
    ] = None,
    out_file: Annotated[Path, typer.Option("--out", help="The plan to write (YAML).")] = Path("plan.yaml"),
    model: Annotated[str | None, typer.Option(help="Another place for the model that the run names.")] = None,
    memory: Annotated[
        Path | None, typer.Option(help="Keeps every pass, so that a stopped choice goes on where it was.")
    ] = None,
    most_candidates: Annotated[
        int, typer.Option("--candidates", help="Most of each kind that are measured; more are ranked first.", min=1)
    ] = 512,
    n_random: Annotated[int, typer.Option(help="Random plans of the same size beside it.", min=1)] = 3,
    share: Annotated[float, typer.Option(help="Share of the windows to choose by; the others check.")] = 0.6,
    window: Window = None,
    windows: Windows = 64,
    windows_per_document: PerDocument = None,
    split: SplitOfRun = None,
    field: FieldOfRun = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: Trust = False,
    overwrite: Overwrite = False,
) -> None:
    """Choose what to cut: every candidate measured alone, the best taken together, random plans beside them."""
    refuse_output(out_file, overwrite=overwrite)
    refuse_replaced(out_file, run_file, *text)
    if memory is not None:
        refuse_output(memory, overwrite=True)
    from rheoscope.run import Run
    from rheoscope.surgery.prescribe import prescribe as prescribed
    from rheoscope.surgery.texts import two_texts

    run = Run.load(run_file)
    kinds = [kind.strip() for kind in only.split(",") if kind.strip()] if only is not None else []
    if only is not None and not kinds:
        raise RheoscopeError("--only without a kind given: name some, or leave it out")
    source, how = _text_of(run, run_file, text)
    how |= {name: value for name, value in (("split", split), ("field", field)) if value is not None}
    view, corpus = opened(
        model or _model_of(run, run_file),
        source,
        window=window,
        n_windows=windows or None,
        loading={"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code},
        windows_per_document=windows_per_document,
        **how,
    )
    _refuse_other(run, run_file, view)
    choosing, checking = two_texts(corpus, share=share, seed=seed)
    with progress() as shown:
        found = prescribed(
            view,
            choosing,
            checking,
            limit=max_loss,
            only=kinds,
            run=run,
            most_candidates=most_candidates,
            n_random=n_random,
            seed=seed,
            memory=memory,
            progress=shown,
        )
    written = found.plan.save(out_file, overwrite=overwrite)
    for kind, reason in found.left_out.items():
        err.print(f"without {kind}: {reason}", markup=False, soft_wrap=True)
    out.print(plan_table(found))
    for line in prescription_lines(found):
        out.print(line, markup=False, soft_wrap=True)
    out.line(written)


def _text_of(run: Run, run_file: Path, text: list[str]) -> tuple[list[str], dict[str, str]]:
    """The text to read and how: as asked for, or that of the run, as it was split and from the field it was in."""
    if text:
        return list(text), {}
    said = run.provenance.get("text", {})
    source = list(said.get("sources", []))
    if not source:
        raise RheoscopeError(f"{run_file} names no text: give one with --text")
    return source, {name: said[name] for name in ("split", "field") if isinstance(said.get(name), str)}


def _model_of(run: Run, run_file: Path) -> str:
    """The model that a run names."""
    ref = run.provenance.get("model", {}).get("ref")
    if not ref:
        raise RheoscopeError(f"{run_file} names no model: give it with --model")
    return ref


def _refuse_other(run: Run, run_file: Path, view) -> None:
    """Raise RheoscopeError where the run is of a model of another shape."""
    said = run.provenance.get("model", {})
    for name in ("n_layers", "n_heads", "n_kv_heads", "d_model"):
        if name in said and said[name] != getattr(view, name):
            raise RheoscopeError(
                f"{run_file} is of a model with {name} = {said[name]}; {view.ref} has {getattr(view, name)}: "
                "give the run of this model"
            )


def plan_table(found: Prescription) -> Table:
    """One row per edit, in the order they were chosen."""
    from rheoscope.surgery.prescribe import pm

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("edit")
    table.add_column("place")
    for heading in ("alone", "given those above", "parameters saved"):
        table.add_column(heading, justify="right")
    for step, planned in zip(found.choice.steps, found.plan.planned, strict=True):
        given = pm(step.given) if step.given is not None else ""
        saved = f"{planned.saving:,}" if planned.saving else ""
        table.add_row(step.candidate.kind, step.candidate.place, pm(step.alone), given, saved)
    return table


def prescription_lines(found: Prescription) -> list[str]:
    """What the plan costs as a whole, how well that was predicted, and what random plans cost."""
    from rheoscope.surgery.prescribe import predicted, rank_agreement

    agreement = rank_agreement(found.choice)
    lines = [
        "",
        f"{len(found.plan.planned)} of {found.n_candidates} candidates, {found.n_passes} passes; "
        "change of the loss in nats/token before recovery:",
        f"  predicted (sum of the changes alone)   {predicted(found.choice):+.4f}",
        *_measured_lines("on the text it was chosen on", found.choosing),
        *_measured_lines("on other documents", found.checking),
    ]
    if agreement == agreement:
        n = len(found.choice.remeasured)
        lines.append(f"  rank correlation of changes alone and given others, {n} measured twice: {agreement:.2f}")
    return lines


def _measured_lines(where: str, part: Measured) -> list[str]:
    from rheoscope.surgery.prescribe import pm

    random = ", ".join(f"{float(one.value):+.4f}" for one in part.random)
    return [f"  measured {where:<30}{pm(part.plan)}", f"  random plans of the same size          {random}"]
