"""A fused layer still says how many heads it has, and is left alone by all that it cannot take."""

import pytest
import torch

from rheoscope.errors import Refused
from rheoscope.models.view import ModelView
from rheoscope.surgery.apply import carried_out
from rheoscope.surgery.edits_structure import Parallelize, ShrinkHeads
from rheoscope.surgery.plan import Plan, PlannedEdit
from rheoscope.surgery.prescribe import prescribe
from rheoscope.surgery.restructure import restructured
from rheoscope.surgery.sizes import attention_parameters, flops_per_token
from rheoscope.surgery.texts import two_texts
from tests.instruments.texts import random_corpus
from tests.surgery.restructuring import FUSED, single
from tests.tiny import tiny

FUSE = Parallelize((1,), fused=True)
BIASES = {"llama": {"attention_bias": True, "mlp_bias": True}}


@pytest.fixture(scope="module")
def once():
    return ModelView(restructured(single("llama"), [FUSE]))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", sorted(FUSED))
def test_a_fused_layer_counts_as_many_attention_parameters_and_operations_as_before(name, biased):
    view = ModelView(tiny(name, dtype=torch.float32, **(BIASES.get(name, {}) if biased else {})))
    new = ModelView(restructured(view, [FUSE]))
    counts = [
        (attention_parameters(one.blocks, one.family), flops_per_token(one.model, one.blocks, one.family, length=29))
        for one in (view, new)
    ]
    assert counts[0] == counts[1]


def test_a_plan_that_fuses_is_carried_out():
    plan = Plan(planned=(PlannedEdit(FUSE),))
    found = carried_out(single("llama"), plan, random_corpus(), clock={"lengths": ()}).verification
    assert found.parameters.before - found.parameters.after == 2 * 42  # the gains of both norms
    assert found.attention_parameters.before == found.attention_parameters.after
    assert len(found.controls) == 1


def test_a_fused_layer_is_no_candidate_and_the_others_are(once):
    plan = prescribe(once, *two_texts(random_corpus()), limit=5.0, n_random=1).plan
    assert {layer for edit in plan.edits for layer in edit.layers} == {0, 2}
    restructured(once, plan.edits)


def test_a_fused_layer_cannot_be_made_narrower_through_taps_either(once):
    with pytest.raises(Refused, match="its parts were fused: edit first, fuse last"):
        ShrinkHeads((1,), rank=4).taps(once)
