"""Figures of ablations: bars with errors, curves with the band of random choices, defect beside its measured cost."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from rheoscope.report.axes import axis_name, layer_axis
from rheoscope.report.figures import Level, add_level, new_figure
from rheoscope.report.theme import at_depth, distinct, tone

SPARED = {"none": "every token changed", "first": "first tokens left alone", "massive": "massive tokens left alone"}


def errors_of(values: xr.DataArray | None, colour: str) -> dict | None:
    """Error bars of one standard error."""
    if values is None:
        return None
    return {"type": "data", "array": values.values, "width": 3, "thickness": 1.2, "color": colour}


def variant_bars(dataset: xr.Dataset) -> go.Figure:
    """Loss change of every variant, a bar for every choice of tokens left alone."""
    figure = new_figure(
        barmode="group",
        xaxis={"showgrid": False},
        yaxis={"title": {"text": axis_name(dataset.variant_change)}, "rangemode": "tozero"},
    )
    for index, spare in enumerate(map(str, dataset.spare.values)):
        row = dataset.sel(spare=spare)
        figure.add_trace(
            go.Bar(
                x=[str(variant) for variant in dataset.variant.values],
                y=row.variant_change.values,
                error_y=errors_of(row.variant_change_se, tone("ink")),
                name=SPARED.get(spare, spare),
                marker={"color": distinct(index), "opacity": 0.8},
                text=[f"{value:+.2f}<br> " for value in row.variant_change.values],  # clear of the error bar
                textposition="outside",
                hovertemplate="%{x}<br><b>%{y:+.4f}</b> ± %{error_y.array:.2~g} nats/token<extra></extra>",
            )
        )
    return figure


def lines_by(
    dataset: xr.Dataset, name: str, dim: str, *, axis: str = "", ordered: bool = False, label: str = "{}"
) -> go.Figure:
    """One line by depth for every entry of a dim; in the colours of depth where the entries have an order."""
    values = dataset[name].transpose(dim, "layer")
    figure = new_figure(
        xaxis=layer_axis(dataset.layer.values), yaxis={"title": {"text": axis or axis_name(dataset[name])}}
    )
    count = values.sizes[dim]
    for index, entry in enumerate(dataset[dim].values):
        colour = at_depth(index / max(count - 1, 1)) if ordered else distinct(index)
        figure.add_trace(
            go.Scatter(
                x=dataset.layer.values,
                y=values[index].values,
                error_y=errors_of(dataset[f"{name}_se"].sel({dim: entry}), colour) if f"{name}_se" in dataset else None,
                mode="lines+markers",
                marker={"size": 5},
                line={"color": colour, "width": 2},
                name=label.format(entry),
                hovertemplate=f"{entry}, layer %{{x}}<br><b>%{{y:.4~g}}</b><extra></extra>",
            )
        )
    return figure


def defect_beside_cost(dataset: xr.Dataset) -> go.Figure:
    """By depth: loss change when a layer alone is made parallel (bars), and its defect (line, right axis)."""
    figure = new_figure(
        xaxis=layer_axis(dataset.layer.values),
        yaxis={"title": {"text": "loss change (nats/token)"}},
        yaxis2={
            "title": {"text": "defect"},
            "overlaying": "y",
            "side": "right",
            "rangemode": "tozero",
            "showgrid": False,
        },
        margin={"r": 60},
    )
    figure.add_trace(
        go.Bar(
            x=dataset.layer.values,
            y=dataset.parallel_change_by_layer.values,
            error_y=errors_of(dataset.parallel_change_by_layer_se, tone("ink")),
            name="loss change, this layer parallel",
            marker={"color": tone("routing"), "opacity": 0.7},
            hovertemplate="layer %{x}<br><b>%{y:+.4f}</b> ± %{error_y.array:.2~g} nats/token<extra></extra>",
        )
    )
    figure.add_trace(
        go.Scatter(
            x=dataset.layer.values,
            y=dataset.parallel_defect.values,
            yaxis="y2",
            mode="lines+markers",
            line={"color": tone("filtering"), "width": 2},
            name="defect",
            hovertemplate="layer %{x}<br>defect <b>%{y:.3~g}</b><extra></extra>",
        )
    )
    return figure


def defect_against_cost(dataset: xr.Dataset) -> go.Figure:
    """Every layer a point: what its defect foretells, and what making it parallel costs."""
    layers = dataset.layer.values
    figure = new_figure(
        xaxis={"title": {"text": "defect"}, "rangemode": "tozero"},
        yaxis={"title": {"text": "loss change, this layer parallel (nats/token)"}},
        showlegend=False,
    )
    figure.add_trace(
        go.Scatter(
            x=dataset.parallel_defect.values,
            y=dataset.parallel_change_by_layer.values,
            error_y=errors_of(dataset.parallel_change_by_layer_se, tone("muted")),
            mode="markers+text",
            text=[str(layer) for layer in layers],
            textposition="top center",
            marker={"size": 9, "color": [at_depth(k / max(len(layers) - 1, 1)) for k in range(len(layers))]},
            hovertemplate="layer %{text}<br>defect %{x:.3~g}<br><b>%{y:+.4f}</b> nats/token<extra></extra>",
        )
    )
    return figure


def parallel_curves(dataset: xr.Dataset, *, log: bool = False) -> go.Figure:
    """Loss change against the number of parallel layers, with the band of the random choices."""
    sizes, random = dataset.n_parallel.values, dataset.parallel_change_random
    vertical = {"title": {"text": "loss change (nats/token)"}} | ({"type": "log"} if log else {"rangemode": "tozero"})
    figure = new_figure(xaxis={"title": {"text": "parallel layers"}, "rangemode": "tozero"}, yaxis=vertical)
    edge = {"x": sizes, "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    figure.add_trace(go.Scatter(y=random.min("choice").values, **edge))
    figure.add_trace(go.Scatter(y=random.max("choice").values, fill="tonexty", fillcolor=tone("score band"), **edge))
    curves = {
        f"random, mean and range of {dataset.sizes['choice']}": (random.mean("choice"), None, "score"),
        "low defect first": (dataset.parallel_change_low, dataset.parallel_change_low_se, "routing"),
        "low displacement first": (
            dataset.parallel_change_displacement,
            dataset.parallel_change_displacement_se,
            "residue",
        ),
        "high defect first": (dataset.parallel_change_high, dataset.parallel_change_high_se, "filtering"),
    }
    for label, (values, error, colour) in curves.items():
        figure.add_trace(
            go.Scatter(
                x=sizes,
                y=values.values,
                error_y=errors_of(error, tone(colour)),
                mode="lines+markers",
                line={"color": tone(colour), "width": 2.25},
                name=label,
                hovertemplate=f"{label}<br>%{{x}} layers: <b>%{{y:+.4f}}</b> nats/token<extra></extra>",
            )
        )
    return figure


def gate_figure(dataset: xr.Dataset) -> go.Figure:
    """The fitted factor of every layer."""
    figure = new_figure(
        height=330,
        xaxis=layer_axis(dataset.layer.values),
        yaxis={"title": {"text": axis_name(dataset.gate)}},
        showlegend=False,
        margin={"t": 16},
    )
    figure.add_trace(
        go.Scatter(
            x=dataset.layer.values,
            y=dataset.gate.values,
            mode="lines+markers",
            line={"color": tone("filtering"), "width": 2},
            hovertemplate="layer %{x}<br>gate <b>%{y:.3f}</b><extra></extra>",
        )
    )
    add_level(figure, Level(1.0, "as it was"))
    return figure


def gain_figure(dataset: xr.Dataset) -> go.Figure:
    """Loss change against the factor on attention."""
    figure = new_figure(
        height=330,
        xaxis={"title": {"text": axis_name(dataset.gain)}},
        yaxis={"title": {"text": axis_name(dataset.gain_change)}},
        showlegend=False,
        margin={"t": 16},
    )
    figure.add_trace(
        go.Scatter(
            x=dataset.gain.values,
            y=dataset.gain_change.values,
            error_y=errors_of(dataset.gain_change_se, tone("routing")),
            mode="lines+markers",
            line={"color": tone("routing"), "width": 2},
            hovertemplate="gain %{x}<br><b>%{y:+.4f}</b> nats/token<extra></extra>",
        )
    )
    return figure


def response_figure(dataset: xr.Dataset) -> go.Figure:
    """Response of attention against lag, a line for some layers in the colours of depth."""
    layers = dataset.layer.values
    chosen = np.unique(np.linspace(0, len(layers) - 1, 8).round().astype(int))
    figure = new_figure(
        xaxis={"title": {"text": "lag + 1 (tokens)"}, "type": "log"},
        yaxis={"title": {"text": axis_name(dataset.attention_response)}, "type": "log"},
    )
    for index in chosen:
        values = dataset.attention_response.isel(layer=index).values
        figure.add_trace(
            go.Scatter(
                x=dataset.lag.values + 1,
                y=np.where(values > 0, values, np.nan),
                mode="lines",
                line={"color": at_depth(index / max(len(layers) - 1, 1)), "width": 1.8},
                name=f"layer {layers[index]}",
                hovertemplate=f"layer {layers[index]}, lag + 1 = %{{x}}<br><b>%{{y:.3~g}}</b><extra></extra>",
            )
        )
    return figure
