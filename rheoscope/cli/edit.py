"""`rheoscope edit`: a plan carried out, verified on other documents, and saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from rheoscope.cli.console import out, progress
from rheoscope.cli.inputs import (
    Device,
    Dtype,
    Field,
    Model,
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
from rheoscope.errors import RheoscopeError
from rheoscope.storage import refuse_output, refuse_replaced

if TYPE_CHECKING:
    from rheoscope.surgery.apply import Outcome
    from rheoscope.surgery.verify import Reading

LENGTHS, BATCHES, SECONDS = "64,256,1024", "1,4", 60.0  # those of `verify`, which takes torch to import


def edit(
    model: Model,
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan of `rheoscope prescribe`, or your own.")],
    text: Text = ("builtin:manual",),
    out_folder: Annotated[Path, typer.Option("--out", help="The folder of the edited model.")] = Path("edited"),
    no_refit: Annotated[bool, typer.Option("--no-refit", help="Leave output projections as they are.")] = False,
    distill_minutes: Annotated[
        float, typer.Option(help="Minutes of distillation after the refit; 0 for none.", min=0)
    ] = 0.0,
    lora_rank: Annotated[
        int | None, typer.Option(help="Distil through adapters of this rank, merged at the end; needs peft.")
    ] = None,
    memory: Annotated[
        Path | None, typer.Option(help="Keeps the distillation, so that a stopped one goes on where it was.")
    ] = None,
    n_random: Annotated[int, typer.Option(help="Random plans of the same size beside it.", min=0)] = 1,
    clock_lengths: Annotated[str, typer.Option(help="Tokens at which both models are timed, with commas.")] = LENGTHS,
    clock_batches: Annotated[str, typer.Option(help="Batch sizes at which they are, with commas.")] = BATCHES,
    clock_seconds: Annotated[float, typer.Option(help="Seconds that timing may take, about.", min=0)] = SECONDS,
    no_clock: Annotated[bool, typer.Option("--no-clock", help="No times and no memory.")] = False,
    window: Window = None,
    windows: Windows = 64,
    windows_per_document: PerDocument = None,
    split: Split = "file",
    field: Field = "text",
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: Trust = False,
    overwrite: Overwrite = False,
) -> None:
    """Make the edits of a plan for good: half of the documents win loss back, the other half verify."""
    from rheoscope.surgery.plan import Plan
    from rheoscope.surgery.save import refuse_folder, save_edited

    clock = {
        "lengths": () if no_clock else sizes_of(clock_lengths, "--clock-lengths"),
        "batch_sizes": sizes_of(clock_batches, "--clock-batches"),
        "seconds": clock_seconds,
    }
    if lora_rank is not None and not distill_minutes:
        raise RheoscopeError("--lora-rank given without a distillation: add --distill-minutes")
    refuse_replaced(out_folder, model, *text)
    refuse_folder(out_folder, overwrite=overwrite)
    if memory is not None:
        refuse_output(memory, overwrite=True)
    plan = Plan.load(plan_file)
    from rheoscope.surgery.apply import carried_out
    from rheoscope.surgery.distill import Distillation, refuse_memory

    if memory is not None:
        refuse_memory(memory)
    view, corpus = opened(
        model,
        text,
        window=window,
        n_windows=windows or None,
        loading={"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code},
        windows_per_document=windows_per_document,
        split=split,
        field=field,
    )
    distillation = Distillation(minutes=distill_minutes, seed=seed, lora_rank=lora_rank) if distill_minutes else None
    with progress() as shown:
        outcome = carried_out(
            view,
            plan,
            corpus,
            with_refit=not no_refit,
            distillation=distillation,
            memory=memory,
            n_random=n_random,
            seed=seed,
            clock=clock,
            progress=shown,
        )
    saved = save_edited(outcome.model, view.tokenizer, out_folder, overwrite=overwrite, files=outcome.files())
    out.print(verification_table(outcome))
    for line in control_lines(outcome):
        out.print(line, markup=False, soft_wrap=True)
    if outcome.verification.latencies:
        out.print(latency_table(outcome))
    for batch, length in outcome.verification.not_timed:
        out.print(f"not timed: {batch} x {length:,} tokens; allow more with --clock-seconds", markup=False)
    out.line(saved)


def sizes_of(written: str, option: str) -> tuple[int, ...]:
    """Whole numbers from 1, with commas between them."""
    parts = [part.strip() for part in written.split(",") if part.strip()]
    if not parts or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise RheoscopeError(f"{option} {written!r} given: give whole numbers from 1, with commas")
    return tuple(int(part) for part in parts)


def verification_table(outcome: Outcome) -> Table:
    """Sizes and losses, before and after."""
    found = outcome.verification
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for heading in ("original", "edited", "change"):
        table.add_column(heading, justify="right")
    table.add_row("loss, nats/token", f"{found.loss.before:.4f}", f"{found.loss.after:.4f}", pm(found.change))
    table.add_row("KL(original ‖ edited), nats/token", "", pm(found.kl), "")
    table.add_row("same most probable token", "", pm(found.agreement), "")
    for name, pair in (
        ("parameters", found.parameters),
        ("attention parameters", found.attention_parameters),
        ("operations per token", found.flops),
        ("memory of one prefill, bytes", found.memory),
    ):
        if pair.before != pair.before:
            continue  # not measured
        change = f"{100 * (pair.after / pair.before - 1):+.1f} %" if pair.before else ""
        table.add_row(name, f"{pair.before:,.0f}", f"{pair.after:,.0f}", change)
    return table


def control_lines(outcome: Outcome) -> list[str]:
    """Loss changes before and after recovery, of the plan and of random plans of the same size."""
    found = outcome.verification
    before = pm(found.change_before_recovery) if found.change_before_recovery else ""
    lines = ["", f"change of the loss on {found.n} {found.text['error_unit']}s that nothing was fitted on, nats/token:"]
    if found.n_chosen_on:
        lines.append(
            f"  {found.n_chosen_on} of the documents are among those the plan was chosen on, which flatters it: "
            "give more text (--text, --windows)"
        )
    middle = f", {pm(found.change_after_refit)} after the refit" if found.change_after_refit else ""
    lines += [f"  this plan       {before} before recovery{middle}, {pm(found.change)} after"]
    for control in found.controls:
        after = f", {pm(control.change_recovered)} after" if control.change_recovered else ""
        lines.append(f"  a random plan   {pm(control.change)} before recovery{after}")
    if len(found.controls) < found.n_controls_asked:
        lines.append(
            f"  {found.n_controls_asked - len(found.controls)} of {found.n_controls_asked} random plans left out: "
            "no other layers or key groups of the same build can take these edits"
        )
    for fit in outcome.fits:
        lines.append(
            f"  refit of layer {fit.layer}: error of its output {fit.error_before:.3f} → {fit.error_after:.3f} "
            "of its variance"
        )
    return [*lines, ""]


def latency_table(outcome: Outcome) -> Table:
    """Measured times of both models."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("phase", "batch", "tokens", "original, ms", "edited, ms", "ratio", "ratios from … to", "turns"):
        table.add_column(heading, justify="right")
    for one in outcome.verification.latencies:
        times = (f"{one.before_ms:.1f}", f"{one.after_ms:.1f}", f"{one.ratio:.3f}")
        spread = f"{one.ratio_low:.2f} … {one.ratio_high:.2f}"
        table.add_row(one.phase, str(one.batch), str(one.length), *times, spread, str(one.repeats))
    return table


def pm(reading: Reading) -> str:
    """A reading with its error."""
    return f"{reading.value:+.4f} ± {reading.se:.4f}"
