"""Nothing is proposed that cannot be made, or that a model is already."""

import numpy as np
import pytest
import torch

from rheoscope.errors import Refused
from rheoscope.models.view import ModelView
from rheoscope.surgery.apply import carried_out
from rheoscope.surgery.candidates import candidates
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.edits_sinks import DropHeads
from rheoscope.surgery.edits_structure import Parallelize, ShrinkHeads
from rheoscope.surgery.plan import Plan, PlannedEdit
from rheoscope.surgery.prescribe import prescribe
from rheoscope.surgery.restructure import restructured
from rheoscope.surgery.texts import two_texts
from tests.instruments.texts import random_corpus
from tests.surgery.restructuring import single
from tests.tiny import tiny


def found_in(view, **options):
    return candidates(view, np.zeros((view.n_layers, view.n_heads, view.d_value)), **options)


def edited_view(*edits):
    return ModelView(restructured(single("llama"), edits))


@pytest.mark.parametrize(
    ("name", "attention", "reason"),
    [
        ("olmo2", {}, "runs over all heads at once"),
        ("rheoscope_decoder", {"attention": "sd"}, "parameters of its own"),
        ("rheoscope_decoder", {"attention": "ega"}, "parameters of its own"),
    ],
)
def test_key_groups_that_cannot_be_cut_are_left_out_and_the_rest_makes_a_plan(name, attention, reason):
    view = ModelView(tiny(name, dtype=torch.float32, **attention))
    made, left_out = found_in(view)
    assert "drop" not in {one.kind for one in made}
    assert reason in left_out["drop"]
    assert reason in left_out["constant"]
    plan = prescribe(view, *two_texts(random_corpus()), limit=5.0, n_random=1).plan
    restructured(view, plan.edits)
    with pytest.raises(Refused, match=reason):
        found_in(view, only=["drop"])


@pytest.mark.parametrize(
    ("edit", "gone"),
    [
        (Linearize((1,), feature="softmax"), {"linearize"}),
        (Parallelize((1,)), {"parallelize"}),
        (ShrinkHeads((1,), rank=4), {"shrink", "drop", "constant"}),
    ],
)
def test_what_a_layer_is_already_or_can_no_longer_become_is_no_candidate(edit, gone):
    view = edited_view(edit)
    made, _ = found_in(view)
    everything = {(one.kind, one.layer) for one in found_in(single("llama"))[0]}
    assert everything - {(one.kind, one.layer) for one in made} == {(kind, 1) for kind in gone}
    plan = prescribe(view, *two_texts(random_corpus()), limit=5.0, n_random=1).plan
    assert restructured(view, plan.edits).config.rounds[1]


def test_a_model_that_is_parallel_everywhere_is_like_that_already():
    with pytest.raises(Refused, match="is like that already"):
        found_in(edited_view(Parallelize()), only=["parallelize"])


def test_a_plan_that_cannot_be_made_is_refused_before_anything_is_run():
    plan = Plan(planned=(PlannedEdit(DropHeads(heads=((0, 0),))),))
    steps = []
    with pytest.raises(Refused, match="they share key head 0"):
        carried_out(single("llama"), plan, random_corpus(), progress=lambda *step: steps.append(step))
    assert not steps
