"""What the report shows of critical directions: how many of which kind, beside chance, and portraits of the flow."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from rheoscope.report.figures import caption, new_figure
from rheoscope.report.panels import Panel, Question, Section, View
from rheoscope.report.theme import distinct, scale, tone
from rheoscope.report.words import percent
from rheoscope.theory.portraits import REACH

KINDS = {"critical_kind_share": "found", "critical_kind_share_null_directions": "random"}
NULL_WEIGHTS = {"critical_kind_share_null_weights": "shuffled"}
_BESIDE = " Random: directions that are not critical. Shuffled: critical ones of the layer with shuffled FFN weights."
_ARROW = 0.42  # length of an arrow, in steps of the grid


def _kinds(dataset: xr.Dataset) -> Panel:
    found = dataset.critical_kind_share.sel(kind="saddle")
    chance = dataset.critical_kind_share_null_directions.sel(kind="saddle")
    said = [
        f"{field}: {int(dataset.critical_distinct.sel(field=field))}, {percent(float(found.sel(field=field)))} saddles "
        f"(random directions {percent(float(chance.sel(field=field)))})"
        for field in map(str, dataset.field.values)
    ]
    return Panel(
        title=f"Which directions does layer {dataset.attrs.get('layer', '?')} leave alone?",
        answer=f"From {dataset.attrs.get('n', 0)} starts, {'; '.join(said)}.",
        views=(
            View("Kinds", kind_bars(dataset), caption(dataset, "critical_kind_share") + _BESIDE),
            View("Ways out", ways_out(dataset), caption(dataset, "critical_rising_share")),
        ),
        quantities=(
            "critical_kind_share",
            "critical_rising_share",
            "critical_distinct",
            "critical_converged",
            "critical_rotational_share",
        ),
    )


def kind_bars(dataset: xr.Dataset) -> go.Figure:
    """Shares of the kinds of each field: of what was found, of random directions, of shuffled weights."""
    shown = KINDS | {name: label for name, label in NULL_WEIGHTS.items() if name in dataset}
    fields = list(map(str, dataset.field.values))
    labels = [[field for field in fields for _ in shown], [label for _ in fields for label in shown.values()]]
    figure = new_figure(barmode="stack", yaxis={"title": {"text": "share"}, "range": [0, 1]}, xaxis={"showgrid": False})
    for index, kind in enumerate(map(str, dataset.kind.values)):
        values = [float(dataset[name].sel(field=field, kind=kind)) for field in fields for name in shown]
        figure.add_trace(
            go.Bar(
                x=labels,
                y=values,
                name=kind,
                marker={"color": distinct(index), "opacity": 0.85},
                hovertemplate=f"{kind}: <b>%{{y:.0%}}</b><extra></extra>",
            )
        )
    return figure


def ways_out(dataset: xr.Dataset) -> go.Figure:
    """Every critical direction a point: the share of tangent directions along which the flow leads away from it."""
    vertical = {"title": {"text": "share of rising tangent directions"}, "range": [0, 1]}
    figure = new_figure(yaxis=vertical, xaxis={"showgrid": False})
    for index, field in enumerate(map(str, dataset.field.values)):
        values = dataset.critical_rising_share.sel(field=field).values
        points = {"color": distinct(index), "size": 6, "opacity": 0.5}
        figure.add_trace(
            go.Box(y=values, name=field, boxpoints="all", jitter=0.6, pointpos=0, marker=points, showlegend=False)
        )
    if "critical_rising_share_null_directions" in dataset:
        chance = dataset.critical_rising_share_null_directions
        marks = {"symbol": "line-ew-open", "size": 60, "color": tone("null"), "line": {"width": 2}}
        names = list(map(str, dataset.field.values))
        figure.add_trace(
            go.Scatter(x=names, y=chance.values, mode="markers", marker=marks, name="mean of random directions")
        )
    return figure


def _portraits(dataset: xr.Dataset) -> Panel:
    views = [
        View(str(number_), portrait_figure(dataset.isel(slice=number_)), caption(dataset, "portrait_score"))
        for number_ in range(dataset.sizes["slice"])
    ]
    return Panel(
        title="What does the flow look like around them?",
        answer="Each picture is a slice of the sphere through two critical directions of the full field, marked by "
        "rings. "
        "Arrows show where the flow leads within the slice; dark places turn much, light ones stand still.",
        views=tuple(views),
        quantities=("portrait_score", "portrait_a", "portrait_b", "portrait_velocity_a", "portrait_velocity_b"),
        choice="slice",
    )


def portrait_figure(slice_: xr.Dataset) -> go.Figure:
    """Zero score as colour, the flow within the slice as arrows of equal length, the pair as rings."""
    a, b = slice_.portrait_a.values, slice_.portrait_b.values
    figure = new_figure(
        height=560,
        xaxis={
            "title": {"text": "from the first to the second critical direction"},
            "showgrid": False,
            "constrain": "domain",
        },
        yaxis={"title": {"text": "across"}, "scaleanchor": "x", "showgrid": False},
        showlegend=False,
        margin={"t": 20},
    )
    bar = {"title": {"text": "zero score"}, "thickness": 10, "outlinewidth": 0}
    score = slice_.portrait_score.values
    figure.add_trace(
        go.Heatmap(
            x=a[0],
            y=b[:, 0],
            z=score,
            colorscale=scale("sequential"),
            zsmooth="best",
            opacity=0.55,  # arrows must show on it
            colorbar=bar,
            hovertemplate="a %{x:.2f}, b %{y:.2f}<br>zero score <b>%{z:.3f}</b><extra></extra>",
        )
    )
    x, y = arrows(a, b, slice_.portrait_velocity_a.values, slice_.portrait_velocity_b.values)
    figure.add_trace(go.Scatter(x=x, y=y, mode="lines", line={"color": tone("ink"), "width": 1.1}, hoverinfo="skip"))
    pair = a[0, -1] / REACH
    figure.add_trace(
        go.Scatter(
            x=[-pair, pair],
            y=[0, 0],
            mode="markers",
            marker={"size": 13, "color": "rgba(0,0,0,0)", "line": {"width": 2.5, "color": tone("filtering")}},
            hovertemplate="critical direction<extra></extra>",
        )
    )
    return figure


def arrows(a: np.ndarray, b: np.ndarray, to_a: np.ndarray, to_b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Line segments of arrows of one length with two barbs each, NaN between them."""
    speed = np.hypot(to_a, to_b)
    safe = np.where(speed > 0, speed, np.nan)
    ahead, across = to_a / safe, to_b / safe
    length = 2 * _ARROW * abs(a[0, 1] - a[0, 0])
    tip_x, tip_y = a + ahead * length / 2, b + across * length / 2
    tail_x, tail_y = a - ahead * length / 2, b - across * length / 2
    barb = 0.35 * length
    ends = []
    for side in (1, -1):
        ends.append((tip_x - barb * (ahead - side * 0.5 * across), tip_y - barb * (across + side * 0.5 * ahead)))
    gap = np.full_like(a, np.nan)
    x = np.stack([tail_x, tip_x, ends[0][0], gap, tip_x, ends[1][0], gap], -1).ravel()
    y = np.stack([tail_y, tip_y, ends[0][1], gap, tip_y, ends[1][1], gap], -1).ravel()
    return x, y


CRITICALS = Section(
    title="Critical directions",
    instrument="criticals",
    lead="Directions that a layer's flow would leave alone if every token pointed along them: where tokens come to "
    "rest, "
    "from where they are driven away, and where both happen.",
    questions=(
        Question(("critical_kind_share", "critical_kind_share_null_directions"), _kinds),
        Question(("portrait_score",), _portraits),
    ),
)
