"""Catalogue rows of the routing dataset: what attention scores are made of.

For one head and one document M is the table of scores s q_i·k_j before the mask, S = (M - Mᵀ)/2 its routing part
and F = (M + Mᵀ)/2 its filtering part.
"""

from __future__ import annotations

from rheoscope.instruments.catalog.quantity import Quantity

PAPER = "arXiv 2605.18826"
OURS = "this project"
_INF = float("inf")
_HEADS = ("layer", "head")
_SHARE, _RANK, _GROWTH = (0.0, 1.0), (2.0, _INF), (-_INF, _INF)
_DIRECTIONS = "directions"

_PARTS = {  # symbol, name, plain word; for the scores of the data and for the weights' own W_QK
    "routing": ("S", "skew W_QK", "routing", "one-way part"),
    "filtering": ("F", "sym W_QK", "filtering", "two-way part"),
    "score": ("M", "W_QK", "whole score", "whole"),
}


def _row(name: str, unit: str, long_name: str, caption: str, equation: str, **more) -> Quantity:
    fields = {"dims": _HEADS, "bounds": None, "source": PAPER} | more
    return Quantity(
        name=name, instrument="routing", unit=unit, long_name=long_name, caption=caption, equation=equation, **fields
    )


def _ranks(part: str, *, prefix: str = "", suffix: str = "") -> list[Quantity]:
    """Rows of the five ways to count the directions of one part: of the data, of the weights, or less its key bias."""
    data_symbol, weights_symbol, short, words = _PARTS[part]
    symbol, where, what, note = data_symbol, "", f"{words} of the scores", ""
    if prefix:
        symbol, where, what = weights_symbol, ", weights alone", f"{words} of the weights' own score, whatever the text"
    if suffix:
        symbol, where, what = f"{data_symbol}′", ", key bias removed", f"{what} once its bias per key is taken out"
        note = ". S′ = S - (f_i - f_j), f = row mean of S"
    pairs = " They come in pairs: 2 is the least." if part == "routing" else ""
    bounds = (2.0 if part == "routing" else 1.0, _INF)
    source = OURS if suffix else PAPER
    rows = [
        _row(
            f"{prefix}{part}_k{level}{suffix}",
            _DIRECTIONS,
            f"{short} rank k{level}{where}",
            f"How many directions hold {level} % of the {what}.{pairs}",
            f"least k with Σ_(n≤k) σ_n²({symbol}) ≥ {level / 100:g} Σ σ_n²({symbol}){note}",
            bounds=bounds,
            source=source,
            summary="median" if (prefix, part, level, suffix) == ("", "routing", 90, "") else "",
        )
        for level in (90, 95, 99)
    ]
    entropy = _row(
        f"{prefix}{part}_entropy_rank{suffix}",
        _DIRECTIONS,
        f"{short} entropy rank{where}",
        f"How many directions of equal strength would be as spread out as the {what}.{pairs}",
        f"exp(-Σ p_n log p_n), p = σ²({symbol}) / Σ σ²({symbol}){note}",
        bounds=bounds,
        source=source,
    )
    participation = _row(
        f"{prefix}{part}_participation{suffix}",
        _DIRECTIONS,
        f"{short} participation ratio{where}",
        f"How many directions take part in the {what}, strong ones counting for more.{pairs}",
        f"(Σ σ²({symbol}))² / Σ σ⁴({symbol}){note}",
        bounds=bounds,
        source=source,
    )
    return [*rows, entropy, participation]


_SHARES = (
    _row(
        "routing_share",
        "1",
        "routing share",
        "How much of a head's score is one-way: the part that changes sign when two positions swap places. 0: every "
        "pair scores each other alike. 0.5: what unrelated random queries and keys give. 1: purely one-way.",
        "‖S‖² / ‖M‖²",
        bounds=_SHARE,
        summary="median",
    ),
    _row(
        "diagonal_share",
        "1",
        "diagonal share",
        "How much of a head's score lies where a position scores itself.",
        "Σ_i M_ii² / ‖M‖²",
        bounds=_SHARE,
    ),
    _row(
        "gauge_share",
        "1",
        "key-bias share of routing",
        "How much of the one-way part only says that some keys count more than others, alike for every query. Softmax "
        "ignores the rest of that pattern, so near 1 a head marks important positions and hardly routes between pairs.",
        "‖f_i - f_j‖² / ‖S‖², f = row mean of S",
        bounds=_SHARE,
        summary="median",
        source=OURS,
    ),
)

