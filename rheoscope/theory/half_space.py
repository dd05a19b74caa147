"""Half-spaces and hulls: how far the origin lies from the convex hull of some points, with a certificate.

The distance of the origin to conv{p_j} equals the half-space margin max_{‖a‖=1} min_j a·p_j where that is positive:
the nearest point of the hull is the best direction. So one solver answers both questions of docs/sinks.md §2.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float64
from scipy.optimize import nnls

INSIDE = 1e-7  # distance, relative to the largest point, below which the origin counts as inside the hull
GAP = 1e-6  # largest difference of the bounds from both sides, on the same scale, of a solution that counts
FEW = 2  # points per dimension that are solved for at a time, where there are more than twice as many
ROUNDS = 100  # far more than are ever needed; what is open then is seen in the gap
STEPS = 10  # of the active set per point, before the solver is said not to converge


class HullDistance(NamedTuple):
    """Distance of the origin to a convex hull, the unit direction of the nearest point, and the error that is left.

    distance: 0 where the origin is inside; NaN, like the direction, where the solver did not converge.
    gap: upper minus lower bound, relative to the largest point.
    """

    distance: float
    direction: Float64[np.ndarray, " d"]
    gap: float


def hull_distance(points: Float[np.ndarray, "point d"]) -> HullDistance:
    """Distance of the origin to the convex hull of the points: the nearest point by non-negative least squares.

    Minimises ‖Pᵀw‖² + (Σw - 1)² over w >= 0, with P scaled to a largest point of 1. For a fixed Σw the least value is
    (Σw)² times the squared distance, so w / Σw is the nearest point. It is an upper bound; min_j p_j·p / ‖p‖ is a
    lower one. NaN where no point is given or the two disagree by more than GAP.
    """
    points = np.asarray(points, np.float64)
    size = float(np.linalg.norm(points, axis=1).max(initial=0.0))
    nowhere = np.full(points.shape[1], np.nan)
    if not len(points) or not np.isfinite(size):
        return HullDistance(np.nan, nowhere, np.nan)
    if size == 0:
        return HullDistance(0.0, nowhere, 0.0)
    scaled = points / size
    try:
        nearest = _nearest(scaled)
    except RuntimeError:  # the active set did not settle
        return HullDistance(np.nan, nowhere, np.inf)
    distance = float(np.linalg.norm(nearest))
    if distance < INSIDE:
        return HullDistance(0.0, nowhere, distance)
    direction = nearest / distance
    gap = distance - float((scaled @ direction).min())
    if gap > GAP:
        return HullDistance(np.nan, nowhere, gap)
    return HullDistance(distance * size, direction, gap)


def _nearest(points: Float64[np.ndarray, "point d"]) -> Float64[np.ndarray, " d"]:
    """The nearest point of the hull. Of many points some are solved for, until none of the others is nearer.

    After each round the points that carry the solution stay, and those that lie farthest on its near side join them.
    """
    few = FEW * points.shape[1]
    working = np.unique(np.linspace(0, len(points) - 1, few).round().astype(int)) if len(points) > 2 * few else None
    if working is None:
        return _nearest_of(points)[0]
    for _ in range(ROUNDS):
        nearest, weights = _nearest_of(points[working])
        behind = nearest @ nearest - points @ nearest  # above 0: on the near side of the plane through the solution
        if np.linalg.norm(nearest) < INSIDE or behind.max() <= GAP / 10 * np.linalg.norm(nearest):
            break
        worst = np.argsort(-behind)[: few // 2]
        working = np.union1d(working[weights > 0], worst[behind[worst] > 0])
    return nearest


def _nearest_of(points: Float64[np.ndarray, "point d"]) -> tuple[np.ndarray, np.ndarray]:
    """The nearest point of the hull, and the weight of each point in it."""
    system = np.vstack([points.T, np.ones(len(points))])
    target = np.append(np.zeros(points.shape[1]), 1.0)
    weights, _ = nnls(system, target, maxiter=STEPS * len(points))
    return points.T @ (weights / weights.sum()), weights


def half_space_margin(vectors: Float[np.ndarray, "vector d"]) -> float:
    """Margin max_a min_j a·x_j / ‖x_j‖ over unit a: above 0 where all vectors lie in one open half-space.

    Unit 1, in [0, 1]; 0 where no half-space holds them; NaN for a zero vector or a solver that did not converge.
    """
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not (lengths > 0).all():
        return np.nan
    return hull_distance(vectors / lengths).distance


def distance_to_others(key: Float[np.ndarray, " d"], others: Float[np.ndarray, "other d"]) -> float:
    """Distance of one key to the convex hull of the others: 0 where it is a mixture of them, and so no sink can be."""
    return hull_distance(np.asarray(others, np.float64) - key).distance


def represents_a_sink(
    queries: Float[np.ndarray, "query d"], sink: Float[np.ndarray, " d"], others: Float[np.ndarray, "other d"]
) -> bool:
    """Whether some bilinear form gives every query more score at the sink than at any other key.

    It does exactly where the queries lie in an open half-space and the sink is outside the hull of the other keys.
    """
    return half_space_margin(queries) > 0 and distance_to_others(sink, others) > 0
