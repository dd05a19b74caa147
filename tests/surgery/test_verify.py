"""What verification says equals the slow literal formulas."""

import json

import numpy as np
import pytest
import torch

from rheoscope.models.view import ModelView
from rheoscope.surgery import clock
from rheoscope.surgery.clock import latencies, not_timed
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


def test_every_measurement_says_how_far_it_is_and_how_many_turns_it_took(view, edited):
    told = []
    times = latencies(
        view.model, edited, lengths=(8, 4), batch_sizes=(1,), repeats=3, progress=lambda *said: told.append(said)
    )
    assert [one.repeats for one in times] == [3] * 4
    for task in ("clock, 1 x 4 tokens, prefill", "clock, 1 x 8 tokens, decode"):
        assert [said[1:] for said in told if said[0] == task] == [(1, 3), (2, 3), (3, 3)]


def test_a_size_has_its_share_of_the_time_and_one_turn_at_least(view, edited, monkeypatch):
    now = 0.0

    def step(model, tokens, cache, seen):
        nonlocal now
        now += tokens.numel()  # a second for every token

    monkeypatch.setattr("rheoscope.surgery.clock._step", step)
    monkeypatch.setattr("rheoscope.surgery.clock.time.monotonic", lambda: now)
    monkeypatch.setattr("rheoscope.surgery.clock.time.perf_counter", lambda: now)
    sizes = {"lengths": (100, 1000), "batch_sizes": (1, 8)}
    times = latencies(view.model, edited, **sizes, repeats=4, seconds=10_000.0)
    # 100 of 9900 tokens have 101 s: half is less than two turns of 200 s, and enough for three of decoding, 16 s each
    assert [(one.batch, one.length, one.phase, one.repeats) for one in times] == [
        (1, 100, "prefill", 1),
        (1, 100, "decode", 2),
        (8, 100, "prefill", 1),
        (8, 100, "decode", 2),
        (1, 1000, "prefill", 1),
        (1, 1000, "decode", 4),
    ]
    assert not_timed(times, **sizes) == [(8, 1000)]
    assert now <= 10_000
    assert not not_timed(latencies(view.model, edited, **sizes, repeats=4), **sizes)


def test_decoding_goes_on_from_the_length_it_is_timed_at(view, edited, monkeypatch):
    lengths = []
    true_step = clock._step

    def step(model, tokens, cache, seen):
        lengths.append((cache.get_seq_length(), tokens.shape[1], seen))
        return true_step(model, tokens, cache, seen)

    monkeypatch.setattr(clock, "_step", step)
    latencies(view.model, edited, lengths=(5,), batch_sizes=(1,), repeats=2)
    decoded = [seen for seen in lengths if seen[1] == 1]
    assert decoded == [(5 + k, 1, 6 + k) for k in range(clock.DECODED)] * 6  # two models, one turn to warm up and two


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
