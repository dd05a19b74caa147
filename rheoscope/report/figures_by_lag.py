"""Forms for quantities that vary with the distance between two positions, on a logarithmic axis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from rheoscope.report.axes import POWERS_OF_TWO, axis_name, rows_downwards
from rheoscope.report.figures import Level, add_level, colours, new_figure
from rheoscope.report.theme import at_depth, scale

_LAGS_DRAWN = 160  # on a logarithmic axis more cannot be told apart


def _drawn_lags(values: xr.DataArray) -> xr.DataArray:
    """A selection of measured lags, evenly spaced on a logarithmic axis. Lag 0 has no place there."""
    lags = values["lag"].values
    wanted = np.geomspace(max(lags.min(), 1), lags.max(), _LAGS_DRAWN)
    nearest = np.unique([np.abs(lags - lag).argmin() for lag in wanted])
    return values.isel(lag=[index for index in nearest if lags[index] > 0])


def lag_map(values: xr.DataArray, *, centre: Level | None = None) -> go.Figure:
    """A quantity by layer and lag, lag on a logarithmic axis, the first layer on top."""
    drawn = _drawn_lags(values).transpose("layer", "lag")
    figure = new_figure(
        height=int(np.clip(13 * drawn.sizes["layer"] + 140, 260, 620)),
        xaxis=_lag_axis(),
        yaxis=rows_downwards("layer (0 is the first)", drawn["layer"].values),
        margin={"t": 62 if centre is None else 78},
    )
    figure.add_trace(
        go.Heatmap(
            x=drawn["lag"].values,
            y=drawn["layer"].values,
            z=drawn.values,
            hovertemplate="layer %{y}, distance %{x} tokens<br><b>%{z:.4~g}</b><extra></extra>",
            **colours(drawn.values, centre, axis_name(values)),
        )
    )
    return figure


def lag_lines(values: xr.DataArray, *, levels: Sequence[Level] = ()) -> go.Figure:
    """A quantity against lag, one line per layer, coloured by depth."""
    drawn = _drawn_lags(values)
    layers = drawn["layer"].values
    figure = new_figure(
        height=420, xaxis=_lag_axis(), yaxis={"title": {"text": axis_name(values)}}, showlegend=False, margin={"t": 62}
    )
    for place, layer in enumerate(layers):
        figure.add_trace(
            go.Scatter(
                x=drawn["lag"].values,
                y=drawn.sel(layer=layer).values,
                mode="lines",
                line={"color": at_depth(place / max(len(layers) - 1, 1)), "width": 1.5},
                hovertemplate=f"layer {layer}, distance %{{x}} tokens<br><b>%{{y:.4~g}}</b><extra></extra>",
            )
        )
    figure.add_trace(depth_key(layers))
    for level in levels:
        add_level(figure, level)
    return figure


def depth_key(layers: np.ndarray) -> go.Scatter:
    """The bar that says which colour is which layer, as a trace without points."""
    bar = colours(np.empty(0), None, "layer")["colorbar"] | {"len": 0.4, "nticks": 6, "tickformat": "d"}
    ends = {"cmin": layers.min(), "cmax": layers.max()}
    return go.Scatter(
        x=[None],
        y=[None],
        mode="markers",
        marker={"color": [0], "colorscale": scale("depth"), "colorbar": bar, **ends},
        hoverinfo="skip",
        showlegend=False,
    )


def _lag_axis() -> dict:
    return {"title": {"text": "distance between the two positions (tokens)"}, "showgrid": False, **POWERS_OF_TWO}
