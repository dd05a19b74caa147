"""What the report shows of steering: who turns the tokens, who stretches them, whether they draw together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from rheoscope.report.figures import Level, Line, by_depth, caption
from rheoscope.report.panels import Panel, Question, Section, View
from rheoscope.report.theme import tone
from rheoscope.report.words import median, number, percent, with_error

ATTENTION, FFN, WHOLE = "routing", "filtering", "score"


def with_errors(
    dataset: xr.Dataset, lines: Sequence[Line], *, axis: str = "", levels: Sequence[Level] = (), log: bool = False
) -> go.Figure:
    """Quantities by depth, every point with its standard error."""
    figure = by_depth(dataset, lines, axis=axis, levels=levels, log=log)
    drawn = {trace.name: trace for trace in figure.data}
    for line in lines:
        error = dataset.get(f"{line.name}_se")
        if error is not None and line.label in drawn:
            shown = {"type": "data", "array": error.values, "width": 0, "thickness": 1.2, "color": tone(line.tone)}
            drawn[line.label].error_y = shown
    return figure


def _pm(dataset: xr.Dataset, name: str) -> str:
    value, error = with_error(float(dataset[name]), float(dataset.get(f"{name}_se", np.nan)))
    return f"{value} ± {error}" if error else value


def _turning(dataset: xr.Dataset) -> Panel:
    projected = [Line("angular_deficit", "attention", ATTENTION), Line("ffn_deficit", "FFN", FFN)]
    chord = [Line("angular_deficit_chord", "attention", ATTENTION), Line("ffn_deficit_chord", "FFN", FFN)]
    turns = [
        Line("turning_attention", "attention", ATTENTION),
        Line("turning_ffn", "FFN", FFN),
        Line("turning", "whole layer", WHOLE),
    ]
    first = [Line("angular_deficit_all", "attention", ATTENTION), Line("ffn_deficit_all", "FFN", FFN)]
    right_angle = Level(1.0, "no say in the turn")
    views = (
        View(
            "Deficit",
            with_errors(dataset, projected, axis="angular deficit", levels=[right_angle]),
            caption(dataset, "angular_deficit"),
        ),
        View(
            "Chord",
            with_errors(dataset, chord, axis="angular deficit, chord"),
            caption(dataset, "angular_deficit_chord"),
        ),
        View(
            "With first token",
            with_errors(dataset, first, axis="angular deficit"),
            caption(dataset, "angular_deficit_all"),
        ),
        View("Angles", with_errors(dataset, turns, axis="turn (degrees)"), caption(dataset, "turning")),
    )
    slope = float(dataset.angular_deficit_slope)
    way = "rises" if slope > 0 else "falls"
    return Panel(
        title="Who turns the tokens, attention or the FFN?",
        answer=f"The turn that attention alone would give misses the layer's by {_pm(dataset, 'angular_deficit_mean')} "
        f"on average (0: attention decides, 1: no say). From the first layer to the last a straight line {way} by "
        f"{_pm(dataset, 'angular_deficit_slope').lstrip('-')}.",
        views=views,
        quantities=(
            "angular_deficit",
            "angular_deficit_chord",
            "ffn_deficit",
            "turning",
            "turning_attention",
            "turning_ffn",
        ),
    )


def _stretching(dataset: xr.Dataset) -> Panel:
    shares = [Line("attention_radial_share", "attention", ATTENTION), Line("ffn_radial_share", "FFN", FFN)]
    lengths = [
        Line("resid_norm", "stream", WHOLE),
        Line("attention_norm", "attention", ATTENTION),
        Line("ffn_norm", "FFN", FFN),
    ]
    first = [Line("resid_norm_all", "stream", WHOLE), Line("ffn_norm_all", "FFN", FFN)]
    return Panel(
        title="Do they turn tokens or only stretch them?",
        answer=f"{percent(median(dataset.attention_radial_share))} of what attention writes, and "
        f"{percent(median(dataset.ffn_radial_share))} of what the FFN writes, lies along the token in the median "
        f"layer; "
        "the rest turns it.",
        views=(
            View(
                "Radial share", with_errors(dataset, shares, axis="radial share"), caption(dataset, "ffn_radial_share")
            ),
            View("Lengths", with_errors(dataset, lengths, axis="length", log=True), caption(dataset, "resid_norm")),
            View(
                "With first token",
                with_errors(dataset, first, axis="length", log=True),
                caption(dataset, "resid_norm_all"),
            ),
        ),
        quantities=("attention_radial_share", "ffn_radial_share", "resid_norm", "attention_norm", "ffn_norm"),
    )


def _diversity(dataset: xr.Dataset) -> Panel:
    levels = [
        Line("diversity_pre", "before attention", WHOLE),
        Line("diversity_mid", "after attention", ATTENTION),
        Line("diversity_post", "after the FFN", FFN),
    ]
    changes = [
        Line("diversity_change_attention", "attention", ATTENTION),
        Line("diversity_change_ffn", "FFN", FFN),
    ]
    pulled = int((dataset.diversity_change_attention < 0).sum())
    spread = int((dataset.diversity_change_ffn > 0).sum())
    return Panel(
        title="Do the tokens draw together?",
        answer=f"Attention draws them together in {pulled} of {dataset.sizes['layer']} layers, the FFN drives them "
        f"apart "
        f"in {spread}; diversity goes from {number(float(dataset.diversity_pre[0]))} to "
        f"{number(float(dataset.diversity_post[-1]))}.",
        views=(
            View("Level", with_errors(dataset, levels, axis="spherical diversity"), caption(dataset, "diversity_pre")),
            View(
                "Change",
                with_errors(dataset, changes, axis="change of diversity"),
                caption(dataset, "diversity_change_attention"),
            ),
        ),
        quantities=(
            "diversity_pre",
            "diversity_mid",
            "diversity_post",
            "diversity_change_attention",
            "diversity_change_ffn",
        ),
    )


def _defect(dataset: xr.Dataset) -> Panel:
    lines = [Line("defect", "measured", FFN)]
    views = [
        View(
            "Defect",
            with_errors(dataset, [*lines, Line("defect_ratio", "ratio of means", WHOLE)], axis="defect"),
            caption(dataset, "defect"),
        )
    ]
    names = ["defect", "defect_ratio"]
    if "defect_first_order" in dataset:
        both = [Line("defect_same_tokens", "measured", FFN), Line("defect_first_order", "first order", ATTENTION)]
        views.append(
            View("First order", with_errors(dataset, both, axis="defect"), caption(dataset, "defect_first_order"))
        )
        names += ["defect_first_order", "defect_same_tokens"]
    if not float(abs(dataset.defect).max()):
        answer = "They do: the blocks of this model are parallel, and the defect is exactly 0."
    else:
        least = dataset.layer.values[np.argsort(dataset.defect.values)[:3]]
        named = ", ".join(str(layer) for layer in least)
        answer = f"Least is lost in layers {named}; in the median layer the FFN's answer changes by "
        answer += f"{percent(median(dataset.defect))}. Read on {dataset.attrs.get('n_defects', 0):,} tokens."
    return Panel("Could attention and FFN run side by side?", answer, tuple(views), tuple(names))


def _strongest(dataset: xr.Dataset) -> Panel:
    figure = with_errors(dataset, [Line("top_k_cosine", "cosine", ATTENTION)], axis="cosine with the full output")
    figure.update_yaxes(rangemode="normal")
    values = dataset.top_k_cosine
    return Panel(
        title="How few attention weights carry the output?",
        answer=f"With only the largest weights of each row the output keeps a cosine of {number(median(values))} in "
        f"the "
        f"median layer and {number(float(values.min()))} in the worst.",
        views=(View("", figure, caption(dataset, "top_k_cosine")),),
        quantities=("top_k_cosine",),
    )


STEERING = Section(
    title="Steering",
    instrument="steering",
    lead="A token is a direction and a length. Attention moves each token towards others, the feed-forward network "
    "(FFN) "
    "moves each by itself. Means leave out the first token of each window, whose length dwarfs the rest, unless a view "
    "says so.",
    questions=(
        Question(("angular_deficit", "angular_deficit_slope", "turning"), _turning),
        Question(("attention_radial_share", "resid_norm"), _stretching),
        Question(("diversity_pre", "diversity_change_ffn"), _diversity),
        Question(("defect", "defect_ratio"), _defect),
        Question(("top_k_cosine",), _strongest),
    ),
)
