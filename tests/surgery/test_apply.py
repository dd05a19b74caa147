"""A plan for a model that was edited before, whose layers are no longer alike."""

import numpy as np
import pytest
import torch

from rheoscope.errors import RheoscopeError
from rheoscope.models.view import ModelView
from rheoscope.surgery.apply import carried_out
from rheoscope.surgery.control import random_plans, relabelled
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.edits_sinks import DropHeads
from rheoscope.surgery.edits_steering import GateFFN
from rheoscope.surgery.edits_structure import DropAttention, ShrinkHeads
from rheoscope.surgery.plan import Plan, PlannedEdit, shape_of
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


def plan_of(*edits):
    return Plan(planned=tuple(PlannedEdit(edit) for edit in edits))


@pytest.mark.parametrize("seed", range(3))
def test_where_edits_fit_nowhere_else_there_is_no_random_plan_and_the_model_is_made(seed):
    """The one layer that attends to everything can be linear; the others have windows."""
    view = ModelView(tiny("gemma3_text", dtype=torch.float32))
    assert [window is None for window in view.windows] == [False, True, False]
    found = carried_out(view, plan_of(Linearize((1,))), random_corpus(), clock={"lengths": ()}, seed=seed).verification
    assert (found.controls, found.n_controls_asked) == ((), 1)
    assert random_plans(view, [DropHeads(heads=group(view))], 2, np.random.default_rng(seed))


def test_random_plans_stay_among_layers_that_attend_alike():
    """S-D and energy-gated layers have as many heads as softmax layers, and are changed by other edits."""
    model = tiny("rheoscope_decoder", dtype=torch.float32, attention=["softmax", "ega", "softmax"])
    view = ModelView(model)
    for seed in range(10):
        (drawn,) = random_plans(view, [ShrinkHeads((0,), rank=2)], 1, np.random.default_rng(seed))
        assert drawn[0].layers == (2,)
    assert not random_plans(view, [Linearize((0, 2))], 3, np.random.default_rng(0))


def test_a_random_plan_is_never_the_plan_itself():
    view = ModelView(tiny("llama", dtype=torch.float32))
    plan = [Linearize((1,)), GateFFN((0,), (0.5,))]
    for seed in range(20):
        for drawn in random_plans(view, plan, 2, np.random.default_rng(seed)):
            assert drawn[0].layers != (1,) or drawn[1].layers != (0,)
    assert not random_plans(view, [DropAttention()], 1, np.random.default_rng(0))
