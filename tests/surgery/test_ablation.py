"""Ablations: changes are paired losses, passes are counted and remembered, and what cannot be asked is refused."""

import json

import numpy as np
import pytest
import torch

from rheoscope.errors import Refused, RheoscopeError
from rheoscope.instruments.catalog import out_of_bounds
from rheoscope.models.view import ModelView
from rheoscope.run import Run
from rheoscope.surgery.ablation import ablate, ablation_lines
from rheoscope.surgery.edits_steering import GateFFN, ParallelFFN, ZeroFFN
from rheoscope.surgery.gates import Fit, fitted_gates, split_units
from rheoscope.surgery.parallel import curve_sizes, estimated_speedup, layer_times, schedules
from rheoscope.surgery.passes import Passes
from tests.instruments.texts import corpus_of, random_corpus
from tests.tiny import Float64Throughout, tiny

EVERYTHING = {"variants": True, "by_layer": True, "parallel_curve": True, "gates": True, "pressure": True}
QUICK = Fit(steps=3, windows=2)


def ablated(name="llama", corpus=None, **options):
    with Float64Throughout():
        return ablate(ModelView(tiny(name)), corpus or random_corpus(), fit=QUICK, batch_size=4, **options)


@pytest.fixture(scope="module")
def whole():
    return ablated(**EVERYTHING, n_random=3)


def literal_loss(view, corpus):
    """Mean loss of a text by transformers' own loss, window by window."""
    total = count = 0
    for tokens, length in zip(corpus.tokens, corpus.lengths, strict=True):
        tokens = torch.tensor(tokens[:length], dtype=torch.int64)[None]
        with Float64Throughout(), torch.no_grad():
            nll = torch.nn.functional.cross_entropy(view.forward(tokens)[0, :-1], tokens[0, 1:], reduction="sum")
        total, count = total + float(nll), count + int(length) - 1
    return total / count


def test_changes_are_differences_of_losses(whole):
    with Float64Throughout():  # the model too: its rotary tables are made when it is
        view, corpus = ModelView(tiny("llama")), random_corpus()
    plain = literal_loss(view, corpus)
    with view.tapped({"ffn_out": lambda layer, F: 0 * F}):
        without = literal_loss(view, corpus)
    data = whole["ablation"]
    assert float(data.plain_loss) == pytest.approx(plain, abs=1e-12)
    assert float(data.variant_change.sel(variant="zero-FFN", spare="none")) == pytest.approx(without - plain, abs=1e-12)
    assert (data.variant_change_se > 0).all()


def test_the_run_says_how_many_passes_it_took_and_prints_every_part(whole):
    data = whole["ablation"]
    assert data.attrs["n"] == 9
    lines = "\n".join(ablation_lines(whole))
    assert f"{data.attrs['n_passes']} passes" in lines
    for word in (
        "tangential-only FFN",
        "massive tokens spared",
        "low-defect first",
        "attention times a gain",
        "held-out",
    ):
        assert word in lines
    assert f"{float(data.parallel_change_low[0]):+.4f} ± {float(data.parallel_change_low_se[0]):.4f}" in lines
    assert out_of_bounds(data, "ablation") == []


def test_the_run_goes_to_a_file_and_back(whole, tmp_path):
    whole.save(tmp_path / "run.nc")
    again = Run.load(tmp_path / "run.nc")
    assert again["ablation"].identical(whole["ablation"])
    assert ablation_lines(again) == ablation_lines(whole)
    assert len(again.to_tables()) > 3


def test_all_layers_in_parallel_cost_the_same_in_whatever_order(whole):
    data = whole["ablation"].sel(n_parallel=3)
    assert np.allclose(data.parallel_change_random, float(data.parallel_change_low))
    assert float(data.parallel_change_high) == float(data.parallel_change_low)


def test_one_layer_in_parallel_costs_what_the_curve_begins_with(whole):
    data = whole["ablation"]
    least = int(np.argmin(data.parallel_defect.values))
    assert float(data.parallel_change_by_layer[least]) == float(data.parallel_change_low.sel(n_parallel=1))


def test_parallel_families_lose_exactly_nothing():
    data = ablated("gpt_neox", variants=False, parallel_curve=True)["ablation"]
    assert (data.parallel_defect == 0).all()
    for name in ("low", "high", "displacement", "random"):
        assert (data[f"parallel_change_{name}"] == 0).all()


def test_numbers_are_reproducible_to_the_seed(whole):
    again = ablated(**EVERYTHING, n_random=3)["ablation"]
    for name in again:
        if "time" not in str(name) and "speedup" not in str(name):
            assert np.array_equal(again[name], whole["ablation"][name]), name
    other = ablated(variants=False, gates=True, seed=5)["ablation"]
    assert not np.array_equal(other.gate, again.gate)


