"""Forms that the figures of all instruments share. A dataset goes in, a plotly figure comes out.

Names and units come from the attributes that the catalogue sets. Depth runs from left to right, and from top to bottom
only where another quantity takes that axis.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from rheoscope.report.axes import POWERS_OF_TWO, axis_name, layer_axis, rows_downwards
from rheoscope.report.theme import scale, template, tone
from rheoscope.report.words import number
from rheoscope.tables import siblings

_DASHES = {"null": "dash", "null_gaussian": "dot", "null_shuffled": "dashdot", "null_uniform": "longdashdot"}


@dataclass(frozen=True)
class Line:
    """A quantity drawn against depth: the median over heads, a band that holds 80 % of them, and its nulls."""

    name: str
    label: str
    tone: str


@dataclass(frozen=True)
class Level:
    """A value to compare with, drawn as a horizontal line with its name on it."""

    value: float
    label: str


def new_figure(*, height: int = 400, **layout) -> go.Figure:
    """An empty figure in the look of the report."""
    return go.Figure(layout={"template": template(), "height": height, **layout})


def plain(text: object) -> str:
    """Text that plotly shows as it is, rather than reading markup in it."""
    return html.escape(str(text), quote=False)


def caption(dataset: xr.Dataset, name: str) -> str:
    """How to read a quantity, as the catalogue says it."""
    return dataset[name].attrs.get("description", "")


def null_label(variable: xr.DataArray, null: xr.DataArray) -> str:
    """What a null was measured on, as the catalogue words it."""
    return null.attrs.get("long_name", str(null.name)).removeprefix(f"{variable.attrs.get('long_name')}, ")


def nulls_of(dataset: xr.Dataset, name: str) -> dict[str, xr.DataArray]:
    """The nulls beside a quantity, by role."""
    beside = siblings(dataset).get(name, {})
    return {role: null for role, null in beside.items() if role.startswith("null") and not role.endswith("_se")}


def middle_and_spread(values: xr.DataArray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Median, 10th and 90th percentile over heads, by layer. Heads where the quantity is not defined are left out."""
    if "head" not in values.dims:
        return (values.values,) * 3
    defined = [row[np.isfinite(row)] for row in values.transpose("layer", "head").values]
    columns = [np.quantile(row, [0.5, 0.1, 0.9]) if row.size else np.full(3, np.nan) for row in defined]
    middle, low, high = np.array(columns).T
    return middle, low, high


def by_depth(
    dataset: xr.Dataset, lines: Sequence[Line], *, levels: Sequence[Level] = (), log: bool = False, axis: str = ""
) -> go.Figure:
    """Quantities against depth. One line alone shows every head as a point; several lines show bands only."""
    layers = dataset[lines[0].name]["layer"].values
    vertical = {"title": {"text": axis or axis_name(dataset[lines[0].name])}}
    vertical |= POWERS_OF_TWO if log else {"rangemode": "tozero"}
    figure = new_figure(xaxis=layer_axis(layers), yaxis=vertical)
    for line in lines:
        figure.add_traces([*_band(dataset[line.name], line), *_null_lines(dataset, line, coloured=len(lines) > 1)])
        if len(lines) == 1 and "head" in dataset[line.name].dims:
            figure.add_trace(_head_points(dataset, line))
        figure.add_trace(_median_line(dataset[line.name], line))
    if len(lines) > 1:
        figure.add_traces(_null_keys(dataset, lines))
    for level in levels:
        add_level(figure, level)
    return figure


def add_level(figure: go.Figure, level: Level) -> None:
    """Draws a level across the figure, named at its right end."""
    on_log_axis = figure.layout.yaxis.type == "log"
    line = {"color": tone("null"), "width": 1, "dash": "dot"}
    figure.add_shape(type="line", xref="paper", x0=0, x1=1, y0=level.value, y1=level.value, line=line)
    figure.add_annotation(
        xref="paper",
        x=1,
        y=np.log10(level.value) if on_log_axis else level.value,
        text=level.label,
        showarrow=False,
        xanchor="right",
        yanchor="bottom",
        bgcolor=tone("veil"),
        font={"size": 11.5, "color": tone("muted")},
    )


def _band(values: xr.DataArray, line: Line) -> list[go.Scatter]:
    if "head" not in values.dims:
        return []
    _, low, high = middle_and_spread(values)
    shared = {
        "x": values["layer"].values,
        "mode": "lines",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
    }
    fill = {"fill": "tonexty", "fillcolor": tone(f"{line.tone} band")}
    return [go.Scatter(y=low, **shared), go.Scatter(y=high, **shared, **fill)]


def _median_line(values: xr.DataArray, line: Line) -> go.Scatter:
    middle, low, high = middle_and_spread(values)
    heads = "head" in values.dims
    spread = "<br>80 % of heads %{customdata[0]:.4~g} to %{customdata[1]:.4~g}" if heads else ""
    return go.Scatter(
        x=values["layer"].values,
        y=middle,
        customdata=np.stack([low, high], axis=-1),
        mode="lines+markers",
        legendrank=1,
        name=f"{line.label}, median head" if heads else line.label,
        line={"color": tone(line.tone), "width": 2.25},
        marker={"size": 5},
        hovertemplate=f"<b>{line.label}</b>, layer %{{x}}<br>%{{y:.4~g}}{spread}<extra></extra>",
    )


