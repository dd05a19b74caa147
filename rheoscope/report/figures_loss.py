"""What the report shows of the loss: how well the model predicts this text, where in a window, and which documents."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from rheoscope.report.axes import POWERS_OF_TWO, axis_name
from rheoscope.report.figures import Level, add_level, caption, new_figure, plain
from rheoscope.report.panels import Panel, Question, Section, View
from rheoscope.report.theme import tone
from rheoscope.report.words import number

_BARS = 40
_POINTS_DRAWN = 3000  # in one figure; more are slow in a browser and lie on top of each other


def thinned(values: xr.DataArray) -> tuple[xr.DataArray, int]:
    """Every k-th entry of a long array, and k, so that a figure stays quick."""
    step = -(-values.size // _POINTS_DRAWN)
    return values[::step], step


def _loss_by_position(dataset: xr.Dataset) -> Panel:
    values = dataset.nll_by_position.values
    defined = values[np.isfinite(values)]
    quarter = max(len(defined) // 4, 1)
    first, last = defined[:quarter].mean(), defined[-quarter:].mean()
    change = "falls" if last < first else "does not fall:"
    return Panel(
        title="Does more context help?",
        answer=f"The loss {change} from {number(first)} nats per token in the first quarter of the window "
        f"to {number(last)} in the last.",
        views=(View("", position_figure(dataset), caption(dataset, "nll_by_position")),),
        quantities=("nll_by_position",),
    )


def position_figure(dataset: xr.Dataset) -> go.Figure:
    """Loss against the place in the window, every place a point."""
    values, step = thinned(dataset.nll_by_position)
    figure = new_figure(
        height=330,
        xaxis={"title": {"text": "place in the window (tokens)"}, "rangemode": "tozero"},
        yaxis={"title": {"text": axis_name(values)}},
        showlegend=False,
        margin={"t": 16},
    )
    errors = dataset.get("nll_by_position_se")
    figure.add_trace(
        go.Scatter(
            x=values["position"].values,
            y=values.values,
            customdata=None if errors is None else errors.values[::step],
            mode="markers",
            marker={"color": tone("routing"), "size": 4, "opacity": 0.6},
            hovertemplate="place %{x}<br><b>%{y:.4~g}</b>"
            + ("" if errors is None else " ± %{customdata:.2~g}")
            + " nats/token<extra></extra>",
        )
    )
    if "nll_mean" in dataset:
        add_level(figure, Level(float(dataset.nll_mean), f"mean: {number(float(dataset.nll_mean))}"))
    return figure


def _loss_by_document(dataset: xr.Dataset) -> Panel | None:
    values = dataset.nll.values[np.isfinite(dataset.nll.values)]
    if values.size < 2:
        return None
    low, high = np.quantile(values, [0.1, 0.9])
    views = [View("Distribution", document_histogram(dataset), "How many documents have which loss.")]
    if "tokens" in dataset:
        step = thinned(dataset.nll)[1]
        words = "Every point is a document. Short ones scatter more, as their mean is taken over fewer tokens."
        words += f" One of every {step} documents is drawn." if step > 1 else ""
        views.append(View("By length", document_scatter(dataset), words))
    return Panel(
        title="Which documents are hard?",
        answer=f"Of {values.size:,} documents, 80 % have a loss of {number(low)} to {number(high)} nats per token.",
        views=tuple(views),
        quantities=("nll", *(["tokens"] if "tokens" in dataset else [])),
    )


def document_histogram(dataset: xr.Dataset) -> go.Figure:
    """Number of documents by loss."""
    values = dataset.nll.values[np.isfinite(dataset.nll.values)]
    counts, edges = np.histogram(values, bins=int(np.clip(values.size // 3, 1, _BARS)))
    figure = new_figure(
        height=330,
        xaxis={"title": {"text": axis_name(dataset.nll)}, "showgrid": False},
        yaxis={"title": {"text": "documents"}} | ({"dtick": 1} if counts.max() < 10 else {}),
        showlegend=False,
        margin={"t": 16},
    )
    figure.add_trace(
        go.Bar(
            x=(edges[:-1] + edges[1:]) / 2,
            y=counts,
            width=0.94 * np.diff(edges),
            customdata=np.stack([edges[:-1], edges[1:]], axis=-1),
            marker={"color": tone("routing"), "opacity": 0.75},
            hovertemplate="<b>%{y}</b> documents<br>%{customdata[0]:.4~g} to %{customdata[1]:.4~g} nats/token"
            "<extra></extra>",
        )
    )
    return figure


def document_scatter(dataset: xr.Dataset) -> go.Figure:
    """Loss of every document against its length."""
    values, step = thinned(dataset.nll)
    figure = new_figure(
        height=380,
        xaxis={"title": {"text": axis_name(dataset.tokens)}, **POWERS_OF_TWO},
        yaxis={"title": {"text": axis_name(dataset.nll)}},
        showlegend=False,
        margin={"t": 16},
    )
    figure.add_trace(
        go.Scatter(
            x=dataset.tokens.values[::step],
            y=values.values,
            customdata=[plain(name) for name in values["document"].values],
            mode="markers",
            marker={"color": tone("routing"), "size": 6, "opacity": 0.55},
            hovertemplate="document %{customdata}<br><b>%{y:.4~g}</b> nats/token<br>%{x:,} tokens<extra></extra>",
        )
    )
    return figure


LOSS = Section(
    title="Loss",
    instrument="loss",
    lead="How well the model predicts this text. Every other reading belongs to this model on this text, "
    "and every edit is judged by what it does to these numbers.",
    questions=(
        Question(("nll_by_position",), _loss_by_position),
        Question(("nll",), _loss_by_document),
    ),
)
