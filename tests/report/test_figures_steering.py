"""What the report shows of steering, ablations and critical directions is what the run holds."""

import numpy as np
import pytest

from rheoscope.instruments.measure import measure
from rheoscope.instruments.steering.steering import Steering
from rheoscope.models.view import ModelView
from rheoscope.report.figures_steering import STEERING
from rheoscope.report.figures_steering_ablation import ABLATION
from rheoscope.report.figures_steering_criticals import CRITICALS, arrows
from rheoscope.run import Run
from rheoscope.surgery.ablation import ablate
from rheoscope.surgery.gates import Fit
from rheoscope.theory.critical_readings import criticals
from tests.instruments.texts import corpus_of
from tests.tiny import tiny

from . import browser
from .browser import draw_everything, opened

SECTIONS = {section.instrument: section for section in (STEERING, ABLATION, CRITICALS)}


def full_windows():
    return corpus_of(np.random.default_rng(0).integers(3, 61, (9, 13)))


def measured(name):
    view, corpus = ModelView(tiny(name)), full_windows()
    options = {"steering": Steering.Options(n_null=3, top_k=3)}
    run = measure(view, corpus, instruments=["steering"], options=options)
    everything = {"by_layer": True, "parallel_curve": True, "gates": True, "pressure": True, "prefix": True}
    everything |= {"scores": True, "linear": True}
    edits = ablate(view, corpus, fit=Fit(steps=2, windows=2), n_random=2, batch_size=5, **everything)
    found = criticals(view, corpus, layer=1, n_starts=10, n_steps=30)
    parts = {part: source[part] for part, source in zip(SECTIONS, (run, edits, found), strict=True)}
    return Run.of(parts, run.provenance)


@pytest.fixture(scope="module")
def run():
    return measured("llama")


def panels(run, instrument):
    return {panel.title: panel for panel in SECTIONS[instrument].panels(run[instrument])}


def trace(figure, name):
    return next(trace for trace in figure.data if trace.name == name)


def test_all_questions_are_answered_on_a_run_with_everything(run):
    for instrument, section in SECTIONS.items():
        assert len(panels(run, instrument)) == len(section.questions)


def test_questions_without_their_readings_are_left_out():
    view, corpus = ModelView(tiny("llama")), full_windows()
    options = {"steering": Steering.Options(defect_stride=0, n_top_k=0, n_null=0)}
    data = measure(view, corpus, instruments=["steering"], options=options)["steering"]
    titles = {panel.title for panel in STEERING.panels(data)}
    assert "Who turns the tokens, attention or the FFN?" in titles
    assert len(titles) == len(STEERING.questions) - 2


def test_lines_hold_the_readings_and_their_errors(run):
    figure = panels(run, "steering")["Who turns the tokens, attention or the FFN?"].views[0].figure
    drawn = trace(figure, "attention")
    assert np.array_equal(drawn.y, run["steering"].angular_deficit)
    assert np.array_equal(drawn.error_y.array, run["steering"].angular_deficit_se)


def test_the_answer_says_the_mean_deficit(run):
    panel = panels(run, "steering")["Who turns the tokens, attention or the FFN?"]
    assert f"{float(run['steering'].angular_deficit_mean):.2f}"[:3] in panel.answer


def test_curves_of_ranks_and_linear_layers_hold_the_changes(run):
    data = run["ablation"]
    ranks, forms = (
        view.figure for view in panels(run, "ablation")["How much of the scores does the model need?"].views
    )
    for part in ("routing", "filtering"):
        drawn = trace(ranks, f"{part} cut, the rest as it is")
        assert np.array_equal(drawn.y, data[f"{part}_change"])
        assert np.array_equal(drawn.error_y.array, data[f"{part}_change_se"])
    assert np.array_equal(forms.data[0].y, data.score_edit_change)
    panel = panels(run, "ablation")["How many layers can do without the softmax?"]
    assert np.array_equal(panel.views[0].figure.data[0].y, data.linear_change)
    assert f"{float(data.linear_change[-1]):+.3f}" in panel.answer


def test_bars_and_curves_hold_the_changes(run):
    data = run["ablation"]
    bars = panels(run, "ablation")["Which part of the FFN does the work?"].views[0].figure
    assert np.array_equal(bars.data[0].y, data.variant_change.sel(spare="none"))
    curves = panels(run, "ablation")["How many layers can be made parallel?"].views[0].figure
    assert np.array_equal(trace(curves, "low defect first").y, data.parallel_change_low)
    assert np.array_equal(curves.data[0].y, data.parallel_change_random.min("choice"))
    assert np.array_equal(curves.data[1].y, data.parallel_change_random.max("choice"))


def test_kinds_stand_beside_those_of_chance(run):
    panel = panels(run, "criticals")["Which directions does layer 1 leave alone?"]
    labels = set(panel.views[0].figure.data[0].x[1])
    assert labels == {"found", "random", "shuffled"}


def test_parallel_blocks_are_called_parallel():
    view = ModelView(tiny("gpt_neox"))
    data = measure(view, full_windows(), instruments=["steering"], nulls=False)["steering"]
    panel = next(panel for panel in STEERING.panels(data) if "side by side" in panel.title)
    assert "exactly 0" in panel.answer


def test_arrows_have_one_length_and_point_where_the_flow_leads():
    a, b = np.meshgrid(np.arange(3.0), np.arange(3.0))
    x, y = arrows(a, b, 5 + 0 * a, 0 * a)
    assert np.allclose(y.reshape(-1, 7)[:, :2], b.ravel()[:, None])
    lengths = np.diff(x.reshape(-1, 7)[:, :2])
    assert np.allclose(lengths, lengths[0])
    assert (lengths > 0).all()
    still_x, _ = arrows(a, b, 0 * a, 0 * a)
    assert np.isnan(still_x).all()


@pytest.mark.browser
def test_a_browser_draws_all_of_it_without_a_complaint(run, tmp_path):
    path = run.report(tmp_path / "run.html")
    with browser.started() as chromium, opened(chromium, path) as (page, seen):
        draw_everything(page)
        drawn = page.evaluate("[...document.querySelectorAll('.chart')].map(chart => chart.data.length)")
    assert len(drawn) == sum(len(section.questions) for section in SECTIONS.values())
    assert min(drawn) > 0
    assert seen.complaints == []
