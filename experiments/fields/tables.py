"""Tables of the experiment on fields as Markdown, and its figures as pictures.

    python experiments/fields/tables.py runs/ > tables.md
    python experiments/fields/tables.py runs/ --figures docs/results

Figures are drawn by the report's own forms in a headless browser (chromium on the search path).
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from playwright.sync_api import sync_playwright

from rheoscope.report.figures_by_scale import lines_by_layer, mode_pictures, scale_map, scales_by_depth
from rheoscope.run import Run

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--figures", type=Path)
    arguments = parser.parse_args()
    for path in sorted(arguments.runs.glob("*.nc")):
        model, stage = re.fullmatch(r"(.+)-([a-z_]+\d+)", path.stem).groups()
        data = Run.load(path)["fields"]
        print(f"\n### {model}, {stage}: {data.attrs['n_snapshots']} snapshots, {data.attrs['n']} units\n")
        print(table(data))
        if arguments.figures and stage == "n150":
            for name, figure in figures(data).items():
                draw(figure, arguments.figures / f"fields-{model}-{name}.png")


def table(data: xr.Dataset) -> str:
    """One row per layer."""
    whole = data.isel(band=-1)
    ninety = data.sel(level=90.0)
    compared = (
        "scale_energy_null" in data or data.attrs["dominant_rule"] == "raw"
    )  # else there is no null to compare with
    columns: dict[str, Callable[[int], str]] = {
        "layer": lambda i: str(i),
        "intensity": lambda i: with_error(data.intensity[i], data.intensity_se[i]),
        "sink share of variance": lambda i: f"{float(data.sink_variance_share[i]):.2f}",
        "dominant scales": lambda i: listed(data.dominant_scale[i]) if compared else "–",
        "H*(0.10) by window": lambda i: listed(ninety.h_star[i]),
        "± (all)": lambda i: f"{float(ninety.h_star_se[i, -1]):.1f}",
        "H*(0.10), whole map": lambda i: f"{float(ninety.h_star_everything[i]):.0f}",
        "β (95 %)": lambda i: (
            f"{float(whole.beta[i]):.2f} ({float(whole.beta_low[i]):.2f}, {float(whole.beta_high[i]):.2f})"
        ),
        "T": lambda i: f"{float(whole.spectral_temperature[i]):.2f}",
        "held out at H*(0.10)": lambda i: f"{float(ninety.held_out_at_h_star[i, -1]):.2f}",
        "peak lags": lambda i: listed(peak_lags(whole.mode_lag_profile[i])),
    }
    rows = [[cell(i) for cell in columns.values()] for i in range(data.sizes["layer"])]
    lines = [list(columns), ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def peak_lags(profile: xr.DataArray) -> xr.DataArray:
    """Peak distances of modes over the lags that a quarter of the rows have, as `mode_peak_lag` is now."""
    reached = profile.where(abs(profile.lag) <= 3 / 4 * profile.lag.max(), drop=True)
    return reached.lag[abs(reached).fillna(-1).argmax("lag")]


def with_error(value: xr.DataArray, error: xr.DataArray) -> str:
    return f"{float(value):.3g} ± {float(error):.1g}"


def listed(values: xr.DataArray) -> str:
    known = values.values[np.isfinite(values.values)]
    return ", ".join(f"{value:.3g}" for value in known) or "none"


def figures(data: xr.Dataset) -> dict[str, go.Figure]:
    """The figures of one model that the page of results shows."""
    last = int(data["layer"].values[-1])
    whole = data.isel(band=-1).sel(level=90.0)
    chance = data.get("scale_energy_null", 1.0)
    return {
        "scales": scales_by_depth(data.scale_energy / chance, data.dominant_scale, "energy over untrained"),
        "scalogram": scale_map(data.scalogram_by_position.sel(layer=last), "position", "position", "energy"),
        "count": lines_by_layer(
            whole.h_star_by_count,
            "count",
            title="number of texts",
            axis="modes that hold 90 %",
            log=False,
            dashed=whole.get("h_star_by_count_null"),
        ),
        "modes": mode_pictures(data.isel(band=-1).sel(layer=last)),
    }


def draw(figure: go.Figure, path: Path) -> None:
    """Write a figure as a picture."""
    browser = next(found for name in BROWSERS if (found := shutil.which(name)))
    figure.update_layout(width=900)
    page_text = figure.to_html(include_plotlyjs=True, config={"staticPlot": True})
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        page = opened.new_page(viewport={"width": 920, "height": 600})
        page.set_content(page_text)
        page.wait_for_selector(".main-svg")
        page.query_selector(".plotly-graph-div").screenshot(path=str(path))
        opened.close()


if __name__ == "__main__":
    main()
