"""What the report shows of sinks is what the run holds, and no text of a token is ever markup."""

import base64
import json
import re

import numpy as np
import pytest
from plotly.offline import get_plotlyjs

from rheoscope.instruments.measure import measure
from rheoscope.instruments.sinks.sinks import SinkReadings
from rheoscope.models.view import ModelView
from rheoscope.report.figures_sink_heads import KINDS, kind_of_heads
from rheoscope.report.figures_sinks import SINKS
from rheoscope.report.page import html
from rheoscope.run import Run
from tests.instruments.texts import random_corpus
from tests.tiny import tiny

HOSTILE = "</script><img src=x onerror=alert(1)>"


class Words:
    """A tokenizer that knows how to decode, into text that no page must take for markup."""

    def decode(self, tokens):
        return f"{HOSTILE}{tokens[0]}\n"


def decoded(values):
    if isinstance(values, dict):
        shape = [int(n) for n in str(values.get("shape", "-1")).split(",")]
        return np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"]).reshape(shape)
    return np.array(values)


@pytest.fixture(scope="module")
def run():
    """A real run of a tiny model; its masses are then planted so that every kind of head occurs."""
    view = ModelView(tiny("llama"), Words())
    options = {"sinks": SinkReadings.Options(off=0.3, n_null=2)}
    run = measure(view, random_corpus(), instruments=["sinks"], options=options)
    data = run["sinks"].copy(deep=True)
    data.sink_mass.values[:] = 0.05
    data.diagonal_mass.values[:] = 0.05
    data.previous_mass.values[:] = 0.05
    data.sink_mass[1, 2], data.diagonal_mass[0, 3], data.previous_mass[2, 5] = 0.8, 0.7, 0.6
    rng = np.random.default_rng(0)
    text = np.array([[f"{HOSTILE}{i} {j}\n" for j in range(29)] for i in range(2)])
    examples = {
        "example_text": (("example", "place"), text),
        "example_mass": (("example", "place"), rng.random((2, 29))),
        "example_layer": ("example", [1, 2]),
        "example_head": ("example", [0, 4]),
        "example_off_tokens": ("example", [HOSTILE, "'a'"]),
        "example_on_tokens": ("example", ["'b'", HOSTILE]),
    }
    held = [name for name in data if str(name).startswith("example_")]
    return Run.of({"sinks": data.drop_vars(held).assign(examples)}, run.provenance)


@pytest.fixture(scope="module")
def page(run):
    return html(run)


@pytest.fixture(scope="module")
def figures(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])["figures"]


def test_every_question_is_answered_with_a_caption_and_definitions(run):
    panels = SINKS.panels(run["sinks"])
    assert len(panels) == len(SINKS.questions)
    for panel in panels:
        assert panel.title.endswith("?")
        assert panel.answer.endswith(".")
        assert "not defined" not in panel.answer
        assert panel.quantities
        assert all(view.caption for view in panel.views)


def test_heads_are_coloured_by_their_largest_mass(run, figures):
    kinds = kind_of_heads(run["sinks"], 0.3)
    assert KINDS[kinds[1, 2]] == "sink"
    assert KINDS[kinds[0, 3]] == "diagonal"
    assert KINDS[kinds[2, 5]] == "previous token"
    assert (kinds > 0).sum() == 3
    drawn = figures["sinks-where-do-heads-look-when-they-rest"][0]["data"][0]
    np.testing.assert_array_equal(decoded(drawn["z"]), kinds.T)
    masses = decoded(drawn["customdata"])
    for place, name in enumerate(("sink_mass", "diagonal_mass", "previous_mass")):
        np.testing.assert_array_equal(masses[..., place], run["sinks"][name].transpose("head", "layer"))


def test_text_of_tokens_is_escaped_everywhere(page):
    assert HOSTILE not in page
    assert "<img" not in page.replace(get_plotlyjs(), "")
    assert page.count("</script>") == 3
    assert "&amp;lt;/script&amp;gt;" not in page  # escaped once, not twice


def test_a_passage_shows_every_token_with_its_mass(run, figures):
    first = figures["sinks-which-tokens-switch-a-head-off"][0]
    squares = decoded(first["data"][0]["z"]).astype(float).ravel()
    np.testing.assert_array_equal(squares[:29], run["sinks"].example_mass[0])
    texts = np.array(first["data"][0]["customdata"], dtype=object).ravel()
    assert texts[3] == "&lt;/script&gt;&lt;img␣src=x␣onerror=alert(1)&gt;0␣3\\n"


def test_curves_and_costs_are_those_of_the_run(run, figures):
    data = run["sinks"]
    curves = figures["sinks-does-dense-attention-make-tokens-alike"][1]["data"]
    np.testing.assert_array_equal(decoded(curves[0]["y"]), data.cosine_predicted[0])
    np.testing.assert_array_equal(decoded(curves[1]["y"]), data.cosine_measured[0])
    costs = figures["sinks-is-a-sink-cheaper-than-a-diagonal"][0]["data"]
    np.testing.assert_array_equal(decoded(costs[0]["y"]), data.pattern_cost.sel(pattern="sink")[0])
    outputs = figures["sinks-is-a-head-off-when-its-attention-rests"][0]["data"]
    points = next(trace for trace in outputs if trace.get("name") == "head 0")
    np.testing.assert_array_equal(np.sort(decoded(points["y"]).astype(float)), np.sort(data.output_norm[0, 0]))


def test_a_run_that_lacks_a_quantity_leaves_its_panel_out(run):
    data = run["sinks"]
    for name in data.data_vars:
        html(Run.of({"sinks": data.drop_vars(name)}, run.provenance))
    assert html(Run.of({"sinks": data[["sink_mass", "diagonal_mass", "previous_mass"]]}, run.provenance))


def test_every_axis_has_a_title(figures):
    for views in figures.values():
        for view in views:
            for axis in ("xaxis", "yaxis"):
                assert view["layout"][axis]["title"]["text"]
            for trace in view["data"]:
                assert "hovertemplate" in trace or trace["hoverinfo"] == "skip"
