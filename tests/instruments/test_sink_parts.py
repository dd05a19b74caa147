"""The parts of the sink readings: entries of maps, switches, bounds, geometry, attention steps."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rheoscope.instruments.measure import measure
from rheoscope.instruments.sinks import map_entries as entries_module
from rheoscope.instruments.sinks.geometry import sink_geometry
from rheoscope.instruments.sinks.map_entries import FromMap, FromNormaliser, chunked_normaliser, map_entries
from rheoscope.instruments.sinks.mixing import attention_step, linear_step
from rheoscope.instruments.sinks.outputs import output_bounds
from rheoscope.instruments.sinks.pattern_costs import head_costs, least_pattern_costs
from rheoscope.instruments.sinks.sinks import SinkReadings
from rheoscope.instruments.sinks.switches import Switches, dependence, flipping_tokens
from rheoscope.instruments.sinks.value_norms import ValueNorms
from rheoscope.models.view import ModelView
from rheoscope.theory import half_space
from rheoscope.theory.costs import closed_form
from tests.tiny import VARIANTS, Float64Throughout, input_ids, tiny

from .texts import random_corpus

VALID = torch.arange(13) < torch.tensor([[13], [9]])


@torch.no_grad()
def calls_of(view, taps=("attention", "attn_out")):
    """Attention of every layer on two windows, one padded, and what attention adds."""
    kept = {site: [] for site in taps}

    def keep(site, _layer, value):
        if site == "attention":
            probs = value.of_rows(np.array([0, 1])).probs.clone()
            entries = map_entries(value)
            entries = FromMap(probs) if isinstance(entries, FromMap) else entries  # maps do not outlive their layer
            kept[site].append((value, entries, probs, value.z.clone()))
        else:
            kept[site].append(value.clone())

    hooks = {site: lambda layer, value, site=site: keep(site, layer, value) for site in taps}
    with Float64Throughout(), view.tapped(hooks):
        view.forward(input_ids(view.model), VALID)
    return kept


@pytest.mark.parametrize("name", VARIANTS)
def test_single_entries_are_those_of_the_map(name):
    view = ModelView(tiny(name))
    for attention, entries, probs, _ in calls_of(view)["attention"]:
        needs_map = attention.softcap or attention.sinks is not None
        assert isinstance(entries, FromMap if needs_map else FromNormaliser)
        real = VALID[:, None, :, None]
        close = {"rtol": 1e-10, "atol": 1e-12}
        for lag in (0, 1, 20):
            diagonal = probs.diagonal(-lag, dim1=2, dim2=3) if lag < 13 else probs[..., :0, 0]
            found = entries.diagonal(lag)[..., -diagonal.shape[-1] :] if lag < 13 else entries.diagonal(lag)[..., :0]
            seen = VALID[:, None, lag:] if lag < 13 else VALID[:, None, :0]
            torch.testing.assert_close(found * seen, diagonal * seen, **close)
        keys = torch.tensor([[[0, 3, 8]]]).expand(2, view.n_heads, -1)
        columns = entries.columns(keys).mT
        torch.testing.assert_close(columns * real, probs[..., [0, 3, 8]] * real, **close)
        queries = torch.tensor([[1, 7], [2, 8]])
        rows = entries.rows(queries)
        for window in range(2):
            torch.testing.assert_close(rows[window], probs[window][:, queries[window]], **close)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "modernbert", "bert"])
def test_the_output_handed_on_is_that_of_sdpa_bit_for_bit(name):
    for attention, _, _, z in calls_of(ModelView(tiny(name, dtype=torch.float32)))["attention"]:
        k, v = (x.repeat_interleave(attention.n_rep, 1) for x in (attention.k, attention.v))
        causal = attention.mask is None and attention.causal
        sdpa = torch.nn.functional.scaled_dot_product_attention(
            attention.q, k, v, attn_mask=attention.mask, scale=attention.scale, is_causal=causal
        )
        assert torch.equal(z, sdpa)


def test_normalisers_are_forgotten_with_what_they_were_made_of():
    view = ModelView(tiny("llama"))
    attention = calls_of(view)["attention"][0][0]
    assert attention.normaliser is not None
    assert attention.of_rows(np.array([0])).normaliser is None
    attention.replace_input("q", attention.q * 2)
    assert attention.normaliser is None


@pytest.mark.parametrize("name", ["llama", "mistral", "modernbert"])
def test_normalisers_in_blocks_are_those_of_the_kernel(name, monkeypatch):
    monkeypatch.setattr(entries_module, "CHUNK", 4)
    for attention, entries, *_ in calls_of(ModelView(tiny(name)))["attention"]:
        torch.testing.assert_close(chunked_normaliser(attention), entries.normaliser, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_an_attention_step_from_z_is_what_the_layer_adds(name):
    view = ModelView(tiny(name))
    kept = calls_of(view)
    for layer, (call, added) in enumerate(zip(kept["attention"], kept["attn_out"], strict=True)):
        with torch.no_grad(), Float64Throughout():
            step = attention_step(view, layer, call[3][0])
        torch.testing.assert_close(step, added[0], rtol=1e-9, atol=1e-11)


def test_the_closed_form_is_left_out_where_a_norm_acts_on_the_step():
    assert {name for name in VARIANTS if not linear_step(ModelView(tiny(name)))} == {"gemma2", "gemma3_text", "olmo2"}


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_value_norms_are_those_of_the_whole_output(name):
    view = ModelView(tiny(name))
    norms = ValueNorms(view)
    v = torch.randn(2, view.n_kv_heads, 7, view.d_head, dtype=torch.float64)
    W_O = view.weights.W_O(1)
    for head in range(view.n_heads):
        whole = v[:, head // (view.n_heads // view.n_kv_heads)] @ W_O[head]
        torch.testing.assert_close(norms.of_values(1, v)[:, head], whole.norm(dim=-1))
    z = torch.randn(view.n_heads, 5, view.d_head, dtype=torch.float64)
    reduced, whole = norms.reduced(1, z), z @ W_O
    torch.testing.assert_close(reduced @ reduced.mT, whole @ whole.mT)


def test_dependence_is_one_for_a_switch_that_the_token_turns_and_about_zero_by_chance():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 20, 4000)
    off = np.stack([tokens < 7, rng.random(4000) < 0.4, np.zeros(4000, bool), np.ones(4000, bool)])
    share = dependence(off, tokens)
    assert share[0] == pytest.approx(1)
    assert abs(share[1]) < 0.01
    assert np.isnan(share[2:]).all()
    assert np.isnan(dependence(off[:, :20], np.arange(20))).all()  # no token occurs twice
    few = dependence(rng.random((500, 40)) < 0.5, rng.integers(0, 12, 40))
    assert abs(np.nanmean(few)) < 0.03  # without the correction it would be about 0.28


def test_tokens_that_flip_a_head_are_named_by_how_often_they_do():
    tokens = np.array([5, 5, 5, 6, 6, 7, 7, 7, 8])
    off = np.array([1, 1, 1, 1, 0, 0, 0, 0, 1], bool)
    turned_off, turned_on = flipping_tokens(off, tokens)
    assert turned_off.tolist() == [5]  # 8 was seen once, 6 is off about as often as all
    assert turned_on.tolist() == [7, 6]


def test_examples_show_the_heads_that_the_token_switches():
    corpus = random_corpus(lengths=(29,) * 6, documents=range(6))
    view = SimpleNamespace(n_layers=2, n_heads=3, tokenizer=SimpleNamespace(decode=lambda ids: f"<{ids[0]}>"))
    switches = Switches(view, corpus, np.arange(6))
    rng = np.random.default_rng(0)
    for index, tokens in enumerate(corpus.tokens):
        for layer in range(2):
            sink = torch.tensor(rng.random((3, 29)))
            if layer == 1:
                sink[2] = torch.tensor((tokens < 30) * 0.99)
            switches.add(layer, index, sink, torch.zeros(3, 29))
    found = switches.readings()
    assert (found["example_layer"][1][0], found["example_head"][1][0]) == (1, 2)
    assert found["hard_switch_dependence"][1][1, 2] == pytest.approx(1)
    text, mass = found["example_text"][1][0], found["example_mass"][1][0]
    assert all((int(token[1:-1]) < 30) == (value > 0.9) for token, value in zip(text, mass, strict=True))


def bounded(z, A, sink=0):
    """Bounds of one head with values z [key d] and map A [query key]."""
    z, A = torch.as_tensor(z)[None], torch.as_tensor(A)[None]
    return output_bounds(z, A @ z, A[..., sink], torch.tensor([sink]))


def test_outputs_lie_between_their_bounds_where_values_share_a_half_space():
    rng = np.random.default_rng(0)
    for _ in range(30):
        z = rng.standard_normal((17, 6)) + 1.2
        z[0] *= rng.random()
        A = np.tril(rng.random((17, 17)) ** 6 + 1e-9)
        found = bounded(z, A / A.sum(1, keepdims=True))
        assert found.readings["bound_violations"] == 0
        if found.readings["value_margin"] > 0 and found.readings["bound_assumption_share"]:
            points = found.points
            assert (points["output_lower"] <= points["output_norm"] + 1e-9).all()
            assert (points["output_norm"] <= points["output_upper"] + 1e-9).all()


def test_a_head_whose_sink_has_no_value_is_silent_exactly_when_all_its_mass_is_there():
    z = np.random.default_rng(1).standard_normal((5, 4)) + 2
    z[0] = 0
    A = np.zeros((5, 5))
    A[:, 0] = 1
    A[4] = 0.25, 0.25, 0.25, 0.25, 0
    found = bounded(z, A)
    assert found.readings["bound_assumption_share"] == 1
    np.testing.assert_allclose(found.points["output_norm"][0, :18], 0, atol=1e-12)
    assert (found.points["output_lower"][0, -1:] > 0).all()


def test_values_with_zero_in_their_hull_can_cancel_without_a_sink():
    z = np.array([[0.0, 0], [1, 0], [-1, 0]])
    A = np.array([[1.0, 0, 0], [0, 1, 0], [0, 0.5, 0.5]])
    found = bounded(z, A)
    assert found.points["output_norm"][0, -1] == 0
    assert found.points["free_mass"][0, -1] == 1
    assert found.readings["bound_assumption_share"] == 0  # counted, and no lower bound is claimed
    assert np.isnan(found.points["output_lower"]).all()
    assert found.readings["bound_violations"] == 0


def test_independent_values_bound_the_output_by_their_least_singular_value():
    rng = np.random.default_rng(2)
    z = rng.standard_normal((6, 11))
    least = np.linalg.svd(z, compute_uv=False)[-1]
    for _ in range(50):
        A = rng.random(6)
        A /= A.sum()
        assert np.linalg.norm(A @ z) >= least * np.linalg.norm(A[1:]) - 1e-12


def test_geometry_of_a_sink_that_points_away_and_of_one_that_is_a_mixture():
    others = np.random.default_rng(3).standard_normal((9, 4)) * 0.1 + [1, 0, 0, 0]
    away = np.vstack([[-1.0, 0, 0, 0], others])
    mixture = np.vstack([others.mean(0), others])
    found = sink_geometry([torch.tensor(away), torch.tensor(mixture)], 0)
    assert found["sink_cosine_max"][0] < 0 < found["sink_cosine_mean"][1]
    assert found["sink_cosine_nonpositive"].tolist() == [1, 0]
    assert found["half_space_margin"][0] == pytest.approx(0, abs=1e-6) or found["half_space_margin"][0] < 0.2
    assert found["half_space_margin"][1] > 0.5
    assert found["sink_outside_hull"].tolist() == [1, 0]
    assert found["sink_hull_distance"][1] == 0
    one = sink_geometry([torch.tensor(away), None], 0)
    assert np.isnan(one["half_space_margin"][1])
    assert sink_geometry([None, None], 0) == {}


def test_patterns_on_orthonormal_tokens_cost_what_the_closed_form_says():
    x = np.eye(40, 50) * 7
    costs = least_pattern_costs(x, np.arange(40), 3)["pattern_cost"]
    for row, pattern in enumerate(("sink", "diagonal")):
        expected = [closed_form(pattern, "nuclear", size) for size in (4, 8, 16)]
        np.testing.assert_allclose(costs[row], expected, rtol=1e-3)
    few = least_pattern_costs(x, np.arange(40) % 6, 3)["pattern_cost"]
    assert np.isfinite(few[:, 0]).all()
    assert np.isnan(few[:, 1:]).all()


@torch.no_grad()
def test_norms_of_heads_are_those_of_the_dense_products():
    view = ModelView(tiny("llama"))
    found = head_costs(view)
    gain = view.weights.gain(1)[:, None]
    for head in range(6):
        qk = (gain * view.weights.W_Q(1)[head]) @ (gain * view.weights.W_K(1)[head]).T
        vo = (gain * view.weights.W_V(1)[head]) @ view.weights.W_O(1)[head]
        for name, matrix in (("qk", qk), ("vo", vo)):
            values = torch.linalg.svdvals(matrix)
            assert float(found[f"{name}_nuclear"][1, head]) == pytest.approx(float(values.sum()))
            assert float(found[f"{name}_frobenius"][1, head]) == pytest.approx(float(matrix.norm()))


def test_margins_that_no_solver_settles_are_counted_and_claim_nothing(monkeypatch):
    def unsettled(*_, **__):
        raise RuntimeError

    view, options = ModelView(tiny("llama")), {"sinks": SinkReadings.Options(n_null=0, n_sampled=2, n_geometry=2)}
    settled = measure(view, random_corpus(), instruments=["sinks"], options=options)["sinks"]
    monkeypatch.setattr(half_space, "nnls", unsettled)
    data = measure(view, random_corpus(), instruments=["sinks"], options=options)["sinks"]
    # two windows, three layers: margin and distance of two streams, and the values of six heads
    assert (settled.attrs["unsolved_margins"], data.attrs["unsolved_margins"]) == (0, 2 * 3 * (2 * 2 + 6))
    assert np.isnan(data.bound_assumption_share).all()
