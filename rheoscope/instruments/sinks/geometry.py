"""Geometry of one window at one layer: can some bilinear score single out the sink key?

It can exactly where all tokens lie in an open half-space and the sink is outside the hull of the others.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from torch import Tensor

from rheoscope.theory.half_space import distance_to_others, half_space_margin


def sink_geometry(streams: list[Float[Tensor, "token d_model"] | None], key: int) -> dict[str, np.ndarray]:
    """Cosines to the sink, half-space margin, and distance of the sink to the hull of the other tokens, by stream.

    The distance is relative to the root mean square distance to the others, so in [0, 1]. NaN for a stream that the
    model does not have; nothing where it has none.
    """
    rows = [{} if stream is None else _geometry(stream.double().cpu().numpy(), key) for stream in streams]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name, np.nan) for row in rows]) for name in names}


def _geometry(x: Float[np.ndarray, "token d_model"], key: int) -> dict[str, float]:
    sink, others = x[key], np.delete(x, key, axis=0)
    lengths = np.linalg.norm(others, axis=1) * np.linalg.norm(sink)
    cosines = (others @ sink) / np.where(lengths > 0, lengths, np.nan)
    away = np.sqrt(((others - sink) ** 2).sum(1).mean())
    distance = distance_to_others(sink, others) / away if away > 0 else np.nan
    return {
        "sink_cosine_mean": float(np.nanmean(cosines)) if np.isfinite(cosines).any() else np.nan,
        "sink_cosine_max": float(np.nanmax(cosines)) if np.isfinite(cosines).any() else np.nan,
        "sink_cosine_nonpositive": float(np.mean(cosines <= 0)),
        "half_space_margin": half_space_margin(x),
        "sink_hull_distance": distance,
        "sink_outside_hull": np.nan if np.isnan(distance) else float(distance > 0),
    }
