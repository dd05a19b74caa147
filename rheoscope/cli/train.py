"""`rheoscope train`: a network of one attention kind, trained on a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rheoscope.cli.console import out
from rheoscope.cli.inputs import Field, Seed, Split, Text

KINDS = "softmax, sd, sd_linear, elu, sd_elu, ega, ega_published or lag_conv"  # of nets, which take torch to import


def train(
    kind: Annotated[str, typer.Argument(help=f"Attention kind, or one per layer with commas: {KINDS}.")],
    text: Text,
    out_folder: Annotated[Path, typer.Option("--out", help="The folder of the network; a stopped run goes on in it.")],
    size: Annotated[str, typer.Option(help="micro, 7M, 18M, 30M, 51M, 125M or 355M.")] = "micro",
    steps: Annotated[int | None, typer.Option(help="Steps; the size's own if left out.")] = None,
    batch: Annotated[int | None, typer.Option(help="Windows per step over all processes.")] = None,
    window: Annotated[int | None, typer.Option(help="Tokens per window; the size's own if left out.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help='"bytes", "bpe:N", a hub name or a folder.')] = None,
    positions: Annotated[str, typer.Option(help="learned, rotary or morlet.")] = "learned",
    no_norm: Annotated[bool, typer.Option("--no-norm", help="Without any norm, the final one included.")] = False,
    precision: Annotated[str, typer.Option(help="float32, bf16, or auto.")] = "auto",
    split: Split = "file",
    field: Field = "text",
    seed: Seed = 0,
) -> None:
    """Train a decoder whose attention shows its routing and filtering; a run that was stopped goes on where it was."""
    from rheoscope.nets.train import train as trained

    kinds = kind.split(",")
    result = trained(
        kinds[0] if len(kinds) == 1 else kinds,
        text=list(text),
        out=out_folder,
        progress=True,
        size=size,
        seed=seed,
        steps=steps,
        batch=batch,
        window=window,
        learning_rate=learning_rate,
        tokenizer=tokenizer,
        positions=positions,
        use_norm=not no_norm,
        precision=precision,
        split=split,
        field=field,
    )
    out.line(f"loss {result.loss:.4f}, held-out {result.held_out_loss:.4f} nats/token after {result.steps} steps")
    out.line(result.folder)
