"""What is chosen is what costs least, it stays within the limit, and random plans stand beside it."""

import numpy as np
import pytest
import torch
import xarray as xr

from rheoscope.corpus import read
from rheoscope.errors import Refused, RheoscopeError
from rheoscope.models.load import load
from rheoscope.models.view import ModelView
from rheoscope.run import Run
from rheoscope.surgery.candidates import (
    KINDS,
    attention_parameters,
    candidates,
    group_parameters,
    heads_of_group,
    most_promising,
)
from rheoscope.surgery.control import relabelled
from rheoscope.surgery.edits import edited
from rheoscope.surgery.edits_sinks import ConstantHeads, DropHeads
from rheoscope.surgery.greedy import edits_of, fits, random_choice
from rheoscope.surgery.passes import Passes
from rheoscope.surgery.prescribe import predicted, prescribe
from rheoscope.surgery.redundancy import lost_with_groups
from rheoscope.surgery.restructure import saving
from rheoscope.surgery.texts import two_texts
from tests.instruments.texts import corpus_of, random_corpus
from tests.tiny import tiny

LIMIT = 0.05
USELESS = (3, 2)  # layer, head of the built-in model whose output weights are planted as zero


@pytest.fixture(scope="module")
def planted():
    """The built-in model with one head that writes nothing."""
    view = load("builtin:manual")
    with torch.no_grad():
        weight = view.part(USELESS[0], view.family.o).weight
        weight[USELESS[1] * view.d_head : (USELESS[1] + 1) * view.d_head] = 0.0
    return view


@pytest.fixture(scope="module")
def texts(planted):
    text = read("builtin:manual", tokenizer=planted.tokenizer, window=48, n_windows=12, windows_per_document=1)
    return two_texts(text)


@pytest.fixture(scope="module")
def found(planted, texts):
    return prescribe(planted, *texts, limit=LIMIT, only=["drop"], n_random=2)


def test_a_planted_useless_head_costs_nothing_and_is_chosen(found):
    (step,) = [s for s in found.choice.steps if (s.candidate.layer, s.candidate.group) == USELESS]
    assert float(step.alone.value) == 0.0
    assert all(s.alone.value <= 0 for s in found.choice.steps[: found.choice.steps.index(step)])


def test_the_plan_stays_within_the_limit_and_is_measured_together(planted, texts, found):
    assert float(found.choosing.plan.value) <= LIMIT
    again = Passes(planted, texts[0]).change(*edits_of(found.choice.chosen))
    assert float(found.choosing.plan.value) == float(again.value)
    assert all(float(total.value) <= LIMIT for _, total in found.choice.totals)


def test_the_control_is_of_the_same_size_and_dearer(found):
    assert len(found.choosing.random) == len(found.checking.random) == 2
    assert float(found.choosing.plan.value) < min(float(one.value) for one in found.choosing.random)


def test_the_plan_says_what_was_predicted_and_measured(found):
    said = found.plan.found
    assert said["predicted_change"] == pytest.approx(predicted(found.choice), abs=1e-6)
    assert said["change_checking"] == pytest.approx(float(found.checking.plan.value), abs=1e-6)
    assert len(said["random_changes_checking"]) == 2
    assert all("alone it changes the loss by" in one.because for one in found.plan.planned)


def test_a_limit_that_nothing_keeps_to_is_refused(texts):
    view = load("builtin:manual")
    with pytest.raises(RheoscopeError, match="above 0"):
        prescribe(view, *texts, limit=0.0)
    with pytest.raises(RheoscopeError, match="the cheapest of 6 edits alone costs"):
        prescribe(view, *texts, limit=1e-9, only=["linearize"])


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "gpt_neox"])
def test_savings_of_key_groups_are_those_of_the_saved_model(name):
    view = ModelView(tiny(name))
    means = np.zeros((view.n_layers, view.n_heads, view.d_value))
    for one in candidates(view, means, only=["drop"])[0]:
        assert one.saving == saving(view, one.edit) == group_parameters(view, one.layer)
    assert attention_parameters(view) == sum(one.saving for one in candidates(view, means, only=["drop"])[0])


def test_candidates_take_whole_key_groups():
    view = ModelView(tiny("llama"))
    assert heads_of_group(view, 1) == (3, 4, 5)
    drops, _ = candidates(view, np.zeros((3, 6, 10)), only=["drop"])
    assert [one.edit.heads for one in drops][:2] == [((0, 0), (0, 1), (0, 2)), ((0, 3), (0, 4), (0, 5))]


def test_kinds_that_a_model_cannot_take_are_left_out_or_refused_by_name():
    view = ModelView(tiny("gpt_bigcode"))
    means = np.zeros((view.n_layers, view.n_heads, view.d_value))
    if view.n_kv_heads == 1:
        with pytest.raises(Refused, match="share one key head"):
            candidates(view, means, only=["drop"])
        assert "drop" in candidates(view, means)[1]
    with pytest.raises(RheoscopeError, match="kind 'burn'"):
        candidates(view, means, only=["burn"])


