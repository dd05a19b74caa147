"""Forms for quantities by scale, by number of modes, and for modes as pictures. Maps are drawn as images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from rheoscope.report.axes import POWERS_OF_TWO, layer_axis
from rheoscope.report.figures import Level, add_level, colours, new_figure
from rheoscope.report.figures_by_lag import depth_key
from rheoscope.report.theme import at_depth, distinct, scale, template, tone

MOST_LAYERS = 8  # drawn as pictures of their own
_SCALE_AXIS = {"title": {"text": "scale (tokens)"}, "showgrid": False, **POWERS_OF_TWO}


def some_layers(dataset: xr.Dataset, most: int = MOST_LAYERS) -> np.ndarray:
    """All layers, or so many of them, evenly spaced."""
    layers = dataset["layer"].values
    return layers[np.unique(np.linspace(0, len(layers) - 1, min(most, len(layers))).round().astype(int))]


def _below(title: str) -> dict:
    """The title of a horizontal axis, clear of the numbers on it."""
    return {"text": title, "standoff": 18}


def band_label(band: float) -> str:
    """A window on lag in words."""
    return f"around {band:g} tokens" if np.isfinite(band) else "all distances"


def scale_map(values: xr.DataArray, along: str, title: str, name: str) -> go.Figure:
    """Energy by scale and another dimension, on a logarithmic colour scale."""
    drawn = values.transpose("scale", along)
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.where(drawn.values > 0, np.log10(drawn.values), np.nan).astype(np.float32)
    figure = new_figure(
        height=380, xaxis={"title": _below(title), "showgrid": False}, yaxis=_SCALE_AXIS, margin={"t": 62}
    )
    figure.add_trace(
        go.Heatmap(
            x=drawn[along].values,
            y=drawn["scale"].values,
            z=z,
            hovertemplate=f"scale %{{y:.3~g}} tokens, {title} %{{x}}<br>10^<b>%{{z:.3~g}}</b><extra></extra>",
            **colours(z, None, f"{name}, power of ten"),
        )
    )
    return figure


def scales_by_depth(ratio: xr.DataArray, dominant: xr.DataArray, name: str) -> go.Figure:
    """Energy over its null by layer and scale, with the dominant scales as points: larger is clearer."""
    figure = scale_map(ratio.where(ratio > 0), "layer", "layer", name)
    figure.update_layout(xaxis=layer_axis(ratio["layer"].values) | {"showgrid": False}, showlegend=False)
    for place, peak in enumerate(dominant["peak"].values):
        found = dominant.sel(peak=peak).dropna("layer")
        figure.add_trace(
            go.Scatter(
                x=found["layer"].values,
                y=found.values,
                mode="markers",
                marker={
                    "color": tone("filtering"),
                    "size": max(11 - 3 * place, 4),
                    "line": {"width": 1, "color": tone("surface")},
                },
                hovertemplate=f"layer %{{x}}<br>dominant scale <b>%{{y:.3~g}}</b> tokens, number {place + 1}"
                "<extra></extra>",
            )
        )
    return figure


def bands_by_depth(values: xr.DataArray, *, levels: Sequence[Level] = (), axis: str, errors: xr.DataArray) -> go.Figure:
    """A quantity against depth, one line per window on lag, with its standard error."""
    figure = new_figure(
        xaxis=layer_axis(values["layer"].values), yaxis={"title": {"text": axis}, "rangemode": "tozero"}
    )
    for place, band in enumerate(values["band"].values):
        figure.add_trace(
            go.Scatter(
                x=values["layer"].values,
                y=values.sel(band=band).values,
                error_y={"array": errors.sel(band=band).values, "width": 0, "thickness": 1},
                mode="lines+markers",
                name=band_label(band),
                line={"color": distinct(place), "width": 1.8},
                marker={"size": 4.5},
                hovertemplate=f"{band_label(band)}, layer %{{x}}<br><b>%{{y:.4~g}}</b><extra></extra>",
            )
        )
    for level in levels:
        add_level(figure, level)
    return figure


def lines_by_layer(
    values: xr.DataArray, along: str, *, title: str, axis: str, log: bool = True, dashed: xr.DataArray | None = None
) -> go.Figure:
    """A quantity against another, one line per layer coloured by depth; a second quantity beside it, dashed."""
    kind = {"type": "log", "dtick": 1} if log else {"rangemode": "tozero"}
    figure = new_figure(
        height=420,
        xaxis={"title": _below(title), "showgrid": False, **POWERS_OF_TWO},
        yaxis={"title": {"text": axis}, **kind},
        showlegend=False,
        margin={"t": 62},
    )
    layers = values["layer"].values
    for place, layer in enumerate(layers):
        for drawn, dash in ((values, "solid"), (dashed, "dash")):
            if drawn is not None:
                colour = at_depth(place / max(len(layers) - 1, 1))
                figure.add_trace(_line_of(drawn.sel(layer=layer), along, {"color": colour, "dash": dash, "width": 1.5}))
    figure.add_trace(depth_key(layers))
    return figure


def _line_of(values: xr.DataArray, along: str, line: dict) -> go.Scatter:
    known = values.where(values > 0).dropna(along)
    x = known[along].values + (1 if along == "component" else 0)
    return go.Scatter(
        x=x,
        y=known.values.astype(np.float32),
        mode="lines",
        line=line,
        hovertemplate=f"layer {values['layer'].item()}, {along} %{{x}}<br><b>%{{y:.4~g}}</b><extra></extra>",
    )


def mode_pictures(of_layer: xr.Dataset) -> go.Figure:
    """The leading modes of one layer under one window: the maps above, their averages over lag below."""
    numbers = of_layer["mode_number"].values
    shares = of_layer.eigenvalues.values[: len(numbers)] / np.nansum(of_layer.eigenvalues.values)
    figure = make_subplots(
        rows=2,
        cols=len(numbers),
        row_heights=[0.66, 0.34],
        vertical_spacing=0.17,
        horizontal_spacing=0.06,
        subplot_titles=[f"mode {n + 1}: {100 * share:.1f} %" for n, share in zip(numbers, shares, strict=True)],
    )
    figure.update_layout(template=template(), height=520, showlegend=False, margin={"t": 48})
    for column, number in enumerate(numbers, start=1):
        picture = of_layer.mode.sel(mode_number=number).transpose("query_bin", "key_bin").values.astype(np.float32)
        # A few entries beside the diagonal are far larger than all others; colours end where 98 % do.
        known = np.abs(picture[np.isfinite(picture)])
        reach = float(np.quantile(known, 0.98)) if known.size else 1.0
        figure.add_trace(
            go.Heatmap(
                x=of_layer["key_bin"].values,
                y=of_layer["query_bin"].values,
                z=picture,
                zmin=-(reach or 1.0),
                zmax=reach or 1.0,
                colorscale=scale("diverging"),
                showscale=False,
                hovertemplate="query %{y:.0f}, key %{x:.0f}<br><b>%{z:.3~g}</b><extra></extra>",
            ),
            row=1,
            col=column,
        )
        profile = of_layer.mode_lag_profile.sel(mode_number=number).dropna("lag")
        figure.add_trace(
            go.Scatter(
                x=profile["lag"].values,
                y=profile.values.astype(np.float32),
                mode="lines",
                line={"color": tone("routing"), "width": 1.5},
                hovertemplate="distance %{x} tokens<br><b>%{y:.3~g}</b><extra></extra>",
            ),
            row=2,
            col=column,
        )
    figure.update_xaxes(showgrid=False, title_text="key", row=1)
    figure.update_yaxes(showgrid=False, autorange="reversed", row=1)
    figure.update_xaxes(title_text="distance (tokens)", row=2)
    figure.update_yaxes(title_text="query", row=1, col=1)
    return figure


def coherence_map(values: xr.DataArray) -> go.Figure:
    """Coherence of every pair of positions, from 0 to 1."""
    drawn = values.transpose("row", "other_row")
    figure = new_figure(
        height=470,
        xaxis={"title": _below("position"), "showgrid": False, "constrain": "domain"},
        yaxis={"title": {"text": "other position"}, "showgrid": False, "autorange": "reversed", "scaleanchor": "x"},
        margin={"t": 62},
    )
    z = drawn.values.astype(np.float32)
    figure.add_trace(
        go.Heatmap(
            x=drawn["other_row"].values,
            y=drawn["row"].values,
            z=z,
            zmin=0,
            zmax=1,
            hovertemplate="positions %{y} and %{x}<br><b>%{z:.2f}</b><extra></extra>",
            **colours(z, None, "coherence, less chance"),
        )
    )
    return figure
