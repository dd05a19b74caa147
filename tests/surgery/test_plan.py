"""Plans are written and read back, and whatever else is read ends in one sentence."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rheoscope.errors import RheoscopeError
from rheoscope.models.view import ModelView
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.edits_sinks import ConstantHeads, DropHeads
from rheoscope.surgery.plan import Plan, PlannedEdit, completed, fingerprint, shape_of
from tests.tiny import tiny

HEADS = ((0, 0), (0, 1), (0, 2))
PLAN = Plan(
    planned=(
        PlannedEdit(DropHeads(heads=HEADS), "alone: +0.0012 ± 0.0003", 0.0012, 0.0003, 1234),
        PlannedEdit(ConstantHeads(heads=((2, 3), (2, 4), (2, 5)))),
        PlannedEdit(Linearize(layers=(1,), scaled=True)),
    ),
    model="org/name",
    seed=3,
    limit=0.02,
    text={"sources": ["a.txt"], "windows": 7},
    found={"change_checking": 0.01, "random_changes_checking": [0.2, 0.3]},
)


@pytest.fixture(scope="module")
def view():
    return ModelView(tiny("llama"))


def refused(text):
    with pytest.raises(RheoscopeError) as caught:
        Plan.of_yaml(text)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_a_plan_comes_back_as_it_was(tmp_path):
    PLAN.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == PLAN


def test_a_plan_holds_plain_yaml_alone():
    whole = yaml.safe_load(PLAN.to_yaml())
    assert whole["edits"][0]["heads"] == [[0, 0], [0, 1], [0, 2]]
    assert "!" not in PLAN.to_yaml()


def test_a_plan_may_be_written_by_hand_with_edits_alone():
    plan = Plan.of_yaml(
        "edits:\n- {edit: DropHeads, heads: [[1, 0]], predicted_change: 1e-3}\n- {edit: DropAttention}\n"
    )
    assert plan.edits[0] == DropHeads(heads=((1, 0),))
    assert plan.planned[0].predicted_change == 1e-3


WRONG = {
    "": "holds no mapping",
    "[": "cannot be read",
    "edits: []": "no list `edits`",
    "edits: 3": "no list `edits`",
    "edits: [3]": "edit 1 is no mapping",
    "edits: [{edit: Explode}]": "no edit is called 'Explode'",
    "edits: [{edit: DropHeads, head: [[0, 1]]}]": "has no field 'head'",
    "edits: [{edit: DropHeads, heads: [[0]]}]": "give 2 values",
    "edits: [{edit: DropHeads, saving: lots}]": "give a whole number",
    "a: &b [1]\nedits: *b": "references are not read",
    "seed: 1\nseed: 2": "stands twice",
    "[1, 2]: 3": "a key is no word",
    "edits: !!python/object/apply:os.system [ls]": "are not read",
    "edits: [!!int '']": "not YAML of plain values",
    "format: something else": "is no plan",
    "version: 99": "plan version 99",
    "colour: red\nedits: [{edit: DropAttention}]": "has a key 'colour'",
    "shape: {n_layers: many}\nedits: [{edit: DropAttention}]": "give whole numbers",
    "limit: yes\nedits: [{edit: DropAttention}]": "give a number",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_plan_ends_in_one_sentence(text):
    assert WRONG[text] in refused(text)


def test_a_plan_nested_beyond_reason_ends_in_one_sentence():
    refused("edits: " + "[" * 5000)
    refused("x" * (5 * 2**20))


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="edits:-[]{}&*!|>'\"\n #?,%@`0123456789.eDropHeadslayers\t\x00\x85\ud800", max_size=60))
def test_no_text_whatever_raises_anything_else(text):
    with suppress(RheoscopeError):
        Plan.of_yaml(text)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_plan_with_anything_put_in_one_place_is_read_or_refused(data):
    anything = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=5), part, max_size=3),
        max_leaves=5,
    )
    whole = yaml.safe_load(PLAN.to_yaml())
    target = data.draw(st.sampled_from([whole, whole["edits"][0], whole["edits"][2]]))
    target[data.draw(st.sampled_from(sorted(target)) | st.text(max_size=5))] = data.draw(anything)
    with suppress(RheoscopeError):
        Plan.of_yaml(yaml.safe_dump(whole))


def test_a_plan_of_another_model_is_refused(view):
    own = replace(PLAN, shape=shape_of(view), fingerprint=fingerprint(view))
    own.refuse_other(view)
    with pytest.raises(RheoscopeError, match="n_layers = 7"):
        replace(own, shape=shape_of(view) | {"n_layers": 7}).refuse_other(view)
    with pytest.raises(RheoscopeError, match="has others"):
        replace(own, fingerprint="0" * 16).refuse_other(view)


def test_the_fingerprint_is_the_same_in_a_wider_dtype(view):
    wide = ModelView(tiny("llama").double())
    assert fingerprint(wide) == fingerprint(view)


@pytest.mark.parametrize("heads", [((3, 0),), ((0, 6),), ((-1, 0),)])
def test_heads_out_of_range_are_refused(view, heads):
    with pytest.raises(RheoscopeError, match="asked for"):
        Plan((PlannedEdit(DropHeads(heads=heads)),)).refuse_other(view)


def test_constants_that_a_plan_leaves_out_are_filled_in(view):
    means = np.arange(3 * 6 * view.d_value, dtype=float).reshape(3, 6, -1)
    edits = completed(PLAN.edits, means)
    assert edits[0] == PLAN.edits[0]
    assert edits[1].constants[1] == tuple(means[2, 4])
    assert completed(edits, means * 0) == edits
