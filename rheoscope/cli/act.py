"""`rheoscope ablate`: what parts of a model are worth, by taking them away."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rheoscope.cli.console import out, progress
from rheoscope.cli.inputs import (
    BatchSize,
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


def ablate(
    model: Model,
    text: Text = ("builtin:manual",),
    out_file: Annotated[Path, typer.Option("--out", help="The run file to write (netCDF).")] = Path("ablation.nc"),
    by_layer: Annotated[bool, typer.Option("--by-layer", help="Every variant in every layer alone as well.")] = False,
    parallel_curve: Annotated[
        bool, typer.Option("--parallel-curve", help="Layers made parallel: low defect first, random, high first.")
    ] = False,
    n_random: Annotated[int, typer.Option(help="Random orders of the parallel curve.", min=1)] = 5,
    gates: Annotated[bool, typer.Option("--gates", help="Fit one gate per feed-forward network.")] = False,
    pressure: Annotated[bool, typer.Option("--pressure", help="Attention times 1 to 3.")] = False,
    prefix: Annotated[bool, typer.Option("--prefix", help="Another text before the last few tokens.")] = False,
    scores: Annotated[
        bool, typer.Option("--scores", help="Routing and filtering cut to each rank; routing as a key bias.")
    ] = False,
    linear: Annotated[bool, typer.Option("--linear", help="Layers 0 to n - 1 without a softmax, for every n.")] = False,
    calibrate: Annotated[
        list[str], typer.Option(help="Text that --scores is fitted on; the first windows of --text if left out.")
    ] = (),
    memory: Annotated[
        Path | None, typer.Option(help="Keeps every pass, so that a stopped ablation goes on where it was.")
    ] = None,
    window: Window = None,
    windows: Windows = 64,
    windows_per_document: PerDocument = None,
    split: Split = "file",
    field: Field = "text",
    batch_size: BatchSize = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: Trust = False,
    overwrite: Overwrite = False,
) -> None:
    """Take parts away (FFN, its radial or tangential part, attention) and print what each costs, paired by document."""
    refuse_output(out_file, overwrite=overwrite)
    refuse_replaced(out_file, model, *text)
    if memory is not None:
        refuse_output(memory, overwrite=True)
    if calibrate and not scores:
        raise RheoscopeError("a calibration text given without --scores, the only part that is fitted: add --scores")
    from rheoscope.corpus import read
    from rheoscope.surgery.ablation import ablate as ablated
    from rheoscope.surgery.ablation import ablation_lines
    from rheoscope.surgery.calibration import N_CALIBRATION

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
    calibration = None
    if calibrate:
        fitted = {"window": corpus.window, "n_windows": N_CALIBRATION, "split": split, "field": field}
        calibration = read(calibrate, tokenizer=view.tokenizer, **fitted)
    with progress() as shown:
        run = ablated(
            view,
            corpus,
            by_layer=by_layer,
            parallel_curve=parallel_curve,
            n_random=n_random,
            gates=gates,
            pressure=pressure,
            prefix=prefix,
            scores=scores,
            linear=linear,
            calibration=calibration,
            memory=memory,
            batch_size=batch_size,
            seed=seed,
            command=["rheoscope", *sys.argv[1:]],
            progress=shown,
        )
    run.save(out_file, overwrite=overwrite)
    for line in ablation_lines(run):
        out.line(line)
    out.line(out_file)
