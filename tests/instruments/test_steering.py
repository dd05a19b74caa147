"""The steering instrument: literal formulas on every family, laws of its means, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rheoscope.errors import Refused, RheoscopeError
from rheoscope.instruments.catalog import out_of_bounds
from rheoscope.instruments.measure import measure
from rheoscope.instruments.steering.steering import EPSILON, Steering
from rheoscope.models.families import Residual
from rheoscope.models.field import ffn_derivative, ffn_field
from rheoscope.models.view import ModelView
from rheoscope.surgery.edits import edited
from rheoscope.surgery.edits_steering import ParallelFFN
from rheoscope.surgery.edits_structure import Parallelize
from rheoscope.surgery.restructure import restructured
from tests.instruments.texts import random_corpus
from tests.tiny import VARIANTS, Float64Throughout, input_ids, tiny

NORMED = ("bert", "bert:decoder", "roberta", "distilbert", "opt:post-norm")
READ = [name for name in VARIANTS if name not in NORMED]
PARALLEL = ("gpt_neox", "gptj", "phi", "cohere", "cohere2", "stablelm:parallel")
OPTIONS = Steering.Options(defect_stride=1, n_first_order=12, n_top_k=12, top_k=3, n_null=0)


def measured(view, corpus, options=OPTIONS, **more):
    with Float64Throughout():
        return measure(view, corpus, instruments=["steering"], options={"steering": options}, **more)["steering"]


def caught(view, tokens, *sites):
    kept = {site: [] for site in sites}
    with view.tapped({site: lambda layer, value, site=site: kept[site].append(value.clone()) for site in sites}):
        view.forward(tokens)
    return [torch.stack(kept[site]) for site in sites]


def literal(view, corpus):
    """Every reading of every layer without the first tokens, from the stream of each window alone."""
    totals, counts = {}, {}
    for tokens, length in zip(corpus.tokens, corpus.lengths, strict=True):
        tokens = torch.tensor(tokens[:length], dtype=torch.int64)[None]
        pre, A, F, post = (
            site[:, 0] for site in caught(view, tokens, "resid_pre", "attn_out", "ffn_out", "resid_post")
        )
        for layer in range(view.n_layers):
            for name, values in literal_step(view, layer, pre[layer], A[layer], F[layer], post[layer]).items():
                totals[name, layer] = totals.get((name, layer), 0) + values.sum()
                counts[name, layer] = counts.get((name, layer), 0) + values.numel()
    return {key: float(total / counts[key]) for key, total in totals.items()}


def literal_step(view, layer, x, A, F, after):
    """Readings of all tokens of a window but the first, straight from the definitions."""
    parallel = view.family.residual is Residual.PARALLEL
    alone = ffn_field(view, layer, x)
    x, A, F, after, alone = (v[1:] for v in (x, A, F, after, alone))
    y, u, turned = x + A, unit(x), unit(after) - unit(x)
    read = unit(x if parallel else y)

    def P(v):
        return v - (v * u).sum(-1, keepdim=True) * u

    found = {
        "angular_deficit": 1 - cosine(P(A), P(turned)),
        "angular_deficit_chord": 1 - cosine(P(A), turned),
        "ffn_deficit": 1 - cosine(P(F), P(turned)),
        "ffn_deficit_chord": 1 - cosine(P(F), turned),
        "attention_radial_share": (u * A).sum(-1) ** 2 / (A * A).sum(-1),
        "ffn_radial_share": (read * F).sum(-1) ** 2 / (F * F).sum(-1),
        "resid_norm": x.norm(dim=-1),
        "attention_norm": A.norm(dim=-1),
        "ffn_norm": F.norm(dim=-1),
        "turning": degrees(x, after),
        "turning_attention": degrees(x, y),
        "turning_ffn": degrees(y, after),
        "defect": (F - alone).norm(dim=-1) / (alone.norm(dim=-1) + EPSILON),
        "defect_displacement": (F - alone).norm(dim=-1) / after.norm(dim=-1),
        "resid_sum": (y + F - after).norm(dim=-1),
    }
    for name, place in (("pre", x), ("mid", y), ("post", after)):
        found[f"diversity_{name}"] = 1 - unit(place).mean(0).square().sum()[None]
    return found


def unit(v):
    return v / v.norm(dim=-1, keepdim=True)


def cosine(a, b):
    return (unit(a) * unit(b)).sum(-1)


def degrees(a, b):
    return torch.rad2deg(torch.acos(cosine(a, b)))


@pytest.mark.parametrize("name", READ)
def test_every_reading_is_its_definition(name):
    view, corpus = ModelView(tiny(name)), random_corpus()
    data = measured(view, corpus, batch_size=5)
    with Float64Throughout(), torch.no_grad():
        expected = literal(view, corpus)
    for (reading, layer), value in expected.items():
        if reading == "resid_sum":
            assert value < 1e-13
        else:
            assert float(data[reading][layer]) == pytest.approx(value, rel=1e-7, abs=1e-9), (reading, layer)
    assert data.resid_sum_error.max() < 1e-14
    assert out_of_bounds(data, "steering") == []


@pytest.mark.parametrize("name", PARALLEL)
def test_the_defect_of_parallel_blocks_is_exactly_zero_and_their_ffn_does_read_resid_pre(name):
    view = ModelView(tiny(name))
    data = measured(view, random_corpus())
    for reading in ("defect", "defect_all", "defect_ratio", "defect_displacement", "defect_first_order"):
        assert (data[reading] == 0).all()
    with Float64Throughout(), torch.no_grad():
        pre, F = caught(view, input_ids(view.model), "resid_pre", "ffn_out")
        for layer in range(view.n_layers):
            assert (ffn_field(view, layer, pre[layer]) - F[layer]).abs().max() < 1e-12


def test_the_sequential_neox_has_a_defect_and_parallel_layers_have_none():
    view, corpus = ModelView(tiny("gpt_neox:sequential")), random_corpus()
    assert (measured(view, corpus).defect > 0.1).all()
    with edited(view, ParallelFFN(layers=(0, 2))):
        inside = measured(view, corpus).defect
    assert (inside[[0, 2]] < 1e-12).all()
    assert inside[1] > 0.1


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "granite", "olmo2", "mixtral", "gpt_oss", "opt"])
def test_the_derivative_of_the_ffn_agrees_with_finite_differences(name):
    view = ModelView(tiny(name))
    with Float64Throughout(), torch.no_grad():
        pre, A = caught(view, input_ids(view.model), "resid_pre", "attn_out")
        value, change = ffn_derivative(view, 1, pre[1], A[1])
        step = 1e-6
        ahead, behind = (ffn_field(view, 1, pre[1] + sign * step * A[1]) for sign in (1, -1))
        alone = ffn_field(view, 1, pre[1])
    assert (value - alone).abs().max() < 1e-12 * alone.abs().max()
    difference = (ahead - behind) / (2 * step)
    assert (difference - change).abs().max() < 1e-6 * change.abs().max()


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "olmo2"])
def test_sequential_minus_parallel_is_the_first_order_defect_up_to_the_third_power_of_the_step(name):
    """x + τA + τΦ(x + τA) - (x + τA + τΦ(x)) = τ² DΦ(x)A + O(τ³)."""
    view = ModelView(tiny(name))
    steps = np.geomspace(1e-3, 1e-1, 9)
    errors = []
    with Float64Throughout(), torch.no_grad():
        pre, A = caught(view, input_ids(view.model), "resid_pre", "attn_out")
        x, A = pre[1], A[1]
        value, change = ffn_derivative(view, 1, x, A)
        for step in steps:
            lost = step * (ffn_field(view, 1, x + step * A) - value)
            errors.append(float((lost - step**2 * change).norm()))
    order = np.polyfit(np.log(steps), np.log(errors), 1)[0]
    assert order == pytest.approx(3, abs=0.1)


def test_batches_padding_and_sampled_positions_change_nothing_but_what_they_sample():
    view, corpus = ModelView(tiny("llama")), random_corpus()
    one, many = measured(view, corpus, batch_size=12), measured(view, corpus, batch_size=1)
    for name in one:
        assert np.allclose(one[name], many[name], rtol=1e-9, atol=1e-12, equal_nan=True), name
    sampled = measured(view, corpus, replace(OPTIONS, defect_stride=3))
    assert sampled.attrs["n_defects"] < one.attrs["n_defects"] == one.attrs["n_tokens"]
    assert not np.allclose(sampled.defect, one.defect)
    assert np.allclose(sampled.angular_deficit, one.angular_deficit, atol=1e-12)


def test_errors_are_over_documents_and_the_first_token_is_told_apart():
    view, corpus = ModelView(tiny("llama")), random_corpus()
    with torch.no_grad():
        view.model.get_input_embeddings().weight[7] *= 1e3
    corpus.tokens[corpus.tokens == 7] = 8
    corpus.tokens[:, 0] = 7
    data = measured(view, corpus)
    assert data.attrs["n"] == corpus.n_documents
    assert data.attrs["n_tokens"] == corpus.n_tokens - corpus.n_windows
    assert data.resid_norm_all[0] > 10 * data.resid_norm[0]
    assert (data.angular_deficit_se > 0).all()


def test_the_trend_over_depth_is_that_of_the_layers():
    view, corpus = ModelView(tiny("llama")), random_corpus()
    data = measured(view, corpus)
    slope, _ = np.polyfit([0, 0.5, 1], data.angular_deficit, 1)
    assert float(data.angular_deficit_slope) == pytest.approx(slope, rel=1e-9)
    assert float(data.angular_deficit_mean) == pytest.approx(float(data.angular_deficit.mean()), rel=1e-9)


def test_all_attention_weights_carry_all_of_the_output_and_the_largest_almost_all():
    view, corpus = ModelView(tiny("gpt_oss")), random_corpus()
    cosines = [measured(view, corpus, replace(OPTIONS, top_k=k)).top_k_cosine for k in (1, 3, 29)]
    assert (cosines[0] < cosines[1]).all()
    assert (cosines[1] < 1).all()
    assert np.allclose(cosines[2], 1, atol=1e-12)


def test_half_precision_is_read_in_full_precision():
    view, corpus = ModelView(tiny("llama", dtype=torch.bfloat16)), random_corpus()
    data = measured(view, corpus)
    exact = measured(ModelView(tiny("llama")), corpus)
    assert np.allclose(data.angular_deficit, exact.angular_deficit, atol=0.02)
    assert np.allclose(data.turning, exact.turning, rtol=0.02)


def test_nulls_come_from_an_untrained_model_and_everything_is_reproducible():
    view, corpus = ModelView(tiny("llama")), random_corpus()
    options = Steering.Options(n_null=4)
    first, second = measured(view, corpus, options, seed=3), measured(view, corpus, options, seed=3)
    other = measured(view, corpus, options, seed=4)
    assert first.identical(second)
    assert not np.allclose(first.angular_deficit_null, other.angular_deficit_null)
    assert {"defect_null_se", "diversity_pre_null", "angular_deficit_null_orthogonal_se"} <= set(map(str, first))
    assert first.attrs["n_defects"] > 0


def test_readings_that_are_not_wanted_are_left_out():
    options = Steering.Options(defect_stride=0, n_top_k=0, n_null=0)
    data = measured(ModelView(tiny("llama")), random_corpus(), options)
    assert "angular_deficit" in data
    assert not {"defect", "defect_first_order", "top_k_cosine"} & set(map(str, data))


@pytest.mark.parametrize("name", NORMED)
def test_blocks_with_a_norm_on_the_stream_are_refused_with_the_reason(name):
    with pytest.raises(Refused, match="norms the stream after every addition"):
        measured(ModelView(tiny(name)), random_corpus())


def test_a_model_type_without_a_row_is_refused_with_the_way_out():
    view = ModelView(tiny("llama"))
    view.family = None
    with pytest.raises(Refused, match="black box without a site"):
        measured(view, random_corpus())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Steering.Options(defect_stride=-1), "0 or more"),
        (Steering.Options(n_top_k=-2), "0 or more"),
        (Steering.Options(top_k=0), "the top 0 attention weights"),
    ],
)
def test_bad_options_are_one_sentence(options, message):
    with pytest.raises(RheoscopeError, match=message):
        measured(ModelView(tiny("llama")), random_corpus(), options)


def test_a_layer_without_a_deficit_leaves_no_trend_rather_than_a_wrong_one():
    view, corpus = ModelView(tiny("llama")), random_corpus()
    with view.tapped({"attn_out": lambda _, A: A * 0}, layers=[1]):
        data = measured(view, corpus)
    assert np.isfinite(data.angular_deficit.values).tolist() == [True, False, True]
    assert np.isnan(data.angular_deficit_slope)
    assert np.isnan(data.angular_deficit_mean)


def test_a_stream_that_is_no_number_shows_in_the_check_of_the_sum():
    def broken(_, F):
        F = F.clone()
        F[0, 5] = torch.nan
        return F

    view, corpus = ModelView(tiny("llama")), random_corpus()
    with view.tapped({"ffn_out": broken}, layers=[1]):
        data = measured(view, corpus)
    assert np.isnan(data.resid_sum_error.values).tolist() == [False, True, True]


def test_layers_that_an_edit_has_made_parallel_are_read_as_such():
    view, corpus = ModelView(tiny("llama")), random_corpus()
    edits = (Parallelize((1, 2)),)
    cut = ModelView(restructured(view, edits))
    data = measured(cut, corpus)
    assert (data.defect[1:] == 0).all()
    assert data.defect[0] > 0.01
    with edited(view, *edits):
        same = measured(view, corpus)
    np.testing.assert_allclose(data.angular_deficit, same.angular_deficit, rtol=1e-9)