def test_a_pass_is_run_once_and_remembered_through_a_kill(tmp_path):
    view, corpus, memory = ModelView(tiny("llama")), random_corpus(), tmp_path / "passes.jsonl"
    first = Passes(view, corpus, memory=memory)
    change = first.change(ZeroFFN())
    assert (first.change(ZeroFFN()), first.n_run) == (change, 2)
    lines = memory.read_text().splitlines(keepends=True)
    memory.write_text(lines[0] + lines[1][: len(lines[1]) // 2])  # killed while it wrote the second
    second = Passes(view, corpus, memory=memory)
    assert second.change(ZeroFFN()) == change
    assert second.n_run == 1
    third = Passes(view, corpus, memory=memory)
    assert (third.change(ZeroFFN()), third.n_run) == (change, 0)


def test_what_is_remembered_belongs_to_one_model_text_and_edit(tmp_path):
    memory, corpus = tmp_path / "passes.jsonl", random_corpus()
    Passes(ModelView(tiny("llama")), corpus, memory=memory).losses(ZeroFFN())
    for view, text, edit in (
        (ModelView(tiny("llama", seed=1)), corpus, ZeroFFN()),
        (ModelView(tiny("llama", rms_norm_eps=0.1)), corpus, ZeroFFN()),
        (ModelView(tiny("llama")), random_corpus(seed=1), ZeroFFN()),
        (ModelView(tiny("llama")), corpus, ZeroFFN(layers=(1,))),
    ):
        passes = Passes(view, text, memory=memory)
        passes.losses(edit)
        assert passes.n_run == 1


def test_a_file_that_holds_no_passes_is_refused(tmp_path):
    memory = tmp_path / "passes.jsonl"
    memory.write_text("hello\n" + json.dumps({"key": "x"}) + "\n")
    with pytest.raises(RheoscopeError, match="its line 1 is no pass"):
        Passes(ModelView(tiny("llama")), random_corpus(), memory=memory)


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "gpt_neox", "opt"])
def test_gates_that_were_planted_are_found_again(name):
    """Text drawn from the gated model's own predictions: the best gates are the planted ones, or near them."""
    view = ModelView(tiny(name))
    planted = torch.tensor([0.4, 1.0, 1.6], dtype=torch.float64)
    tokens = torch.full((48, 29), 3)
    tokens[:, 0] = torch.arange(48) + 5
    generator = torch.Generator().manual_seed(0)
    with Float64Throughout(), torch.no_grad(), view.tapped({"ffn_out": lambda layer, F: F * planted[layer]}):
        for place in range(28):
            probs = (3 * view.forward(tokens)[:, place]).softmax(-1)
            tokens[:, place + 1] = torch.multinomial(probs, 1, generator=generator)[:, 0]
    corpus = corpus_of(tokens.numpy())
    with Float64Throughout():
        gates = fitted_gates(view, corpus, Fit(steps=60, rate=0.03, windows=24))
        passes = Passes(view, corpus)
        assert float(passes.change(GateFFN(gates=tuple(gates.tolist()))).value) < 0
    assert gates[0] < 1 < gates[2]


def test_fitting_gates_leaves_the_model_and_its_gradients_alone():
    view, corpus = ModelView(tiny("llama")), random_corpus()
    before = {name: parameter.clone() for name, parameter in view.model.named_parameters()}
    with Float64Throughout():
        fitted_gates(view, corpus, QUICK)
    for name, parameter in view.model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


def test_splits_hold_whole_documents_and_all_of_them():
    corpus = random_corpus()
    calibration, held_out = split_units(corpus, seed=2)
    assert not set(calibration.documents) & set(held_out.documents)
    assert calibration.n_windows + held_out.n_windows == corpus.n_windows


def test_orders_are_by_defect_and_random_ones_differ_by_seed():
    orders = schedules(np.array([3.0, 1, 2]), n_random=2, seed=0)
    assert orders["low"].tolist() == [1, 2, 0]
    assert orders["high"].tolist() == [0, 2, 1]
    many = [schedules(np.zeros(9), n_random=1, seed=seed)["random 0"].tolist() for seed in (0, 0, 1)]
    assert many[0] == many[1] != many[2]
    assert curve_sizes(3) == [1, 2, 3]


def test_the_estimated_speed_up_is_that_of_two_free_devices():
    costs = np.array([[1.0, 3.0], [2.0, 2.0]])
    assert estimated_speedup(costs, ()) == 1
    assert estimated_speedup(costs, (0,)) == pytest.approx(8 / 7)
    assert estimated_speedup(costs, (0, 1)) == pytest.approx(8 / 5)
    measured = layer_times(ModelView(tiny("llama")), random_corpus(), batch_size=2)
    assert measured.shape == (3, 2)
    assert (measured > 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variants": False}, "without any part"),
        ({"parallel_curve": True, "variants": False, "sizes": [4]}, "the model has 3: ask for 1 to 3"),
        ({"gates": True, "corpus": random_corpus(lengths=(29,), documents=(0,))}, "no text to fit on|no held-out text"),
    ],
)
def test_bad_input_is_one_sentence(options, message):
    with pytest.raises(RheoscopeError, match=message):
        ablated(**options)


def test_models_without_a_loss_or_without_the_sites_are_refused():
    with pytest.raises(Refused, match="reads both ways"):
        ablated("bert")
    with pytest.raises(Refused, match="norms the stream after every addition"):
        ablated("opt:post-norm")
    view = ModelView(tiny("llama"))
    view.family = None
    with pytest.raises(Refused, match="black box without a site"):
        fitted_gates(view, random_corpus(), QUICK)


def test_parallel_layers_of_one_choice_are_run_once():
    passes = Passes(ModelView(tiny("llama")), random_corpus())
    for layers in ((0, 1), (0, 1)):
        passes.change(ParallelFFN(layers=layers))
    assert passes.n_run == 2
