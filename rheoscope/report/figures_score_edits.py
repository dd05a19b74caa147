"""What the report shows of edits of scores: loss against rank, simple forms of the scores, layers without a softmax."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from rheoscope.report.axes import axis_name
from rheoscope.report.figures import caption, new_figure
from rheoscope.report.figures_steering_edits import errors_of
from rheoscope.report.panels import Panel, Question, View
from rheoscope.report.theme import tone


def rank_figure(dataset: xr.Dataset) -> go.Figure:
    """Loss change against the rank that routing, or filtering, is cut to; ranks evenly spaced."""
    ranks = [str(rank) for rank in dataset["rank"].values]
    figure = new_figure(
        xaxis={"title": {"text": axis_name(dataset["rank"])}, "type": "category"},
        yaxis={"title": {"text": "loss change (nats/token)"}, "rangemode": "tozero"},
    )
    for part in ("routing", "filtering"):
        if f"{part}_change" in dataset:
            _add_line(figure, ranks, dataset, f"{part}_change", colour=part, name=f"{part} cut, the rest as it is")
    return figure


def forms_figure(dataset: xr.Dataset) -> go.Figure:
    """Loss change under every simple form of the scores."""
    figure = new_figure(
        height=330,
        xaxis={"showgrid": False},
        yaxis={"title": {"text": axis_name(dataset.score_edit_change)}, "rangemode": "tozero"},
        showlegend=False,
    )
    forms = [str(form) for form in dataset.score_edit.values]
    figure.add_trace(
        go.Bar(
            x=forms,
            y=dataset.score_edit_change.values,
            error_y=errors_of(dataset.score_edit_change_se, tone("ink")),
            marker={"color": [tone("routing" if "routing" in form else "filtering") for form in forms], "opacity": 0.8},
            hovertemplate="%{x}<br><b>%{y:+.4f}</b> ± %{error_y.array:.2~g} nats/token<extra></extra>",
        )
    )
    return figure


def linear_figure(dataset: xr.Dataset) -> go.Figure:
    """Loss change against the number of layers without a softmax."""
    figure = new_figure(
        xaxis={"title": {"text": axis_name(dataset.n_linear)}, "rangemode": "tozero"},
        yaxis={"title": {"text": axis_name(dataset.linear_change)}, "rangemode": "tozero"},
        showlegend=False,
    )
    _add_line(figure, dataset.n_linear.values, dataset, "linear_change", colour="score", name="linear layers")
    return figure


def _add_line(figure: go.Figure, x: object, dataset: xr.Dataset, variable: str, *, colour: str, name: str) -> None:
    figure.add_trace(
        go.Scatter(
            x=x,
            y=dataset[variable].values,
            error_y=errors_of(dataset[f"{variable}_se"], tone(colour)),
            mode="lines+markers",
            line={"color": tone(colour), "width": 2.25},
            name=name,
            hovertemplate="%{x}<br><b>%{y:+.4f}</b> ± %{error_y.array:.2~g} nats/token<extra></extra>",
        )
    )


def _scores(dataset: xr.Dataset) -> Panel:
    none = f"Without routing the model loses {float(dataset.routing_change.sel(rank=0)):+.3f} nats per token"
    plane = f"with one plane of it {float(dataset.routing_change.sel(rank=2)):+.3f}" if 2 in dataset["rank"] else ""
    bias = float(dataset.score_edit_change.sel(score_edit="key-bias routing"))
    names = [name for name in ("routing_change", "filtering_change") if name in dataset]
    return Panel(
        title="How much of the scores does the model need?",
        answer=f"{none}{', ' if plane else ''}{plane}; with routing as a bias of every key alone {bias:+.3f}.",
        views=(
            View("By rank", rank_figure(dataset), " ".join(caption(dataset, name) for name in names)),
            View("Simple forms", forms_figure(dataset), caption(dataset, "score_edit_change")),
        ),
        quantities=(*names, "score_edit_change"),
    )


def _linear(dataset: xr.Dataset) -> Panel:
    first, last = dataset.linear_change.isel(n_linear=0), dataset.linear_change.isel(n_linear=-1)
    growth = f"{100 * np.expm1(float(first)):+.1f} %"
    return Panel(
        title="How many layers can do without the softmax?",
        answer=f"With {int(first.n_linear)} linear the loss changes by {float(first):+.3f} nats per token ({growth} "
        f"perplexity), with {int(last.n_linear)} by {float(last):+.3f}. No weight was trained again.",
        views=(View("By number of layers", linear_figure(dataset), caption(dataset, "linear_change")),),
        quantities=("linear_change",),
    )


SCORE_EDITS = (
    Question(("routing_change", "score_edit_change"), _scores),
    Question(("linear_change",), _linear),
)
