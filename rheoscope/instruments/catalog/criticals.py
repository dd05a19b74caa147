"""Catalogue rows of the criticals dataset: directions that a layer's flow leaves alone, and how stable they are."""

from __future__ import annotations

from rheoscope.instruments.catalog.quantity import Quantity

PAPER = "arXiv 2608.02071"
OURS = "this project"
_SHARE, _COUNT = (0.0, 1.0), (0.0, float("inf"))

CRITICAL_DIMENSIONS: dict[str, tuple[str, str]] = {
    "field": ("1", "what moves the directions"),
    "kind": ("1", "kind of critical direction"),
    "point": ("1", "critical direction, best first"),
    "slice": ("1", "portrait, counted from 0"),
    "grid_row": ("1", "row of the portrait"),
    "grid_column": ("1", "column of the portrait"),
}


def _row(name: str, dims: tuple[str, ...], long_name: str, caption: str, equation: str, **more) -> Quantity:
    fields = {"unit": "1", "bounds": None, "source": PAPER} | more
    return Quantity(
        name=name, instrument="criticals", dims=dims, long_name=long_name, caption=caption, equation=equation, **fields
    )


def _portrait(name: str, long_name: str, caption: str, equation: str, **more) -> Quantity:
    dims = ("slice", "grid_row", "grid_column")
    return _row(f"portrait_{name}", dims, long_name, caption, equation, source=OURS, **more)


CRITICALS = (
    _row(
        "critical_converged",
        ("field",),
        "starts that reached a critical direction",
        "From how many starts the search came to a direction that the flow leaves alone.",
        "number of starts with ‖P_u F‖ / ‖F‖ ≤ 0.05",
        bounds=_COUNT,
    ),
    _row(
        "critical_distinct",
        ("field",),
        "critical directions found",
        "How many of these directions differ; a direction and its opposite are two.",
        "number of classes with cos ≤ 0.99 between them",
        bounds=_COUNT,
    ),
    _row(
        "critical_kind_share",
        ("field", "kind"),
        "share of critical directions by kind",
        "Nearby tokens come to an attractor, leave a repeller, and do both at a saddle. In many dimensions almost any "
        "direction is a saddle by chance, so look at the share among random directions beside it.",
        "signs of the real parts of the eigenvalues of P(V + αDΦ - ρI) on the tangent space",
        bounds=_SHARE,
    ),
    _row(
        "critical_rotational_share",
        ("field",),
        "share of rotational critical directions",
        "Around how many of the critical directions the flow also circles.",
        "share with max|Im λ| > 0.1 max|λ|",
        bounds=_SHARE,
    ),
    _row(
        "critical_score",
        ("field", "point"),
        "zero score",
        "How far the field is from pointing along the direction. 0: exactly critical.",
        "‖P_u F‖ / ‖F‖",
        bounds=_SHARE,
    ),
    _row(
        "critical_rising_share",
        ("field", "point"),
        "share of rising tangent directions",
        "Along how many of the ways away from it the flow leads off a critical direction. 0: attractor, 1: repeller.",
        "share of eigenvalues with Re λ > 0",
        bounds=_SHARE,
    ),
    _portrait("a", "first coordinate", "The first coordinate of a place in the slice.", "u ∝ u₁ + a e₁ + b e₂"),
    _portrait("b", "second coordinate", "The second coordinate of a place in the slice.", "u ∝ u₁ + a e₁ + b e₂"),
    _portrait("velocity_a", "velocity along the first", "How fast the flow moves a place to the right.", "da/dt"),
    _portrait("velocity_b", "velocity along the second", "How fast the flow moves a place upwards.", "db/dt"),
    _portrait(
        "score",
        "zero score in the slice",
        "How much of the field at a place of the slice turns the direction. 0: a critical direction.",
        "‖P_u F‖ / ‖F‖",
        bounds=_SHARE,
    ),
)
