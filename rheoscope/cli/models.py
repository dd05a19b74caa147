"""`rheoscope check` and `rheoscope models`: what can be opened, and what holds on it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from rheoscope.cli.console import err, out
from rheoscope.cli.inputs import Device, Dtype, Model, Seed, Trust

MARKS = {"holds": "[green]holds[/]", "refused": "[yellow]refused[/]", "fails": "[bold red]fails[/]"}


def check(
    model: Model,
    dtype: Dtype = "auto",
    device: Device = "auto",
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Try the identities that every reading rests on, on this very model. Exit code 1 if one of them fails."""
    from rheoscope.models.check import check as findings_of
    from rheoscope.models.load import load

    view = load(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    with err.status("") as status:
        findings = findings_of(view, seed=seed, progress=lambda name: status.update(name))
    if as_json:
        plain = [{name: _plain(value) for name, value in asdict(finding).items()} for finding in findings]
        out.line(json.dumps(plain, indent=2, allow_nan=False))
    else:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("identity", "outcome", "largest error", "noise floor", "in", "remark"):
            table.add_column(heading, justify="right" if heading in ("largest error", "noise floor") else "left")
        for finding in findings:
            numbers = ("", "") if finding.status == "refused" else (f"{finding.error:.1e}", f"{finding.floor:.1e}")
            table.add_row(finding.identity, MARKS[finding.status], *numbers, finding.dtype, finding.reason)
        out.print(table)
    if any(finding.status == "fails" for finding in findings):
        raise typer.Exit(1)


def _plain(value: object) -> object:
    """A value that JSON can hold: null for a number that there is not."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def models() -> None:
    """List the models that ship with rheoscope and the families whose parts it knows."""
    from rheoscope.models.families import FAMILIES, REFUSED
    from rheoscope.models.load import builtin_models

    for name, folder in builtin_models().items():
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        out.print(f"[bold]builtin:{name}[/]  {config['model_type']}")
    out.print(f"\nfamilies with a row: {', '.join(sorted(FAMILIES))}")
    out.print("any other family that attends through transformers' attention interface: without its weights")
    out.print(f"refused: {', '.join(sorted(REFUSED))}, encoder-decoders, recurrent and hybrid models, latent attention")
