"""Forms for heads that rest: kinds of heads, switches in text, outputs between their bounds, costs of patterns."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from rheoscope.report.axes import POWERS_OF_TWO, axis_name, layer_axis, rows_downwards
from rheoscope.report.figures import colours, new_figure, plain
from rheoscope.report.figures_by_lag import depth_key
from rheoscope.report.theme import at_depth, distinct, tone
from rheoscope.report.words import visible

KINDS = ("mixed", "sink", "diagonal", "previous token")
MASSES = ("sink_mass", "diagonal_mass", "previous_mass")
BESIDE = {"hard_switch_share": "at rest", "value_ratio": "length of the sink's value", "sink_position": "sink at"}
PER_ROW = 12  # tokens of a passage side by side
LETTERS = 11  # of a token that are shown in its square


def kind_of_heads(dataset: xr.Dataset, threshold: float) -> np.ndarray:
    """Index into KINDS by layer and head: the largest of the three masses where it exceeds the threshold."""
    masses = np.stack([dataset[name].transpose("layer", "head").values for name in MASSES])
    masses = np.nan_to_num(masses)
    return np.where(masses.max(0) > threshold, masses.argmax(0) + 1, 0)


def kind_map(dataset: xr.Dataset, threshold: float) -> go.Figure:
    """Every head coloured by its kind, with its masses on hover."""
    kinds = kind_of_heads(dataset, threshold)
    layers, heads = dataset["layer"].values, dataset["head"].values
    shown = [*MASSES, *(name for name in BESIDE if name in dataset)]
    beside = np.stack([dataset[name].transpose("head", "layer").values for name in shown], -1)
    words = {
        "sink_mass": "sink mass",
        "diagonal_mass": "diagonal mass",
        "previous_mass": "previous-token mass",
    } | BESIDE
    lines = "".join(f"<br>{words[name]} %{{customdata[{place}]:.3~g}}" for place, name in enumerate(shown))
    figure = new_figure(
        height=int(np.clip(25 * len(heads) + 130, 240, 680)),
        xaxis=layer_axis(layers) | {"showgrid": False},
        yaxis=rows_downwards("head", heads),
    )
    shades = [tone("rule"), distinct(1), distinct(0), distinct(2)]
    stops = [[(place + end) / len(KINDS), shade] for place, shade in enumerate(shades) for end in (0, 1)]
    figure.add_trace(
        go.Heatmap(
            x=layers,
            y=heads,
            z=kinds.T,
            zmin=-0.5,
            zmax=len(KINDS) - 0.5,
            colorscale=stops,
            showscale=False,
            xgap=1,
            ygap=1,
            customdata=beside,
            text=np.array(KINDS)[kinds.T],
            hovertemplate=f"layer %{{x}}, head %{{y}}: <b>%{{text}}</b>{lines}<extra></extra>",
        )
    )
    for kind, shade in zip(KINDS, shades, strict=True):
        marker = {"color": shade, "size": 11, "symbol": "square"}
        figure.add_trace(go.Scatter(x=[None], y=[None], mode="markers", marker=marker, name=kind, hoverinfo="skip"))
    return figure


def passage(dataset: xr.Dataset, example: int) -> go.Figure:
    """A passage, each token a square as dark as its head's attention to the sink."""
    texts = dataset.example_text.values[example]
    mass = dataset.example_mass.values[example].astype(float)
    n_rows = -(-len(texts) // PER_ROW)
    missing = n_rows * PER_ROW - len(texts)
    squares = np.pad(mass, (0, missing), constant_values=np.nan).reshape(n_rows, PER_ROW)
    names = [visible(str(text)).replace(" ", "\N{OPEN BOX}") for text in texts] + [""] * missing
    short = [text if len(text) <= LETTERS else f"{text[: LETTERS - 1]}…" for text in names]
    bare = {"showgrid": False, "showticklabels": False, "ticks": ""}
    below = {"text": "text runs from left to right", "standoff": 24}
    figure = new_figure(
        height=52 * n_rows + 96,
        xaxis=bare | {"title": below},
        yaxis=bare | {"title": {"text": "and down"}, "autorange": "reversed"},
        margin={"t": 62},
    )
    scale = colours(squares, None, axis_name(dataset.example_mass)) | {"zmin": 0, "zmax": 1}
    figure.add_trace(
        go.Heatmap(
            z=squares,
            customdata=np.array([plain(text) for text in names], dtype=object).reshape(n_rows, PER_ROW),
            xgap=2,
            ygap=2,
            hoverongaps=False,
            hovertemplate="%{customdata}<br>sink mass <b>%{z:.3~g}</b><extra></extra>",
            **scale,
        )
    )
    for place, text in enumerate(short):
        row, column = divmod(place, PER_ROW)
        dark = np.isfinite(squares[row, column]) and squares[row, column] > 0.55
        shade = tone("surface") if dark else tone("ink")
        figure.add_annotation(x=column, y=row, text=plain(text), showarrow=False, font={"size": 11, "color": shade})
    return figure


def output_figure(dataset: xr.Dataset, layer: int) -> go.Figure:
    """Length of a head's output against the attention that is not on the sink, with the bounds of both sides."""
    figure = new_figure(
        height=440,
        xaxis={"title": {"text": axis_name(dataset.free_mass)}, "range": [-0.02, 1.02]},
        yaxis={"title": {"text": axis_name(dataset.output_norm)}, "rangemode": "tozero"},
    )
    of_layer = dataset.sel(layer=layer)
    for place, head in enumerate(dataset["head"].values):
        one = of_layer.sel(head=head)
        order = np.argsort(one.free_mass.values)
        free, shade = one.free_mass.values[order], distinct(place)
        group = {"legendgroup": f"{head}"}
        for name, dash in (("output_upper", "dot"), ("output_lower", "dash")):
            line = {"color": shade, "width": 1, "dash": dash}
            bound = one[name].values[order]
            figure.add_trace(
                go.Scatter(x=free, y=bound, mode="lines", line=line, hoverinfo="skip", showlegend=False, **group)
            )
        figure.add_trace(
            go.Scatter(
                x=free,
                y=one.output_norm.values[order],
                mode="markers",
                name=f"head {head}",
                marker={"color": shade, "size": 6, "opacity": 0.8},
                hovertemplate=f"head {head}<br>not on the sink %{{x:.3~g}}<br>output <b>%{{y:.3~g}}</b><extra></extra>",
                **group,
            )
        )
    figure.update_layout(showlegend=dataset.sizes["head"] <= 16)
    return figure


def cost_figure(dataset: xr.Dataset) -> go.Figure:
    """Least cost of both patterns against the number of tokens, one pair of lines per layer, and orthonormal tokens."""
    known = dataset.dropna("layer", how="all", subset=["pattern_cost"])
    layers, sizes = known["layer"].values, known["size"].values
    figure = new_figure(
        height=440,
        xaxis={"title": {"text": "tokens"}, **POWERS_OF_TWO},
        yaxis={"title": {"text": axis_name(dataset.pattern_cost)}, **POWERS_OF_TWO},
        margin={"t": 62},
        showlegend=False,
    )
    for pattern, dash, symbol in (("sink", "solid", "circle"), ("diagonal", "dash", "diamond")):
        for place, layer in enumerate(layers):
            shade = at_depth(place / max(len(layers) - 1, 1))
            figure.add_trace(
                go.Scatter(
                    x=sizes,
                    y=known.pattern_cost.sel(layer=layer, pattern=pattern).values,
                    mode="lines+markers",
                    line={"color": shade, "dash": dash, "width": 1.75},
                    marker={"symbol": symbol, "size": 7},
                    hovertemplate=f"layer {layer}, {pattern}, %{{x}} tokens<br><b>%{{y:.4~g}}</b><extra></extra>",
                )
            )
        figure.add_trace(
            go.Scatter(
                x=sizes,
                y=dataset.pattern_cost_orthonormal.sel(pattern=pattern).values,
                mode="lines",
                line={"color": tone("null"), "dash": dash, "width": 2.5},
                hovertemplate=f"orthonormal, {pattern}, %{{x}} tokens<br><b>%{{y:.4~g}}</b><extra></extra>",
            )
        )
    figure.add_trace(depth_key(layers))
    return figure
