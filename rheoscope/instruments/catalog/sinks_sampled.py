"""Catalogue rows of the sinks dataset that come from sampled windows: values, geometry, smoothing."""

from __future__ import annotations

from rheoscope.instruments.catalog.quantity import Quantity
from rheoscope.instruments.catalog.sinks_row import ANY as _ANY
from rheoscope.instruments.catalog.sinks_row import COSINE as _COSINE
from rheoscope.instruments.catalog.sinks_row import LAYER as _LAYER
from rheoscope.instruments.catalog.sinks_row import LENGTH as _LENGTH
from rheoscope.instruments.catalog.sinks_row import PAPER
from rheoscope.instruments.catalog.sinks_row import row as _row

_VALUES = (
    _row(
        "value_ratio",
        "length of the sink's value",
        "How much the sink writes if it gets all attention, beside what the other tokens would. A sink turns attention "
        "off only if this is small.",
        "‖z_sink‖ / mean_j ‖z_j‖, z_j = v_j W_O",
        bounds=_LENGTH,
        source=PAPER,
        summary="median",
    ),
    _row(
        "value_margin",
        "half-space margin of the values",
        "How far the values of the other tokens are from cancelling each other, beside their mean length. 0: some "
        "mixture of them is nothing.",
        "max_(‖a‖=1) min_(j≠sink) a·z_j / mean_j ‖z_j‖",
        bounds=_LENGTH,
    ),
    _row(
        "bound_assumption_share",
        "windows where the lower bound applies",
        "In how many sampled windows the other values lie in a half-space that does not oppose the sink's value.",
        "share of windows with μ > 0 and q·z_sink ≥ 0, q the best direction",
    ),
    _row(
        "bound_violations",
        "outputs outside their bounds",
        "At how many queries the length of the output breaks a bound that applies. Anything but 0 is a fault.",
        "share of queries with ‖o_i‖ outside [m_i μ, (1 - m_i) ‖z_sink‖ + m_i max ‖z_j‖], m_i = 1 - A(i, sink)",
    ),
    *(
        _row(name, long_name, caption, equation, dims=("layer", "head", "query"), bounds=_LENGTH)
        for name, long_name, caption, equation in (
            (
                "free_mass",
                "mass not on the sink",
                "How much attention a drawn query leaves for other keys than the sink.",
                "m_i = 1 - A(i, sink)",
            ),
            (
                "output_norm",
                "length of the output",
                "How much the head writes at a drawn query, beside the mean length of its values.",
                "‖o_i‖ / mean_j ‖z_j‖",
            ),
            (
                "output_lower",
                "lower bound of the output",
                "The least the head can write there; not defined where the values can cancel.",
                "m_i μ / mean_j ‖z_j‖",
            ),
            (
                "output_upper",
                "upper bound of the output",
                "The most the head can write there.",
                "((1 - m_i) ‖z_sink‖ + m_i max ‖z_j‖) / mean_j ‖z_j‖",
            ),
        )
    ),
)

_STREAM = {"dims": ("layer", "stream")}
_GEOMETRY = (
    _row(
        "sink_cosine_mean",
        "cosine to the sink, mean",
        "Which way the sink of the layer points, beside the other "
        "tokens. Below 0 it points away from them, which makes it easy to single out.",
        "mean_j cos(x_sink, x_j)",
        bounds=_COSINE,
        source=PAPER,
        **_STREAM,
    ),
    _row(
        "sink_cosine_max",
        "cosine to the sink, largest",
        "The token nearest in direction to the sink.",
        "max_j cos(x_sink, x_j)",
        bounds=_COSINE,
        source=PAPER,
        **_STREAM,
    ),
    _row(
        "sink_cosine_nonpositive",
        "tokens that point away from the sink",
        "How many tokens have no positive cosine to the sink.",
        "share of j with cos(x_sink, x_j) ≤ 0",
        source=PAPER,
        **_STREAM,
    ),
    _row(
        "half_space_margin",
        "half-space margin of the tokens",
        "How far all tokens lie on one side. Above 0 they can all be sent to one key by a single bilinear score.",
        "max_(‖a‖=1) min_j a·x_j / ‖x_j‖",
        **_STREAM,
    ),
    _row(
        "sink_hull_distance",
        "distance of the sink to the hull of the others",
        "How far the sink is from being a "
        "mixture of the other tokens, beside its mean distance to them. 0: no score can prefer it to all others.",
        "dist(x_sink, conv{x_j}) / rms_j ‖x_sink - x_j‖",
        **_STREAM,
    ),
    _row(
        "sink_outside_hull",
        "sink outside the hull",
        "In how many sampled windows the sink is no mixture of the other tokens.",
        "share of windows with a distance above 0",
        **_STREAM,
    ),
)

