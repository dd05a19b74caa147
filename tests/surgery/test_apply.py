"""A plan for a model that was edited before, whose layers are no longer alike."""

import numpy as np
import pytest
import torch

from rheoscope.errors import RheoscopeError
from rheoscope.models.view import ModelView
from rheoscope.surgery.apply import carried_out
from rheoscope.surgery.control import relabelled
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.edits_sinks import DropHeads
from rheoscope.surgery.edits_steering import GateFFN
from rheoscope.surgery.edits_structure import DropAttention
from rheoscope.surgery.plan import Plan, shape_of
from rheoscope.surgery.restructure import restructured
from tests.instruments.texts import random_corpus
from tests.surgery.restructuring import group
from tests.tiny import tiny

AGAIN = """
shape: {n_layers: 3, d_model: 42}
edits:
- {edit: DropHeads, heads: [[1, 0], [1, 1], [1, 2]]}
- {edit: GateFFN, layers: [0, 2], gates: [0.5, 0.5]}
"""


@pytest.fixture(scope="module")
def once():
    view = ModelView(tiny("llama", dtype=torch.float32))
    return ModelView(restructured(view, [DropAttention(layers=(0,)), DropHeads(heads=group(view))]))


def test_a_plan_is_carried_out_on_layers_with_different_numbers_of_heads(once):
    assert [size.n_heads for size in once.sizes] == [0, 3, 6]
    outcome = carried_out(once, Plan.of_yaml(AGAIN), random_corpus(), clock={"lengths": ()})
    assert [size.n_heads for size in ModelView(outcome.model).sizes] == [0, 0, 6]
    assert outcome.verification.parameters.after < outcome.verification.parameters.before
    assert [len(edits) for edits in outcome.model.config.rounds] == [2, 2]


def test_the_shape_of_such_a_model_leaves_out_what_its_layers_do_not_share(once):
    assert shape_of(once) == {"n_layers": 3, "d_model": 42}
    plan = Plan.of_yaml(AGAIN.replace("n_layers: 3", "n_heads: 6"))
    with pytest.raises(RheoscopeError, match=r"with n_heads = 6; .* has layers that differ in it"):
        plan.refuse_other(once)


def test_random_plans_stay_among_layers_of_the_same_build():
    view = ModelView(tiny("llama", dtype=torch.float32))
    linear = ModelView(restructured(view, [Linearize(layers=(1,))]))
    edits = [Linearize(layers=(0,)), GateFFN(layers=(1,), gates=(0.5,))]
    drawn = [relabelled(linear, edits, np.random.default_rng(seed)) for seed in range(20)]
    assert {one[0].layers for one in drawn} == {(0,), (2,)}
    assert {one[1].layers for one in drawn} == {(1,)}
