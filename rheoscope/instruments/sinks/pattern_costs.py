"""What patterns cost: least norms on a layer's own tokens, and the norms that trained heads have."""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int

from rheoscope.linalg import kernel_factors, score_singular_values
from rheoscope.models.view import ModelView
from rheoscope.theory.costs import closed_form, diagonal_pattern, least_norm, sink_pattern, slope

SIZES = (4, 8, 16)  # tokens that a pattern is asked for at
PATTERNS = ("sink", "diagonal")


def least_pattern_costs(
    x: Float[np.ndarray, "token d_model"], tokens: Int[np.ndarray, " token"], sink: int
) -> dict[str, np.ndarray]:
    """Least nuclear norm of a score that shows each bare pattern with margin 1 on some tokens of a window.

    The tokens are the sink and others spread over the window, no two of one kind, scaled to a mean square length of 1
    so that orthonormal tokens compare. NaN where there are too few, or no score shows the pattern.
    """
    costs = np.full((len(PATTERNS), len(SIZES)), np.nan)
    for place, size in enumerate(SIZES):
        chosen = _distinct(tokens, sink, size)
        if chosen is None:
            continue
        rows = x[chosen] / np.sqrt((x[chosen] ** 2).sum(1).mean())
        reduced = np.linalg.qr(rows.T, mode="r").T  # a score outside the span of the tokens costs and does nothing
        for row, pattern in enumerate((sink_pattern, diagonal_pattern)):
            costs[row, place] = least_norm(pattern(reduced), "nuclear").value
    return {"pattern_cost": costs}


def pattern_slopes(costs: xr.DataArray) -> xr.Dataset:
    """Exponents of cost in the number of tokens with their standard errors, and the costs for orthonormal tokens."""
    found = [[_slope(costs.sel(layer=layer, pattern=pattern).values) for pattern in PATTERNS] for layer in costs.layer]
    orthonormal = [[closed_form(pattern, "nuclear", size) for size in SIZES] for pattern in PATTERNS]
    return xr.Dataset(
        {
            "pattern_slope": (("layer", "pattern"), np.array([[fit[0] for fit in row] for row in found])),
            "pattern_slope_se": (("layer", "pattern"), np.array([[fit[1] for fit in row] for row in found])),
            "pattern_cost_orthonormal": (("pattern", "size"), np.array(orthonormal)),
        }
    )


@torch.no_grad()
def head_costs(view: ModelView) -> xr.Dataset:
    """Frobenius and nuclear norm of W_QK and W_VO of every head, the gain of the norm before attention folded in.

    Through d_head x d_head factors. Raises Refused where weights are no plain numbers.
    """
    rows: dict[str, list[np.ndarray]] = {
        name: [] for name in ("qk_frobenius", "qk_nuclear", "vo_frobenius", "vo_nuclear")
    }
    for layer in range(view.n_layers):
        W_V = view.weights.gain(layer)[:, None] * view.weights.W_V(layer)
        for name, left, right in (("qk", *view.weights.kernel(layer)), ("vo", W_V, view.weights.W_O(layer).mT)):
            values = score_singular_values(kernel_factors(left, right))
            rows[f"{name}_frobenius"].append(values.square().sum(-1).sqrt().cpu().numpy())
            rows[f"{name}_nuclear"].append(values.sum(-1).cpu().numpy())
    return xr.Dataset({name: (("layer", "head"), np.stack(values)) for name, values in rows.items()})


def _distinct(tokens: np.ndarray, sink: int, size: int) -> np.ndarray | None:
    """Positions of the sink and of size - 1 other tokens spread over the window, no two alike; None for too few.

    Smaller choices are parts of the largest.
    """
    _, first = np.unique(tokens, return_index=True)
    others = np.sort(first[tokens[first] != tokens[sink]])
    for fewer in (SIZES[-1], size):
        if len(others) >= fewer - 1:
            others = others[np.linspace(0, len(others) - 1, fewer - 1).round().astype(int)]
    return np.concatenate([[sink], others]) if len(others) == size - 1 else None


def _slope(costs: np.ndarray) -> tuple[float, float]:
    known = np.isfinite(costs)
    if known.sum() < 2:
        return np.nan, np.nan
    fit = slope(np.array(SIZES)[known], costs[known])
    return fit.value, fit.se