_SMOOTHING = (
    _row(
        "cosine_before",
        "cosine between tokens before attention",
        "How alike the tokens are that come into the layer; the first is left out.",
        "mean_(i≠j) cos(x_i, x_j)",
        dims=_LAYER,
        bounds=_COSINE,
        source=PAPER,
    ),
    _row(
        "cosine_after",
        "cosine between tokens after attention",
        "How alike they are once attention has added its part.",
        "mean_(i≠j) cos(y_i, y_j), y = x + attention",
        dims=_LAYER,
        bounds=_COSINE,
        source=PAPER,
    ),
    _row(
        "cosine_measured",
        "cosine after attention of a given density",
        "How alike the tokens would be if every head gave the share a evenly to all and the rest to the token itself.",
        "mean cosine of y with A_a = (1 - a) I + a U, U even over visible keys",
        dims=("layer", "mixing"),
        bounds=_COSINE,
    ),
    _row(
        "cosine_predicted",
        "cosine after attention of a given density, closed form",
        "The same from means and spreads alone.",
        "(M - D/(T - 1)) / (M + D)",
        dims=("layer", "mixing"),
        bounds=_COSINE,
    ),
    _row(
        "dense_gain",
        "smoothing by density",
        "Above 0, even attention leaves less spread between tokens than attention to oneself: denser is smoother.",
        "(2 tr C(x, u) + tr C(u, u)) / tr C(x, x)",
        dims=_LAYER,
        bounds=_ANY,
    ),
    _row(
        "mean_gain",
        "growth of the mean token",
        "Above 1, one even step makes tokens more alike than they came in.",
        "‖x̄ + b + ū‖ / ‖x̄‖",
        dims=_LAYER,
        bounds=_LENGTH,
    ),
    _row(
        "density_correlation",
        "correlation of density and smoothing",
        "Whether queries that attend more evenly are those that grow more like the others in the natural step.",
        "corr_i(1 / (n_i Σ_j A(i, j)²), change of mean_j cos(y_i, y_j))",
        dims=_LAYER,
        bounds=_COSINE,
    ),
)

_NORMS = {
    "frobenius": ("Frobenius", "how large it is", "sqrt(Σ σ²)"),
    "nuclear": ("nuclear", "what weight decay charges", "Σ σ"),
}
_MATRICES = {"qk": ("W_QK", "score"), "vo": ("W_VO", "value map")}
_COSTS = (
    _row(
        "pattern_cost",
        "least cost of a pattern",
        "The least nuclear norm of a score that shows the pattern with margin 1 on this layer's own tokens, scaled to "
        "length 1. Weight decay on queries and keys charges twice this norm.",
        "min ‖M‖_* with x_i M (x_target - x_j) ≥ 1",
        dims=("layer", "pattern", "size"),
        bounds=_LENGTH,
    ),
    _row(
        "pattern_cost_orthonormal",
        "least cost of a pattern, orthonormal tokens",
        "The same for tokens that have nothing in common.",
        "sink sqrt(T - 1), diagonal T - 1",
        dims=("pattern", "size"),
        bounds=_LENGTH,
    ),
    _row(
        "pattern_slope",
        "growth of the cost with the number of tokens",
        "Exponent by which a pattern grows dearer with more tokens. For orthonormal tokens that of the diagonal is "
        "larger by 1/2.",
        "slope of log cost against log T",
        dims=("layer", "pattern"),
        bounds=_ANY,
    ),
    *(
        _row(
            f"{matrix}_{norm}",
            f"{kind} norm of the {what}",
            f"{kind} norm of a trained head's {what}, {words}.",
            f"{formula} of {symbol}, norm gain folded in",
            bounds=_LENGTH,
        )
        for matrix, (symbol, what) in _MATRICES.items()
        for norm, (kind, words, formula) in _NORMS.items()
    ),
)

SINK_SAMPLES: tuple[Quantity, ...] = (*_VALUES, *_GEOMETRY, *_SMOOTHING, *_COSTS)
