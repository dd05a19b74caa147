"""Pictures of docs/results/networks.md from what run.py, measure.py and edits.py have left.

    python experiments/nets/figures.py runs/ measured/ edited/ --figures docs/results

Drawn by plotly in a headless browser (chromium on the search path).
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from playwright.sync_api import sync_playwright
from plotly.subplots import make_subplots
from tables import GATED, Readings, read

from rheoscope.nets.trainer import read_curve
from rheoscope.report.theme import at_depth, distinct, template

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
N_LAYERS = 4
POSITIONS = 8  # averaged in the curves of loss by position


def main() -> None:
    """Draw every picture there is something for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("measured", type=Path)
    parser.add_argument("edited", type=Path)
    parser.add_argument("--figures", type=Path, required=True)
    arguments = parser.parse_args()
    readings, edited = read(arguments.measured), read(arguments.edited)
    names = [name for name in ("sd_no_norm", "sd", "sd_linear", "softmax") if name in readings]
    curves = {name: [read_curve(arguments.runs / f"{name}-{s}") for s in readings[name]] for name in names}
    pictures = {
        "ranks": (ranks_over_training(curves), 420),
        "gates": (loss_by_position(readings), 400),
        "linear": (linear_layers(edited), 400),
        "sizes": (sizes_and_losses(readings), 400),
    }
    for name, (figure, height) in pictures.items():
        draw(figure, arguments.figures / f"networks-{name}.png", height)


def ranks_over_training(curves: dict[str, list[pd.DataFrame]]) -> go.Figure:
    """k90 of S by layer over training, one panel per network; dashed: without the bias of keys. Median of the seeds."""
    figure = make_subplots(1, len(curves), shared_yaxes=True, subplot_titles=list(curves), horizontal_spacing=0.04)
    for column, frames in enumerate(curves.values(), 1):
        for layer in range(N_LAYERS):
            for reading, dash in (("routing_k90", "solid"), ("routing_k90_gauge_removed", "dash")):
                probed = [frame.dropna(subset=f"{reading}_{layer}").set_index("step") for frame in frames]
                middle = pd.concat([frame[f"{reading}_{layer}"] for frame in probed], axis=1).median(axis=1)
                label = f"layer {layer}" + ("" if dash == "solid" else ", key bias removed")
                line = go.Scatter(
                    x=middle.index,
                    y=middle,
                    name=label,
                    mode="lines",
                    line={"color": at_depth(layer / (N_LAYERS - 1)), "dash": dash},
                    showlegend=column == 1,
                )
                figure.add_trace(line, row=1, col=column)
    figure.update_yaxes(type="log", tickvals=[2, 4, 8, 16, 32, 64])
    figure.update_yaxes(title="singular values that hold 90 %", col=1)
    figure.update_xaxes(title="step")
    return figure.update_layout(margin_t=100, legend_y=1.12)


def loss_by_position(readings: Readings) -> go.Figure:
    """Loss along the window, mean over seeds and eight places: whole window given, and the past alone (dashed)."""
    figure = go.Figure()
    for index, name in enumerate(GATED):
        for reading, dash in (("window", "solid"), ("prefix", "dash")):
            found = [one[reading] for one in readings.get(name, {}).values()]
            if not found:
                continue
            loss = np.mean(found, axis=0)
            usable = len(loss) // POSITIONS * POSITIONS
            label = name + (", whole window" if reading == "window" else ", past alone")
            figure.add_scatter(
                x=np.arange(1, usable + 1).reshape(-1, POSITIONS).mean(1),
                y=loss[:usable].reshape(-1, POSITIONS).mean(1),
                name=label,
                line={"color": distinct(index), "dash": dash},
            )
    return figure.update_layout(xaxis_title="position", yaxis_title="held-out loss, nats/byte")


def linear_layers(edited: Readings) -> go.Figure:
    """Loss change with the first n layers linear as they are, mean over seeds; bars: least and most."""
    figure = go.Figure()
    for name, seeds in edited.items():
        found = [one["linear"] for one in seeds.values()]
        change = np.array([[0.0, *one["linear_change"]] for one in found])
        mean = change.mean(0)
        spread = {"array": change.max(0) - mean, "arrayminus": mean - change.min(0)}
        layers = [0, *found[0]["n_linear"]]
        figure.add_scatter(x=layers, y=mean, error_y=spread, name=name, mode="lines+markers")
    figure.update_xaxes(title="layers made linear, from the first", dtick=1)
    return figure.update_yaxes(title="loss change, nats/byte")


def sizes_and_losses(readings: Readings) -> go.Figure:
    """Held-out loss against attention parameters for head sizes by depth; a point per seed."""
    figure = go.Figure()
    chosen = {
        name: seeds
        for name, seeds in readings.items()
        if name == "sd_no_norm" or next(iter(seeds.values()))["recipe"]["head_dims"] is not None
    }
    for name, seeds in chosen.items():
        dims = next(iter(seeds.values()))["recipe"]["head_dims"] or [32] * N_LAYERS
        figure.add_scatter(
            x=[one["attention_parameters"] for one in seeds.values()],
            y=[np.mean(one["held_out"]) for one in seeds.values()],
            name=f"{name}: {', '.join(map(str, dims))}",
            mode="markers",
            marker={"size": 9},
        )
    return figure.update_layout(xaxis_title="attention parameters", yaxis_title="held-out loss, nats/byte")


def draw(figure: go.Figure, path: Path, height: int) -> None:
    """Write a figure as a picture."""
    browser = next(found for name in BROWSERS if (found := shutil.which(name)))
    figure.update_layout(template=template(), width=900, height=height)
    page_text = figure.to_html(include_plotlyjs=True, config={"staticPlot": True})
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        page = opened.new_page(viewport={"width": 920, "height": height + 20})
        page.set_content(page_text)
        page.wait_for_selector(".main-svg")
        page.query_selector(".plotly-graph-div").screenshot(path=str(path))
        opened.close()


if __name__ == "__main__":
    main()
