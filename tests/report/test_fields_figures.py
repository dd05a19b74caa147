"""What the report shows of fields: every panel is drawn from a real measurement, maps as images."""

import json
from functools import cache

import numpy as np
import pytest

from rheoscope.instruments.catalog import CATALOG
from rheoscope.instruments.fields.fields import Fields
from rheoscope.instruments.measure import measure
from rheoscope.models.view import ModelView
from rheoscope.report.figures_fields import FIELDS
from rheoscope.report.page import html
from tests.instruments.texts import corpus_of
from tests.tiny import tiny

TITLES = [
    "How much of attention changes from text to text?",
    "At which sizes is attention patterned?",
    "Where in the window are these patterns?",
    "How far back do they lie?",
    "How many patterns hold what changes?",
    "Would more texts need more patterns?",
    "How fast does their energy fall?",
    "Do the patterns hold on other texts?",
    "What do the patterns look like?",
    "Do positions change together?",
    "Which heads change most from text to text?",
]


@cache
def run(nulls=True, heads="each"):
    corpus = corpus_of(np.random.default_rng(0).integers(3, 61, (24, 29)))
    options = {"fields": Fields.Options(skip_rows=3, bands=(4.0, 6.0), n_null=8, heads=heads)}
    return measure(ModelView(tiny("llama")), corpus, instruments=["fields"], options=options, nulls=nulls)


def panels(**which):
    return {panel.title: panel for panel in FIELDS.panels(run(**which)["fields"])}


def test_every_question_is_answered_from_a_run_with_nulls_and_all_heads():
    assert list(panels()) == TITLES


def test_without_nulls_and_heads_the_other_questions_are_still_answered():
    assert list(panels(nulls=False, heads="mean")) == TITLES[:-1]
    assert "even attention" in panels(nulls=False, heads="mean")[TITLES[1]].answer


@pytest.mark.parametrize("title", TITLES)
def test_every_panel_says_something_and_defines_what_it_shows(title):
    panel = panels()[title]
    assert panel.answer.endswith(".")
    assert "nan" not in panel.answer.lower()
    assert all(view.caption.endswith(".") for view in panel.views)
    assert all(f"fields.{name}" in CATALOG for name in panel.quantities)


def test_modes_are_images_and_not_thousands_of_points():
    for view in panels()["What do the patterns look like?"].views:
        kinds = [trace.type for trace in view.figure.data]
        assert kinds.count("heatmap") == 3
        points = sum(len(trace.x) for trace in view.figure.data if trace.type == "scatter")
        assert points < 3 * 29 + 1


def test_numbers_in_the_sentences_are_those_of_the_run():
    data = run()["fields"]
    needed = float(data.h_star.isel(band=-1).sel(level=90.0).median())
    assert f"needs {needed:.3g} modes for 90 %, of 24 texts" in panels()[TITLES[4]].answer
    limited = int((data.h_star_limited.isel(band=-1).sel(level=90.0) > 0).sum())
    assert f"{limited} of 3 layers are limited" in panels()[TITLES[4]].answer


def test_the_limit_by_the_number_of_texts_is_marked_in_the_figure_of_modes_needed():
    figure = panels()[TITLES[4]].views[0].figure
    heights = sorted(shape.y0 for shape in figure.layout.shapes)
    assert heights == pytest.approx([0.6 * 24, 23])


def test_constant_attention_is_drawn_and_says_that_nothing_is_defined():
    data = run()["fields"].copy(deep=True)
    for name in ("beta", "beta_low", "beta_high", "beta_least", "beta_most", "spectral_temperature", "dominant_scale"):
        data[name] = data[name] * np.nan
    data["beta_last"] = data.beta_last * 0
    drawn = {panel.title: panel for panel in FIELDS.panels(data)}
    assert drawn[TITLES[6]].answer == "Too few modes are usable for an exponent."
    assert "0 of 3 layers have a scale that stands out; so none is named" in drawn[TITLES[1]].answer


def test_the_page_holds_the_section_and_stays_small():
    page = html(run())
    assert "Attention fields" in page
    assert len(page.encode()) < 15e6
    assert all(json.dumps(title)[1:-1] in page for title in TITLES)
