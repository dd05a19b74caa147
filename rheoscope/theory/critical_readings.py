"""The critical directions of one layer of a model, their stability, and the same by chance: a run with one dataset."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from rheoscope.corpus import Corpus
from rheoscope.errors import RheoscopeError
from rheoscope.instruments.catalog import describe
from rheoscope.instruments.measure import provenance
from rheoscope.models.field import refuse_field
from rheoscope.models.view import ModelView
from rheoscope.run import Run
from rheoscope.theory.criticals import KINDS, Criticals, Field, Stability, find_criticals, stability
from rheoscope.theory.layer_fields import FIELDS, layer_field, random_directions, shuffled_ffn, starts
from rheoscope.theory.portraits import portrait

NAME = "criticals"
N_DIRECTIONS = 12  # random directions whose spectra are the null
N_PORTRAITS = 3
APART = 0.9  # largest |cos| of two directions that span a portrait


def criticals(
    view: ModelView,
    corpus: Corpus,
    *,
    layer: int,
    n_starts: int = 40,
    n_steps: int = 40,
    strength: float = 1.0,
    seed: int = 0,
    command: Sequence[str] = (),
) -> Run:
    """Critical directions of a layer's FFN, of its attention and of both, from 3 x n_starts starts each.

    Beside the counts by kind: those of random directions, which are not critical, and of critical directions of the
    same layer with shuffled FFN weights. Portraits hold the first of the full field. Raises Refused where attention is
    no linear map of a direction, RheoscopeError for a layer that is not there.
    """
    started = time.monotonic()
    refuse_field(view, "critical directions")
    if not 0 <= layer < view.n_layers:
        raise RheoscopeError(f"layer {layer} asked for; the model has layers 0 to {view.n_layers - 1}")
    begin, radius = starts(view, layer, corpus, n=n_starts, seed=seed)
    rows: list[dict[str, Any]] = []
    for which in FIELDS:
        field = layer_field(view, layer, which, radius=radius, strength=strength)
        found = find_criticals(field, begin, n_steps=n_steps)
        row = _counts(found, stability(field, found.u) if len(found.u) else None)
        drawn = stability(field, random_directions(view, min(n_starts, N_DIRECTIONS), seed=seed + 1))
        row["critical_kind_share_null_directions"] = _shares(drawn)
        row["critical_rising_share_null_directions"] = float((drawn.eigenvalues.real > 0).double().mean())
        if which != "attention only":
            with shuffled_ffn(view, layer, seed=seed):
                chance = find_criticals(field, begin, n_steps=n_steps)
                kinds = stability(field, chance.u) if len(chance.u) else None
            row["critical_kind_share_null_weights"] = _shares(kinds)
            row["critical_distinct_null_weights"] = len(chance.u)
        rows.append(row)
    data = _dataset(rows, found, field)
    data.attrs = {"n": len(begin), "layer": layer, "radius": radius}
    config = {
        "criticals": {"layer": layer, "n_starts": n_starts, "n_steps": n_steps, "strength": strength},
        "seed": seed,
        "command": shlex.join(command),
    }
    return Run.of({NAME: describe(data, NAME)}, provenance(view, corpus, config, seconds=time.monotonic() - started))


def _counts(found: Criticals, kinds: Stability | None) -> dict[str, Any]:
    """What is said of the critical directions of one field."""
    rotational = float(kinds.rotational.double().mean()) if kinds else float("nan")
    rising = (kinds.eigenvalues.real > 0).double().mean(-1).cpu().numpy() if kinds else np.zeros(0)
    return {
        "critical_converged": found.n_converged,
        "critical_distinct": len(found.u),
        "critical_kind_share": _shares(kinds),
        "critical_rotational_share": rotational,
        "critical_score": found.score.double().cpu().numpy(),
        "critical_rising_share": rising,
    }


def _shares(kinds: Stability | None) -> np.ndarray:
    """Share of each kind; NaN where there is no direction."""
    if kinds is None:
        return np.full(len(KINDS), np.nan)
    return np.array([np.mean([kind == name for kind in kinds.kinds]) for name in KINDS])


def _dataset(rows: list[dict[str, Any]], found: Criticals, field: Field) -> xr.Dataset:
    data: dict[str, Any] = {}
    n_points = max((len(row["critical_score"]) for row in rows), default=0)
    for name in dict.fromkeys(name for row in rows for name in row):
        first = next(row[name] for row in rows if name in row)
        if name in ("critical_score", "critical_rising_share"):
            padded = [np.pad(row[name], (0, n_points - len(row[name])), constant_values=np.nan) for row in rows]
            data[name] = ("field", "point"), np.stack(padded)
        elif np.ndim(first):
            data[name] = ("field", "kind"), np.stack([row.get(name, np.full(len(KINDS), np.nan)) for row in rows])
        else:
            data[name] = ("field",), np.array([row.get(name, np.nan) for row in rows], np.float64)
    data |= _portraits(found.u, field)
    return xr.Dataset(data, coords={"field": list(FIELDS), "kind": list(KINDS), "point": np.arange(n_points)})


def _portraits(u: Tensor, field: Field) -> dict[str, Any]:
    """Slices through pairs of critical directions of the full field; the second axis leads to a third, or anywhere."""
    others = torch.randn(u.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(u)
    drawn = []
    for first in range(len(u)):
        near = (u @ u[first]).abs()
        apart = [k for k in range(first + 1, len(u)) if near[k] < APART]
        if apart and len(drawn) < N_PORTRAITS:
            second = apart[0]
            thirds = [k for k in apart[1:] if float((u[k] @ u[second]).abs()) < APART]
            drawn.append(portrait(field, u[first], u[second], u[thirds[0]] if thirds else others[first]))
    if not drawn:
        return {}
    stacked = {name: torch.stack([slice_[name] for slice_ in drawn]).double().cpu().numpy() for name in drawn[0]}
    return {f"portrait_{name}": (("slice", "grid_row", "grid_column"), values) for name, values in stacked.items()}
