"""The page of two runs side by side: tables of differences, and where they lie by layer and head."""

from __future__ import annotations

from importlib import resources
from typing import Any

import plotly.graph_objects as go
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from rheoscope.report import theme
from rheoscope.report.comparison import CLEAR, Comparison, Difference
from rheoscope.report.facts import in_one_line, name_of
from rheoscope.report.figures import new_figure
from rheoscope.report.page import anchor, figures_as_json, policy, template
from rheoscope.report.words import number, visible, worded

MOST_MAPS = 12  # figures of one instrument, those that change most for their spread


def comparison_html(comparison: Comparison) -> str:
    """The page as text. It opens from disk and asks for nothing from a network."""
    scripts = [get_plotlyjs(), resources.files(__package__).joinpath("page.js").read_text(encoding="utf-8")]
    sections = [_section(name, comparison.of(name)) for name in comparison.instruments]
    figures = {entry["id"]: [entry["figure"]] for section in sections for entry in section["maps"]}
    return template("comparison.html.j2").render(
        names=[name_of(part) for part in (comparison.before, comparison.after)],
        lines=[in_one_line(part) for part in (comparison.before, comparison.after)],
        pairing=pairing(comparison),
        clear=f"{CLEAR:g}",
        headings=HEADINGS,
        sections=sections,
        left_out=worded(list(comparison.left_out)),
        style=Markup(resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")),
        tones=theme.TONES,
        font=Markup(theme.FONT),
        scripts=[Markup(script) for script in scripts],
        policy=policy(scripts),
        data=figures_as_json(figures, {name: ["difference"] for name in figures}),
    )


def pairing(comparison: Comparison) -> str:
    """Where the errors of differences come from."""
    if not comparison.same_text:
        return "The runs read different texts: errors are taken from both."
    if comparison.paired:
        return "Both read the same text: losses are paired by document."
    return "Both read the same text, without losses of several documents to pair: errors are taken from both."


def _section(instrument: str, differences: list[Difference]) -> dict[str, Any]:
    """Rows of a table and the maps of one instrument."""
    maps = [one for one in differences if one.by_place is not None and one.change == one.change]
    maps.sort(key=lambda one: -abs(one.change) / (float(one.by_place.std()) or float("inf")))
    return {
        "title": instrument,
        "id": anchor(instrument),
        "rows": [row(one) for one in differences],
        "maps": [
            {"id": anchor(f"{instrument} {one.quantity}"), "title": visible(one.long_name), "figure": _map(one)}
            for one in maps[:MOST_MAPS]
        ],
    }


def row(one: Difference) -> list[str]:
    """A line of the table: name, unit, both values, the change, its error, and where it is clear."""
    clear = "" if one.n_clear is None else f"{one.n_clear} of {one.n_places}"
    how = "" if one.n_places == 1 else f" (mean of {one.n_places})"
    error = "" if one.se is None or one.se != one.se else f"± {one.se:.2g}{', paired' if one.paired else ''}"
    unit = "" if one.unit == "1" else one.unit
    change = f"{one.change:+.3g}" if one.change == one.change else "not defined"
    return [visible(one.long_name) + how, unit, number(one.before), number(one.after), change, error, clear]


HEADINGS = ("quantity", "unit", "first", "second", "change", "error", f"places beyond {CLEAR:g} errors")


def _map(one: Difference) -> go.Figure:
    """Difference by layer and head; white is none."""
    values = one.by_place
    bound = float(abs(values).max()) or 1.0
    figure = new_figure(
        height=120 + 14 * values.sizes["layer"],
        xaxis={"title": {"text": "head"}},
        yaxis={"title": {"text": "layer"}, "autorange": "reversed"},
    )
    figure.add_trace(
        go.Heatmap(
            z=values.values,
            x=values["head"].values,
            y=values["layer"].values,
            zmin=-bound,
            zmax=bound,
            colorscale=theme.scale("diverging"),
            hovertemplate="layer %{y}, head %{x}<br>change <b>%{z:.4~g}</b><extra></extra>",
        )
    )
    return figure
