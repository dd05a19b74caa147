"""One number per feed-forward network, fitted to lower the loss with all weights frozen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from rheoscope.corpus import Batch, Corpus, batches
from rheoscope.errors import RheoscopeError
from rheoscope.instruments.engine import Progress, silent
from rheoscope.instruments.loss import refuse_loss
from rheoscope.models.field import refuse_field
from rheoscope.models.view import ModelView
from rheoscope.surgery.edits_steering import GateFFN
from rheoscope.surgery.passes import Passes

CALIBRATION = 0.5  # share of the units that the gates are fitted on


@dataclass(frozen=True)
class Fit:
    """How gates are fitted: Adam on batches of the calibration split, its order drawn anew by the seed."""

    steps: int = 60
    rate: float = 0.02
    windows: int = 4  # per step
    seed: int = 0


def split_units(corpus: Corpus, *, share: float = CALIBRATION, seed: int = 0) -> tuple[Corpus, Corpus]:
    """Calibration and held-out windows; a document is in one of them whole. Raises where one would be empty."""
    units = np.unique(corpus.units)
    n = round(share * len(units))
    if not 0 < n < len(units):
        raise RheoscopeError(
            f"a calibration share of {share:g} of {len(units)} {corpus.unit}s asked for, which leaves "
            f"{'no held-out text' if n else 'no text to fit on'}: give more text, or another share"
        )
    chosen = np.random.default_rng(seed).permutation(units)[:n]
    inside = np.isin(corpus.units, chosen)
    return corpus.of_windows(np.flatnonzero(inside)), corpus.of_windows(np.flatnonzero(~inside))


def fitted_gates(
    view: ModelView, calibration: Corpus, fit: Fit, *, progress: Progress = silent
) -> Float[np.ndarray, " layer"]:
    """Gates that lower the loss on the calibration text, from 1, with every weight frozen; reproducible to the seed."""
    refuse_gates(view)
    gates = torch.ones(view.n_layers, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([gates], lr=fit.rate)
    generator = np.random.default_rng(fit.seed)
    order: list[int] = []
    for step in range(fit.steps):
        if len(order) < fit.windows:
            order = [*order, *generator.permutation(calibration.n_windows).tolist()]
        rows, order = order[: fit.windows], order[fit.windows :]
        text = calibration.of_windows(np.array(rows))
        optimiser.zero_grad()
        (gates.grad,) = torch.autograd.grad(_loss(view, next(batches(text, len(rows))), gates), gates)
        optimiser.step()
        progress("fit of the gates", step + 1, fit.steps)
    return gates.detach().numpy()


def _loss(view: ModelView, batch: Batch, gates: Tensor) -> Tensor:
    """Mean loss of a batch with the gates in place, nats per token; differentiable by the gates."""
    with torch.enable_grad(), view.tapped({"ffn_out": lambda layer, F: F * gates[layer].to(F)}):
        logits = view.forward(batch.tokens, batch.valid)
    scored = batch.valid[:, 1:].to(logits.device)
    targets = batch.tokens[:, 1:].to(logits.device)
    logits = logits[:, :-1][scored]
    return torch.nn.functional.cross_entropy(
        logits if logits.dtype == torch.float64 else logits.float(), targets[scored]
    )


def refuse_gates(view: ModelView) -> None:
    """Raise Refused where there is no loss, or no site for a gate."""
    refuse_loss(view)
    refuse_field(view, "gates")


def gate_readings(passes: Passes, held_out: Passes, fit: Fit) -> xr.Dataset:
    """Fitted gates, and what they change on the text they were fitted on (`passes`) and on text they never saw."""
    view = passes.view
    gates = fitted_gates(view, passes.corpus, fit, progress=passes.progress)
    edit = GateFFN(gates=tuple(float(gate) for gate in gates))
    data: dict[str, tuple] = {"gate": (("layer",), gates), "gate_mean": ((), gates.mean())}
    for name, part in (("calibration", passes), ("held_out", held_out)):
        change = part.change(edit, task=f"gates, {name}")
        data[f"gate_change_{name}"] = (), float(change.value)
        data[f"gate_change_{name}_se"] = (), float(change.se)
    return xr.Dataset(data, coords={"layer": np.arange(view.n_layers)})
