"""Forms for how attention makes tokens alike: cosines against density and against depth."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from rheoscope.report.axes import axis_name
from rheoscope.report.figures import Line, by_depth, new_figure
from rheoscope.report.figures_by_lag import depth_key
from rheoscope.report.theme import at_depth, tone


def mixing_curves(dataset: xr.Dataset) -> go.Figure:
    """Cosine after a step against its density, one line per layer: measured as points, the closed form as lines."""
    layers, mixing = dataset["layer"].values, dataset["mixing"].values
    figure = new_figure(
        height=440,
        xaxis={"title": {"text": "density a: 0 attends to itself, 1 evenly to all"}},
        yaxis={"title": {"text": axis_name(dataset.cosine_measured)}},
        showlegend=False,
        margin={"t": 62},
    )
    for place, layer in enumerate(layers):
        shade = at_depth(place / max(len(layers) - 1, 1))
        one = dataset.sel(layer=layer)
        predicted = "cosine_predicted" in dataset
        if predicted:
            line = {"color": shade, "width": 1.5}
            values = one.cosine_predicted.values
            hover = f"layer {layer}, a = %{{x}}<br>closed form <b>%{{y:.4~f}}</b><extra></extra>"
            figure.add_trace(go.Scatter(x=mixing, y=values, mode="lines", line=line, hovertemplate=hover))
        figure.add_trace(
            go.Scatter(
                x=mixing,
                y=one.cosine_measured.values,
                mode="markers" if predicted else "lines+markers",
                marker={"color": shade, "size": 6},
                line={"color": shade, "width": 1.5},
                hovertemplate=f"layer {layer}, a = %{{x}}<br>measured <b>%{{y:.4~f}}</b><extra></extra>",
            )
        )
    figure.add_trace(depth_key(layers))
    return figure


def predicted_against_measured(dataset: xr.Dataset) -> go.Figure:
    """The closed form against the measured cosine, every layer and density a point, with the line of equality."""
    layers = dataset["layer"].values
    figure = new_figure(
        height=440,
        xaxis={"title": {"text": "measured cosine"}},
        yaxis={"title": {"text": "closed form"}},
        showlegend=False,
        margin={"t": 62},
    )
    both = np.concatenate([dataset[name].values.ravel() for name in ("cosine_measured", "cosine_predicted")])
    ends = [np.nanmin(both), np.nanmax(both)]
    line = {"color": tone("null"), "width": 1, "dash": "dot"}
    figure.add_trace(go.Scatter(x=ends, y=ends, mode="lines", line=line, hoverinfo="skip"))
    for place, layer in enumerate(layers):
        one = dataset.sel(layer=layer)
        figure.add_trace(
            go.Scatter(
                x=one.cosine_measured.values,
                y=one.cosine_predicted.values,
                customdata=dataset["mixing"].values,
                mode="markers",
                marker={"color": at_depth(place / max(len(layers) - 1, 1)), "size": 7, "opacity": 0.8},
                hovertemplate=f"layer {layer}, a = %{{customdata}}<br>measured <b>%{{x:.4~f}}</b>"
                "<br>closed form <b>%{y:.4~f}</b><extra></extra>",
            )
        )
    figure.add_trace(depth_key(layers))
    return figure


def cosines_by_depth(dataset: xr.Dataset) -> go.Figure:
    """Cosines before the step, after the natural one, and after attention to itself and evenly to all."""
    ends = {
        "cosine_self": dataset.cosine_measured.isel(mixing=0),
        "cosine_even": dataset.cosine_measured.isel(mixing=-1),
    }
    data = dataset.assign({name: values.drop_vars("mixing") for name, values in ends.items()})
    lines = [
        Line("cosine_before", "before attention", "score"),
        Line("cosine_after", "after attention as it is", "routing"),
        Line("cosine_self", "if each attended to itself", "filtering"),
        Line("cosine_even", "if all attended evenly", "residue"),
    ]
    return by_depth(data, lines, axis="mean cosine between tokens")
