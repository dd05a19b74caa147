"""How long a head's output is, given how much attention is not on the sink: measured, and bounded from both sides.

With m_i the mass on other keys: ‖o_i‖ <= (1 - m_i) ‖z_sink‖ + m_i max ‖z_j‖ always. Where the other values lie in a
half-space of margin μ > 0 whose direction does not oppose the sink's value, also m_i μ <= ‖o_i‖. docs/sinks.md §4.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from rheoscope.theory.half_space import hull_distance

N_POINTS = 24  # queries of one window kept to be drawn
TOLERANCE = 1e-4  # of the largest value, for rounding in the model's float32


class OutputBounds(NamedTuple):
    """Readings per head, and per head and query for the points that are drawn, in units of the mean value length."""

    readings: dict[str, Float[np.ndarray, " head"]]
    points: dict[str, Float[np.ndarray, "head query"]]


def output_bounds(
    values: Float[Tensor, "head key d"],
    outputs: Float[Tensor, "head query d"],
    attended: Float[Tensor, "head query"],
    sinks: Int[Tensor, " head"],
) -> OutputBounds:
    """Outputs of every head between their bounds; values and outputs in coordinates that keep lengths and angles."""
    rows = [
        _of_head(*(part[head].double().cpu().numpy() for part in (values, outputs, attended)), sink=int(sinks[head]))
        for head in range(len(values))
    ]
    readings = {name: np.array([row[0][name] for row in rows]) for name in rows[0][0]}
    points = {name: np.stack([row[1][name] for row in rows]) for name in rows[0][1]}
    return OutputBounds(readings, points)


def _of_head(
    z: Float[np.ndarray, "key d"], o: Float[np.ndarray, "query d"], attended: Float[np.ndarray, " query"], *, sink: int
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    others = np.delete(z, sink, axis=0)
    lengths = np.linalg.norm(others, axis=1)
    margin = hull_distance(others)
    assumption = margin.distance > 0 and float(margin.direction @ z[sink]) >= 0
    queries = np.arange(sink, len(o))
    free = np.clip(1 - attended[queries], 0, 1)
    length = np.linalg.norm(o[queries], axis=1)
    upper = (1 - free) * np.linalg.norm(z[sink]) + free * lengths.max()
    lower = free * margin.distance if assumption else np.full(len(queries), np.nan)
    slack = TOLERANCE * max(lengths.max(), np.linalg.norm(z[sink]))
    broken = (length > upper + slack) | (length < lower - slack)
    unit = lengths.mean() if lengths.mean() > 0 else np.nan
    readings = {
        "value_margin": margin.distance / unit,
        "bound_assumption_share": np.nan if np.isnan(margin.distance) else float(assumption),
        "bound_violations": float(broken.mean()),
    }
    chosen = np.linspace(0, len(queries) - 1, N_POINTS).round().astype(int)
    drawn = {
        "free_mass": free,
        "output_norm": length / unit,
        "output_lower": lower / unit,
        "output_upper": upper / unit,
    }
    return readings, {name: value[chosen] for name, value in drawn.items()}
