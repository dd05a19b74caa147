"""What verification says equals the slow literal formulas."""

import json

import numpy as np
import pytest
import torch

from rheoscope.models.view import ModelView
from rheoscope.surgery.clock import latencies
from rheoscope.surgery.edits_sinks import DropHeads
from rheoscope.surgery.restructure import restructured, saving
from rheoscope.surgery.sizes import attention_parameters, flops_per_token, parameters
from rheoscope.surgery.verify import verify
from tests.instruments.texts import random_corpus
from tests.tiny import tiny

EDIT = DropHeads(heads=((1, 0), (1, 1), (1, 2)))


@pytest.fixture(scope="module")
def view():
    return ModelView(tiny("llama", dtype=torch.float32))


@pytest.fixture(scope="module")
def edited(view):
    return restructured(view, [EDIT])


@pytest.fixture(scope="module")
def found(view, edited):
    return verify(view, edited, random_corpus(), lengths=(8,), batch_sizes=(2,))


def test_losses_divergence_and_agreement_equal_the_literal_formulas(view, edited, found):
    text = random_corpus()
    sums = np.zeros((4, len(set(text.units))))
    for window in range(text.n_windows):
        tokens = torch.tensor(text.tokens[window, : text.lengths[window]], dtype=torch.long)[None]
        with torch.no_grad():
            p, q = (m(input_ids=tokens).logits[0, :-1].double().log_softmax(-1) for m in (view.model, edited))
        place = torch.arange(tokens.shape[1] - 1)
        change = p[place, tokens[0, 1:]] - q[place, tokens[0, 1:]]
        kl, same = (p.exp() * (p - q)).sum(-1), p.argmax(-1) == q.argmax(-1)
        sums[:, text.units[window]] += [float(change.sum()), float(kl.sum()), float(same.sum()), len(place)]
    totals = sums.sum(1)
    assert found.change.value == pytest.approx(totals[0] / totals[3], abs=1e-6)
    assert found.kl.value == pytest.approx(totals[1] / totals[3], abs=1e-6)
    assert found.agreement.value == pytest.approx(totals[2] / totals[3], abs=1e-6)
    spread = sums[0] - totals[0] / totals[3] * sums[3]
    n = len(spread)
    assert found.change.se == pytest.approx(np.sqrt(n / (n - 1) * (spread**2).sum()) / totals[3], rel=1e-4)
    assert found.loss.after - found.loss.before == pytest.approx(found.change.value, abs=1e-9)


def test_a_model_against_itself_has_no_change(view):
    from rheoscope.surgery.edits_steering import GateFFN

    same = verify(view, restructured(view, [GateFFN(gates=(1.0, 1.0, 1.0))]), random_corpus(), lengths=())
    assert abs(same.change.value) < 1e-6
    assert abs(same.kl.value) < 1e-9
    assert same.agreement.value == 1.0


def test_sizes_are_counted(view, edited, found):
    assert found.parameters.before - found.parameters.after == saving(view, EDIT)
    assert found.parameters.before == parameters(view.model)
    assert found.attention_parameters.before == attention_parameters(view.blocks, view.family)
    assert found.attention_parameters.before - found.attention_parameters.after == saving(view, EDIT)


def test_operations_are_those_of_the_matrices_and_of_the_mixing(view, edited):
    block = 2 * 42 * 60 + 2 * 42 * 20 + 3 * 42 * 37  # q and o, k and v, gate and up and down
    expected = 2 * (3 * block + 61 * 42) + 3 * 2 * 60 * (29 + 1)
    assert flops_per_token(view.model, view.blocks, view.family, length=29) == expected
    cut = expected - 2 * saving(view, EDIT) - 2 * 30 * (29 + 1)
    assert flops_per_token(edited, edited.blocks, view.family, length=29) == cut


def test_times_are_taken_in_turns(found):
    assert [(one.phase, one.batch, one.length) for one in found.latencies] == [("prefill", 2, 8), ("decode", 2, 8)]
    assert all(one.before_ms > 0 and one.ratio_low <= one.ratio <= one.ratio_high for one in found.latencies)


def test_equal_models_take_equal_times_within_a_factor(view):
    (one, _) = latencies(view.model, view.model, lengths=(8,), batch_sizes=(1,), repeats=9)
    assert one.ratio_low < 2
    assert one.ratio_high > 0.5


def test_what_is_not_known_is_null_in_json(view):
    from dataclasses import replace

    from rheoscope.surgery.verify import Pair

    found = verify(view, restructured(view, [EDIT]), random_corpus(), lengths=())
    said = json.loads(replace(found, memory=Pair(float("nan"), 1.0)).to_json())
    assert said["memory"] == {"before": None, "after": 1.0}
    assert said["change"].keys() == {"value", "se"}
    assert said["change_before_recovery"] is None