_CAPACITY = (
    _row(
        "capacity",
        _DIRECTIONS,
        "routing capacity",
        "The most directions that a head of this width can use for routing: twice its width.",
        "2 d_head, or the length of a window where that is shorter",
        dims=("layer",),
        bounds=_RANK,
    ),
    _row(
        "utilisation",
        "1",
        "share of capacity used",
        "How much of that capacity the text makes a head use.",
        "k90(S) / min(capacity, tokens of the window)",
        bounds=_SHARE,
        summary="median",
    ),
    _row(
        "routing_k90_median",
        _DIRECTIONS,
        "routing rank k90, median head",
        "The routing rank of a layer: half of its heads use fewer directions, half use more.",
        "median of k90(S) over heads and sampled windows",
        dims=("layer",),
        bounds=_RANK,
    ),
    _row(
        "minimal_rank_share",
        "1",
        "layers at the minimal rank",
        "The fraction of layers whose median head routes in a single pair of directions, the least there can be.",
        "fraction of layers with median k90(S) = 2",
        dims=(),
        bounds=_SHARE,
        summary="value",
    ),
)

_STABILITY = (
    _row(
        "stability_max_re",
        "logits",
        "largest growth rate",
        "The largest real part among the eigenvalues of the unmasked score table. Above 0 the head on its own would "
        "amplify some pattern over positions.",
        "max Re λ(M), from the eigenvalues of s KᵀQ",
        bounds=_GROWTH,
    ),
    _row(
        "stability_share_positive",
        "1",
        "share of growing directions",
        "How many of a head's directions would grow (Re λ > 0) rather than fade. A random matrix has about half.",
        "fraction of the nonzero λ(M) with Re λ > 0",
        bounds=_SHARE,
        summary="median",
    ),
    _row(
        "eigenvalues_re",
        "logits",
        "growth rate Re λ",
        "Real parts of the eigenvalues of the unmasked score table of one example document: above 0 a direction grows, "
        "below 0 it fades. Their size grows with the length of the document.",
        "Re λ(s KᵀQ)",
        dims=("layer", "head", "component"),
        bounds=_GROWTH,
    ),
    _row(
        "eigenvalues_im",
        "logits",
        "rotation rate Im λ",
        "Imaginary parts of the same eigenvalues: how fast a direction turns into another, which is what routing does.",
        "Im λ(s KᵀQ)",
        dims=("layer", "head", "component"),
        bounds=_GROWTH,
    ),
)

_BY_LAG = (
    _row(
        "routing_share_by_lag",
        "1",
        "routing share at a distance",
        "Among pairs of positions this far apart, how much of the score is one-way.",
        "Σ_(|i-j|=lag) S_ij² / Σ_(|i-j|=lag) M_ij²",
        dims=("layer", "lag"),
        bounds=_SHARE,
        source=OURS,
    ),
    _row(
        "kernel_routing_share",
        "1",
        "routing share, weights alone",
        "How much of the weights' own score W_Q W_Kᵀ is one-way, whatever text comes in. Where positions are encoded "
        "by rotation this holds at distance 0 only.",
        "‖skew W_QK‖² / ‖W_QK‖², W_QK = W_Q W_Kᵀ",
        bounds=_SHARE,
    ),
    _row(
        "kernel_routing_share_by_lag",
        "1",
        "routing share of the weights at a distance",
        "The same with the rotation that encodes this distance between query and key. It can grow with distance by the "
        "rotation alone, even where queries and keys are alike.",
        "‖skew W_Q R_lag W_Kᵀ‖² / ‖W_Q R_lag W_Kᵀ‖²",
        dims=("layer", "head", "lag"),
        bounds=_SHARE,
        source=OURS,
    ),
    _row(
        "kernel_routing_share_averaged",
        "1",
        "routing share of the weights, at the distances attended",
        "The share at each distance, each weighted by how much attention the head really gives to that distance.",
        "Σ_lag p ‖skew W_Q R_lag W_Kᵀ‖² / Σ_lag p ‖W_Q R_lag W_Kᵀ‖², p = share of attention at this lag",
        bounds=_SHARE,
        source=OURS,
        summary="median",
    ),
)

ROUTING: tuple[Quantity, ...] = (
    *_SHARES,
    *(row for part in _PARTS for row in _ranks(part)),
    *_ranks("routing", suffix="_gauge_removed"),
    *_CAPACITY,
    *_STABILITY,
    *_BY_LAG,
    *(row for part in _PARTS for row in _ranks(part, prefix="kernel_")),
)