def _null_lines(dataset: xr.Dataset, line: Line, *, coloured: bool) -> list[go.Scatter]:
    """The nulls of a line, dashed. In a figure of several lines they take its colour and are explained once."""
    values = dataset[line.name]
    traces = []
    for role, null in _drawn_nulls(dataset, line.name, one=coloured).items():
        label = null_label(values, null)
        traces.append(
            go.Scatter(
                x=values["layer"].values,
                y=middle_and_spread(null.broadcast_like(values))[0],
                mode="lines",
                name=label,
                legendrank=3,
                showlegend=not coloured,
                line=_dashed(role, line.tone if coloured else "null"),
                hovertemplate=f"{line.label}, layer %{{x}}<br>{label}: %{{y:.4~g}}<extra></extra>",
            )
        )
    return traces


def _drawn_nulls(dataset: xr.Dataset, name: str, *, one: bool) -> dict[str, xr.DataArray]:
    """All nulls of a quantity, or the first of them where more would fill the figure."""
    nulls = nulls_of(dataset, name)
    return dict(list(nulls.items())[:1]) if one else nulls


def _null_keys(dataset: xr.Dataset, lines: Sequence[Line]) -> list[go.Scatter]:
    labels = {}
    for line in lines:
        nulls = _drawn_nulls(dataset, line.name, one=True)
        labels.update({role: null_label(dataset[line.name], null) for role, null in nulls.items()})
    shared = {"x": [None], "y": [None], "mode": "lines", "hoverinfo": "skip", "legendrank": 3}
    return [go.Scatter(name=f"dashed: {label}", line=_dashed(role, "null"), **shared) for role, label in labels.items()]


def _dashed(role: str, colour: str) -> dict:
    return {"color": tone(colour), "width": 1.5, "dash": _DASHES.get(role, "longdash")}


def _head_points(dataset: xr.Dataset, line: Line) -> go.Scatter:
    values = dataset[line.name].transpose("layer", "head")
    layers, heads = np.meshgrid(values["layer"].values, values["head"].values, indexing="ij")
    beside, text = _beside(dataset, line.name, ("layer", "head"))
    return go.Scatter(
        x=layers.ravel(),
        y=values.values.ravel(),
        customdata=np.concatenate([heads[..., None], beside], axis=-1).reshape(layers.size, -1),
        mode="markers",
        name="one head",
        legendrank=2,
        marker={"color": tone(line.tone), "size": 4.5, "opacity": 0.4},
        hovertemplate=f"layer %{{x}}, head %{{customdata[0]}}<br><b>%{{y:.4~g}}</b>{text(1)}<extra></extra>",
    )


def _beside(dataset: xr.Dataset, name: str, dims: tuple[str, ...]) -> tuple[np.ndarray, Callable[[int], str]]:
    """Error and nulls of every place, stacked last, and the words to show them from a given column of customdata on."""
    value = dataset[name]
    shown = ["se", *nulls_of(dataset, name)]
    beside = {role: other for role, other in siblings(dataset)[name].items() if role in shown}
    arrays = [other.broadcast_like(value).transpose(*dims).values for other in beside.values()]
    stacked = np.stack(arrays, axis=-1) if arrays else np.empty((*(value.sizes[dim] for dim in dims), 0))

    def text(first: int) -> str:
        words = ""
        for column, (role, other) in enumerate(beside.items(), start=first):
            before = " ± " if role == "se" else f"<br>{null_label(value, other)}: "
            words += f"{before}%{{customdata[{column}]:.3~g}}"
        return words

    return stacked, text


def heat_map(dataset: xr.Dataset, name: str, *, centre: Level | None = None) -> go.Figure:
    """A quantity by layer and head. With a centre (the null) colours diverge from it, equally far on both sides."""
    values = dataset[name].transpose("head", "layer")
    rows = values.sizes["head"]
    beside, text = _beside(dataset, name, ("head", "layer"))
    gap = 1 if values.size <= 2000 else 0
    figure = new_figure(
        height=int(np.clip(25 * rows + 130, 240, 680)),
        xaxis=layer_axis(values["layer"].values) | {"showgrid": False},
        yaxis=rows_downwards("head", values["head"].values),
        margin={"t": 62 if centre is None else 78},
    )
    figure.add_trace(
        go.Heatmap(
            x=values["layer"].values,
            y=values["head"].values,
            z=values.values,
            customdata=beside if beside.shape[-1] else None,
            xgap=gap,
            ygap=gap,
            hovertemplate=f"layer %{{x}}, head %{{y}}<br><b>%{{z:.4~g}}</b>{text(0)}<extra></extra>",
            **colours(values.values, centre, axis_name(dataset[name])),
        )
    )
    return figure


def colours(values: np.ndarray, centre: Level | None, title: str) -> dict:
    """Colour scale, its range and its bar above the figure, for a map of these values."""
    bar = {
        "orientation": "h",
        "x": 0,
        "xanchor": "left",
        "xpad": 0,
        "y": 1.0,
        "yanchor": "bottom",
        "ypad": 4,
        "len": 0.75,
        "thickness": 9,
        "outlinewidth": 0,
        "title": {"text": title, "side": "top", "font": {"size": 12.5}},
    }
    if centre is None:
        return {"colorscale": scale("sequential"), "colorbar": bar}
    away = np.abs(values[np.isfinite(values)] - centre.value)
    reach = float(away.max()) if away.size and away.max() > 0 else 1.0
    bar["title"]["text"] = f"{title}<br>middle colour {number(centre.value)}: {centre.label}"
    ends = {"zmin": centre.value - reach, "zmax": centre.value + reach}
    return {"colorscale": scale("diverging"), "colorbar": bar, **ends}
