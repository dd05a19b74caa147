"""Forms in which every head is a point of its own: two quantities against each other, and clouds of eigenvalues."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from rheoscope.report.axes import POWERS_OF_TWO, axis_name
from rheoscope.report.figures import new_figure
from rheoscope.report.figures_by_lag import depth_key
from rheoscope.report.theme import at_depth, distinct, tone

_HEADS_IN_LEGEND = 16
_POINTS_HELD = 150_000  # eigenvalues in one page, about 3 MB
_CENTRE_QUANTILE = 0.01  # eigenvalues smaller than all but this share are drawn at the centre


def heads_against(dataset: xr.Dataset, x: str, y: str, *, log: bool = False) -> go.Figure:
    """One quantity against another, every head a point coloured by its layer, with the line of equality."""
    horizontal, vertical = (dataset[name].transpose("layer", "head") for name in (x, y))
    layers = horizontal["layer"].values
    ticks = POWERS_OF_TWO if log else {}
    figure = new_figure(
        height=460,
        xaxis={"title": {"text": axis_name(horizontal)}, **ticks},
        yaxis={"title": {"text": axis_name(vertical)}, **ticks},
        showlegend=False,
        margin={"t": 62},
    )
    both = np.concatenate([horizontal.values.ravel(), vertical.values.ravel()])
    ends = [np.nanmin(both), np.nanmax(both)]
    equality = {"color": tone("null"), "width": 1, "dash": "dot"}
    figure.add_trace(go.Scatter(x=ends, y=ends, mode="lines", line=equality, hoverinfo="skip"))
    for place, layer in enumerate(layers):
        figure.add_trace(
            go.Scatter(
                x=horizontal.sel(layer=layer).values,
                y=vertical.sel(layer=layer).values,
                customdata=horizontal["head"].values,
                mode="markers",
                marker={"color": at_depth(place / max(len(layers) - 1, 1)), "size": 7, "opacity": 0.8},
                hovertemplate=f"layer {layer}, head %{{customdata}}<br>{axis_name(horizontal)} <b>%{{x:.4~g}}</b>"
                f"<br>{axis_name(vertical)} <b>%{{y:.4~g}}</b><extra></extra>",
            )
        )
    figure.add_trace(depth_key(layers))
    return figure


def eigenvalue_cloud(dataset: xr.Dataset, layer: int) -> go.Figure:
    """Eigenvalues of the heads of one layer in the complex plane: angle as it is, size on a logarithmic scale.

    The scale is the same in all layers.
    """
    low, high = _radii(dataset)
    figure = new_figure(height=480, margin={"l": 52, "r": 52, "t": 64, "b": 40})
    figure.update_polars(
        domain={"y": [0, 0.95]},
        radialaxis={
            "type": "log",
            "range": [low, high],
            "dtick": 1,
            "angle": 104,
            "tickangle": 104,
            "side": "counterclockwise",
            "showline": False,
            "exponentformat": "none",
        },
        angularaxis={
            "tickvals": [0, 90, 180, 270],
            "ticktext": ["grows", "rotates", "fades", "rotates"],
            "tickfont": {"size": 13},
        },
    )
    right = np.linspace(-90, 90, 61)
    half = {"r": [10.0**high] * 61, "theta": right, "fill": "toself", "fillcolor": tone("growth")}
    figure.add_trace(go.Scatterpolar(**half, mode="none", hoverinfo="skip", showlegend=False))
    border = {"color": tone("filtering"), "width": 1.5}
    figure.add_trace(
        go.Scatterpolar(
            r=[10.0**high, 10.0**low, 10.0**high],
            theta=[90, 0, 270],
            mode="lines",
            line=border,
            name="Re λ = 0",
            hoverinfo="skip",
        )
    )
    of_layer = dataset[["eigenvalues_re", "eigenvalues_im"]].sel(layer=layer)
    for place, head in enumerate(of_layer["head"].values):
        figure.add_trace(_eigenvalues_of(of_layer.sel(head=head), place, smallest=10.0**low))
    figure.update_layout(showlegend=dataset.sizes["head"] <= _HEADS_IN_LEGEND)
    return figure


def _eigenvalues_of(of_head: xr.Dataset, place: int, *, smallest: float) -> go.Scatterpolar:
    """Single precision is enough for a picture, and halves the largest part of the page."""
    re, im = (of_head[f"eigenvalues_{part}"].values.astype(np.float32) for part in ("re", "im"))
    head, unit = of_head["head"].item(), of_head.eigenvalues_re.attrs.get("units", "")
    return go.Scatterpolar(
        r=np.maximum(np.hypot(re, im), np.float32(smallest)),
        theta=np.degrees(np.arctan2(im, re)),
        customdata=np.stack([re, im], axis=-1),
        mode="markers",
        name=f"head {head}",
        marker={"color": distinct(place), "size": 5.5, "opacity": 0.75},
        hovertemplate=f"head {head}<br>Re λ <b>%{{customdata[0]:.4~g}}</b> {unit}"
        f"<br>Im λ <b>%{{customdata[1]:.4~g}}</b> {unit}<extra></extra>",
    )


def layers_drawn(dataset: xr.Dataset) -> np.ndarray:
    """All layers, or so many of them, evenly spaced, that a page holds their eigenvalues."""
    layers = dataset["layer"].values
    per_layer = dataset.eigenvalues_re.size // len(layers)
    most = int(np.clip(_POINTS_HELD // per_layer, 4, len(layers))) if len(layers) > 4 else len(layers)
    return layers[np.unique(np.linspace(0, len(layers) - 1, most).round().astype(int))]


def _radii(dataset: xr.Dataset) -> tuple[float, float]:
    """Exponents of ten that hold all but the smallest eigenvalues of all layers."""
    sizes = np.hypot(dataset.eigenvalues_re.values, dataset.eigenvalues_im.values)
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    if not sizes.size:
        return -1.0, 1.0
    low, high = np.log10(np.quantile(sizes, _CENTRE_QUANTILE)), np.log10(sizes.max())
    return float(np.floor(low)), float(max(high + 0.1, np.floor(low) + 1))
