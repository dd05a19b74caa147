"""Catalogue rows of the steering dataset: what one layer does to the directions and lengths of the stream.

A layer takes x to x⁺ = x + A + F; A is written by attention, F = Φ(x + A) by the feed-forward network (Φ(x) in parallel
blocks). u = x/‖x‖, P_x v = v - <u, v> u, Δu = u⁺ - u. Means are over all tokens but the first of each window.
"""

from __future__ import annotations

from dataclasses import replace

from rheoscope.instruments.catalog.quantity import Quantity

PAPER = "arXiv 2608.02071"
OURS = "this project"
_LAYER = ("layer",)
_SHARE, _DEFICIT, _ANGLE, _LENGTH = (0.0, 1.0), (0.0, 2.0), (0.0, 180.0), (0.0, float("inf"))


def _row(name: str, long_name: str, caption: str, equation: str, **more) -> Quantity:
    fields = {"dims": _LAYER, "unit": "1", "bounds": None, "source": PAPER} | more
    return Quantity(name=name, instrument="steering", long_name=long_name, caption=caption, equation=equation, **fields)


_DEFICITS = (
    _row(
        "angular_deficit",
        "angular deficit of attention",
        "How far the turn that attention alone would give a token is from the turn that the whole layer gives it. "
        "0: attention decides the direction, 1: it has no say, 2: the feed-forward network turns the token back.",
        "D_A = 1 - cos(P_x A, P_x Δu)",
        bounds=_DEFICIT,
    ),
    _row(
        "angular_deficit_chord",
        "angular deficit of attention, chord",
        "The same, against the straight line between the two directions; a long turn counts as a deficit by itself.",
        "1 - cos(P_x A, Δu)",
        bounds=_DEFICIT,
        source=OURS,
    ),
    _row(
        "ffn_deficit",
        "angular deficit of the FFN",
        "How far the turn that the feed-forward network alone would give a token is from the turn of the whole layer.",
        "D_F = 1 - cos(P_x F, P_x Δu)",
        bounds=_DEFICIT,
    ),
    _row(
        "ffn_deficit_chord",
        "angular deficit of the FFN, chord",
        "The deficit of the feed-forward network against the straight line between the two directions.",
        "1 - cos(P_x F, Δu)",
        bounds=_DEFICIT,
        source=OURS,
    ),
)
_TREND = (
    _row(
        "angular_deficit_mean",
        "angular deficit of attention, all layers",
        "How much of the turning, over the whole depth, attention does not explain.",
        "mean of D_A over layers and tokens",
        dims=(),
        bounds=_DEFICIT,
        summary="value",
    ),
    _row(
        "angular_deficit_slope",
        "rise of the angular deficit over the depth",
        "What a straight line through the deficits of all layers rises by, from the first layer to the last. "
        "Above 0: the deeper, the more the feed-forward network steers.",
        "least-squares slope of D_A against layer / (layers - 1)",
        dims=(),
        source=OURS,
        summary="value",
    ),
)
_SHARES = (
    _row(
        "attention_radial_share",
        "radial share of attention",
        "How much of what attention writes only makes the token longer or shorter; the rest turns it.",
        "<u, A>² / ‖A‖²",
        bounds=_SHARE,
    ),
    _row(
        "ffn_radial_share",
        "radial share of the FFN",
        "How much of what the feed-forward network writes only makes the token longer or shorter; the rest turns it.",
        "<u, F>² / ‖F‖², u the direction of what the network reads",
        bounds=_SHARE,
    ),
)
_SIZES = (
    _row("resid_norm", "length of the stream", "How long a token's vector is before the layer.", "‖x‖", bounds=_LENGTH),
    _row("attention_norm", "length of what attention writes", "How much attention writes.", "‖A‖", bounds=_LENGTH),
    _row(
        "ffn_norm", "length of what the FFN writes", "How much the feed-forward network writes.", "‖F‖", bounds=_LENGTH
    ),
    _row(
        "turning",
        "turn of the layer",
        "By what angle the whole layer turns a token.",
        "angle(u, u⁺)",
        unit="degrees",
        bounds=_ANGLE,
    ),
    _row(
        "turning_attention",
        "turn by attention",
        "By what angle a token turns when attention writes into it.",
        "angle(x, x + A)",
        unit="degrees",
        bounds=_ANGLE,
    ),
    _row(
        "turning_ffn",
        "turn by the FFN",
        "By what angle a token turns when the feed-forward network writes into it, after attention has.",
        "angle(x + A, x⁺)",
        unit="degrees",
        bounds=_ANGLE,
    ),
)
_DIVERSITIES = (
    _row(
        "diversity_pre",
        "diversity before attention",
        "How far the tokens of a window point in different ways. 0: all point one way, as in rank collapse; near 1: "
        "they cancel out.",
        "D = 1 - ‖mean of u‖² = (n - 1)/n · (1 - mean cosine of two tokens)",
        bounds=_SHARE,
    ),
    _row(
        "diversity_mid",
        "diversity after attention",
        "How far the tokens point in different ways once attention has written into them.",
        "D of x + A",
        bounds=_SHARE,
    ),
    _row(
        "diversity_post",
        "diversity after the FFN",
        "How far the tokens point in different ways when they leave the layer.",
        "D of x⁺",
        bounds=_SHARE,
    ),
    _row(
        "diversity_change_attention",
        "change of diversity by attention",
        "Below 0: attention pulls the tokens together.",
        "D(x + A) - D(x)",
        bounds=(-1.0, 1.0),
    ),
    _row(
        "diversity_change_ffn",
        "change of diversity by the FFN",
        "Above 0: the feed-forward network drives the tokens apart.",
        "D(x⁺) - D(x + A)",
        bounds=(-1.0, 1.0),
    ),
)
_DEFECTS = (
    _row(
        "defect",
        "defect of running in parallel",
        "How much the feed-forward network's answer changes when it does not see what attention of the same layer has "
        "written. 0: the two could run side by side and nothing would change.",
        "C = mean of ‖Φ(x + A) - Φ(x)‖ / (‖Φ(x)‖ + 10⁻⁶), on sampled positions",
        bounds=_LENGTH,
        summary="median",
    ),
    _row(
        "defect_ratio",
        "defect, ratio of means",
        "The same with both lengths averaged first, so that tokens with a small answer do not count for more.",
        "mean ‖Φ(x + A) - Φ(x)‖ / mean ‖Φ(x)‖",
        bounds=_LENGTH,
        source=OURS,
    ),
    _row(
        "defect_displacement",
        "displacement by running in parallel",
        "By how much of its length a token would leave the layer elsewhere if the feed-forward network did not see what"
        " attention has written. A large defect of a network that writes little displaces little.",
        "mean of ‖Φ(x + A) - Φ(x)‖ / ‖x⁺‖, on sampled positions",
        bounds=_LENGTH,
        source=OURS,
    ),
    _row(
        "defect_first_order",
        "defect, first order",
        "What the defect would be were the feed-forward network linear around the token.",
        "mean of ‖DΦ(x) A‖ / (‖Φ(x)‖ + 10⁻⁶), by forward differentiation, on a few windows",
        bounds=_LENGTH,
    ),
    _row(
        "defect_same_tokens",
        "defect on the tokens of its first-order form",
        "The defect itself on the few windows that its first-order form was read on.",
        "C on those windows",
        bounds=_LENGTH,
        source=OURS,
    ),
)
_REST = (
    _row(
        "top_k_cosine",
        "share of attention's output in its largest weights",
        "How near the output of attention stays when each token keeps only the few largest of its attention weights "
        "(16 unless the options say otherwise). 1: the others do not matter.",
        "cos(A from the k largest weights of each row, renormalised; A), before post-norms",
        bounds=(-1.0, 1.0),
    ),
    _row(
        "resid_sum_error",
        "error of x + A + F",
        "A check of the readings: how far the three parts read are from the stream the model hands on, at worst.",
        "max over tokens ‖x + A + F - x⁺‖ / ‖x⁺‖",
        bounds=_LENGTH,
        source=OURS,
    ),
)


def _with_first(row: Quantity) -> Quantity:
    """The row of the same reading with the first token of each window counted."""
    return replace(
        row,
        name=f"{row.name}_all",
        long_name=f"{row.long_name}, first token counted",
        caption=f"{row.caption} Here the first token of each window counts too, whose length dwarfs all others.",
        summary="",
    )


_BOTH_WAYS = (*_DEFICITS, *_SHARES, *_SIZES, *_DIVERSITIES, *_DEFECTS, _REST[0])
STEERING = (*_TREND, *_BOTH_WAYS, _REST[1], *map(_with_first, _BOTH_WAYS))