def test_a_layer_keeps_a_key_group_and_takes_one_edit_of_its_scores():
    view = ModelView(tiny("llama"))
    made, _ = candidates(view, np.zeros((3, 6, 10)))
    drop, other, constant, linear = (
        next(one for one in made if (one.kind, one.layer, one.group) == place)
        for place in (("drop", 1, 0), ("drop", 1, 1), ("constant", 1, 0), ("linearize", 1, None))
    )
    assert not fits(other, [drop])
    assert not fits(constant, [drop])
    assert not fits(linear, [drop])
    assert fits(next(one for one in made if (one.kind, one.layer) == ("parallelize", 1)), [drop])


def test_random_choices_have_the_kinds_and_number_and_can_be_made():
    view = ModelView(tiny("gpt2"))
    made, _ = candidates(view, np.zeros((3, 6, 7)), only=["drop", "parallelize"])
    like = [one for one in made if one.layer < 2 and one.group in (None, 1)]
    drawn = random_choice(made, like, np.random.default_rng(0))
    assert sorted(one.kind for one in drawn) == sorted(one.kind for one in like)
    with torch.no_grad(), edited(view, *edits_of(drawn)):
        view.forward(torch.arange(3, 9)[None])


def test_a_relabelled_plan_keeps_its_kinds_its_groups_and_how_they_share_layers():
    view = ModelView(tiny("llama"))
    plan = [DropHeads(heads=((0, 0), (0, 1), (0, 2))), ConstantHeads(heads=((0, 3), (0, 4), (0, 5)))]
    drawn = relabelled(view, plan, np.random.default_rng(1))
    assert [type(edit) for edit in drawn] == [DropHeads, ConstantHeads]
    assert drawn[0].layers == drawn[1].layers
    assert {head // 3 for _, head in drawn[0].heads} != {head // 3 for _, head in drawn[1].heads}
    assert all(len({head // 3 for _, head in edit.heads}) == 1 for edit in drawn)


def test_key_groups_are_ranked_by_what_is_lost_and_layers_by_a_run():
    view = ModelView(tiny("gpt2"))
    made, _ = candidates(view, np.zeros((3, 6, 7)), only=["drop", "shrink"])
    lost = np.arange(18.0)[::-1].reshape(3, 6)
    ranks = np.repeat([[5.0], [9.0], [1.0]], 6, 1)
    run = Run.of({"routing": xr.Dataset({"score_k90": (("layer", "head"), ranks)})}, {})
    kept = most_promising(made, 2, run=run, lost=lost)
    places = [(one.kind, one.layer, one.group) for one in kept]
    assert places == [("drop", 2, 5), ("drop", 2, 4), ("shrink", 2, None), ("shrink", 0, None)]
    assert most_promising(made[:18], 2) == made[:2]


def test_where_fewer_are_measured_than_there_are_the_redundant_group_is_among_them(planted, texts):
    found = prescribe(planted, *texts, limit=LIMIT, only=["drop"], n_random=1, most_candidates=3)
    assert found.n_candidates == 3
    assert USELESS in {(one.layer, one.group) for one in found.choice.chosen}
    with pytest.raises(RheoscopeError, match="at most 0 candidates"):
        prescribe(planted, *texts, only=["drop"], most_candidates=0)


def test_a_group_that_copies_another_is_not_lost_and_one_that_writes_nothing_neither(planted):
    view = ModelView(tiny("gpt2"))
    with torch.no_grad():
        view.part(1, view.family.o).weight[:7] = 0.0
    lost = lost_with_groups(view, random_corpus())
    assert lost[1, 0] == 0.0
    assert (np.delete(lost.ravel(), 6) > 0).all()


def test_two_texts_share_no_document_and_one_document_is_refused():
    text = random_corpus()
    first, second = two_texts(text, share=0.5, seed=3)
    assert not set(first.documents) & set(second.documents)
    assert first.n_windows + second.n_windows == text.n_windows
    with pytest.raises(RheoscopeError, match="1 document"):
        two_texts(corpus_of([[1, 2, 3], [4, 5, 6]], documents=[0, 0]))


def test_every_kind_has_candidates_on_an_ordinary_model():
    view = ModelView(tiny("gpt2"))
    made, left_out = candidates(view, np.zeros((3, 6, 7)))
    assert {one.kind for one in made} == set(KINDS)
    assert not left_out


def test_layers_that_cannot_be_linear_are_left_out_and_the_others_are_candidates():
    view = ModelView(tiny("qwen2:sliding"))
    made, _ = candidates(view, np.zeros((3, view.n_heads, view.d_value)), only=["linearize"])
    assert [one.layer for one in made] == [1]  # the one that attends to everything
    view = ModelView(tiny("mistral"))
    with pytest.raises(Refused, match="window"):
        candidates(view, np.zeros((3, view.n_heads, view.d_value)), only=["linearize"])
