"""One self-contained HTML page: what was measured, and the figures of every instrument in the run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

import jinja2
import plotly.graph_objects as go
from markupsafe import Markup
from plotly.offline import get_plotlyjs
from plotly.utils import PlotlyJSONEncoder

from rheoscope.errors import RheoscopeError
from rheoscope.instruments.catalog import CATALOG, Quantity
from rheoscope.report import theme
from rheoscope.report.facts import checks, facts, in_one_line, name_of, tiles
from rheoscope.report.panels import Panel
from rheoscope.report.sections import SECTIONS
from rheoscope.report.words import visible
from rheoscope.run import Run

# What drawing raises for arrays and records of other kinds than rheoscope measures.
UNDRAWABLE = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError)


def html(run: Run) -> str:
    """The page as text. It opens from disk, holds its own script, and its policy forbids every request.

    Raises RheoscopeError for a run that was changed by hand so that it cannot be drawn.
    """
    try:
        return _page(run)
    except UNDRAWABLE as error:
        raise RheoscopeError(undrawable(run, error)) from error


def undrawable(run: Run, error: BaseException) -> str:
    """The sentence for a run that cannot be drawn."""
    held = ", ".join(run.instruments) or "no instrument"
    return (
        f"a run that holds {held} cannot be drawn ({type(error).__name__}: {error}); it was changed after it was "
        "measured, or comes from another version of rheoscope: measure again"
    )


def _page(run: Run) -> str:
    provenance = run.provenance
    sections = [
        {"title": section.title, "id": anchor(section.title), "lead": section.lead, "panels": _panels(section, run)}
        for section in SECTIONS
        if section.instrument in run
    ]
    drawn = {section.instrument for section in SECTIONS}
    scripts = [get_plotlyjs(), resources.files(__package__).joinpath("page.js").read_text(encoding="utf-8")]
    return template("page.html.j2").render(
        model=name_of(provenance),
        in_one_line=in_one_line(provenance),
        facts=facts(provenance),
        first_tokens=[visible(str(token)) for token in provenance.get("text", {}).get("first_tokens", [])],
        checks=checks(provenance.get("check")),
        tiles=tiles(run.summary()),
        sections=sections,
        undrawn=[instrument for instrument in run.instruments if instrument not in drawn],
        style=Markup(resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")),
        tones=theme.TONES,
        font=Markup(theme.FONT),
        scripts=[Markup(script) for script in scripts],
        policy=policy(scripts),
        data=_data([panel for section in sections for panel in section["panels"]]),
        version=visible(str(provenance.get("versions", {}).get("rheoscope", ""))),
    )


def _panels(section, run: Run) -> list[dict[str, Any]]:
    return [_printed(panel, section.instrument) for panel in section.panels(run[section.instrument])]


def _printed(panel: Panel, instrument: str) -> dict[str, Any]:
    definitions: list[Quantity] = [CATALOG[f"{instrument}.{name}"] for name in panel.quantities]
    return {"panel": panel, "id": anchor(f"{instrument} {panel.title}"), "definitions": definitions}


def _data(panels: list[dict[str, Any]]) -> Markup:
    """Figures of all panels, and the labels of their views."""
    views = {entry["id"]: entry["panel"].views for entry in panels}
    figures = {name: [view.figure for view in of] for name, of in views.items()}
    return figures_as_json(figures, {name: [view.label for view in of] for name, of in views.items()})


def figures_as_json(figures: Mapping[str, list[go.Figure]], labels: Mapping[str, list[str]]) -> Markup:
    """Figures and colours as JSON that stays inert inside a script element: no "<" is left in it."""
    payload = {
        "figures": {name: [_figure(figure) for figure in of] for name, of in figures.items()},
        "labels": labels,
        "template": theme.template().to_plotly_json(),
        "dark": theme.DARK,
    }
    text = json.dumps(payload, cls=PlotlyJSONEncoder, separators=(",", ":"))
    return Markup(re.sub("[<>&]", lambda found: f"\\u{ord(found.group()):04x}", text))


def _figure(figure: go.Figure) -> dict[str, Any]:
    """A figure without its template, which the page holds once."""
    content = figure.to_plotly_json()
    content["layout"].pop("template", None)
    return {"data": content["data"], "layout": content["layout"]}


def policy(scripts: list[str]) -> str:
    """A content security policy: these scripts, known by their hashes, and nothing from anywhere else."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def anchor(text: str) -> str:
    """A name for a place of the page."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def template(name: str) -> jinja2.Template:
    """A page with its places to be filled; what is put in is escaped."""
    loader = jinja2.PackageLoader("rheoscope", "report")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name)
