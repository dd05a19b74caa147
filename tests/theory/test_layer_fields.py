"""The fields of a layer are what its modules write when all tokens coincide; readings of criticals keep their shape."""

import numpy as np
import pytest
import torch

from rheoscope.errors import Refused, RheoscopeError
from rheoscope.instruments.catalog import out_of_bounds
from rheoscope.models.view import ModelView
from rheoscope.run import Run
from rheoscope.theory.critical_readings import criticals
from rheoscope.theory.criticals import zero_score
from rheoscope.theory.layer_fields import (
    attention_matrix,
    layer_field,
    random_directions,
    shuffled_ffn,
    starts,
    token_directions,
)
from rheoscope.theory.portraits import GRID, portrait
from tests.instruments.texts import random_corpus
from tests.tiny import Float64Throughout, tiny

NORMED_ATTENTION = ("gemma2", "gemma3_text", "olmo2")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "gemma", "granite", "cohere", "opt", "phi"])
def test_the_attention_field_is_what_attention_writes_where_all_tokens_are_the_same(name):
    view = ModelView(tiny(name))
    radius, u = 50.0, random_directions(view, 5, seed=1)
    kept = []
    with (
        Float64Throughout(),
        torch.no_grad(),
        view.tapped(
            {
                "resid_pre": lambda layer, x: (radius * u[: len(x), None]).expand_as(x),
                "attn_out": lambda layer, A: kept.append(A.clone()),
            },
            layers=[1],
        ),
    ):
        view.forward(torch.full((5, 7), 3))
    weights = view.weights
    constant = torch.einsum("hv,hvm->m", weights.b_V(1), weights.W_O(1)) + weights.b_O(1)
    norm_bias = getattr(view.part(1, view.family.norm_attn), "bias", None)
    if norm_bias is not None:
        constant = constant + norm_bias @ torch.einsum("hdv,hvm->dm", weights.W_V(1), weights.W_O(1))
    expected = u @ attention_matrix(view, 1) + constant * view.multiplier
    # the norm's epsilon and its mean make the length of what it sees a little less than the radius
    cosine = torch.cosine_similarity(kept[0][:, 3] - constant * view.multiplier, expected - constant * view.multiplier)
    assert (1 - cosine).max() < 1e-6
    length = (kept[0][:, 3] - constant * view.multiplier).norm(dim=-1) / (u @ attention_matrix(view, 1)).norm(dim=-1)
    assert ((length - 1).abs() < 0.05).all()


def test_the_full_field_is_the_sum_of_its_terms():
    view = ModelView(tiny("llama"))
    u = random_directions(view, 4, seed=0)
    with torch.no_grad():
        F, A, both = (
            layer_field(view, 1, which, radius=3.0, strength=0.5)(u) for which in ("FFN only", "attention only", "full")
        )
    assert (F + A - both).abs().max() < 1e-12


@pytest.mark.parametrize("name", NORMED_ATTENTION)
def test_attention_behind_a_norm_is_no_linear_field(name):
    with pytest.raises(Refused, match="norms what attention writes"):
        attention_matrix(ModelView(tiny(name)), 0)


def test_starts_are_unit_vectors_of_three_kinds():
    view, corpus = ModelView(tiny("llama")), random_corpus()
    begin, radius = starts(view, 1, corpus, n=7, seed=0)
    assert begin.shape == (21, view.d_model)
    assert (begin.norm(dim=-1) - 1).abs().max() < 1e-12
    assert radius > 0
    again, _ = token_directions(view, 1, corpus, n=7, seed=0)
    assert torch.equal(begin[:7], again)


def test_shuffled_weights_are_the_same_numbers_and_come_back_bit_for_bit():
    view = ModelView(tiny("llama"))
    before = [parameter.clone() for parameter in view.model.parameters()]
    module = view.part(1, "mlp")
    own = module.down_proj.weight.clone()
    with shuffled_ffn(view, 1, seed=0):
        assert not torch.equal(module.down_proj.weight, own)
        assert torch.equal(module.down_proj.weight.flatten().sort().values, own.flatten().sort().values)
    for parameter, kept in zip(view.model.parameters(), before, strict=True):
        assert torch.equal(parameter, kept)


def test_critical_directions_of_a_model_are_found_with_their_nulls(tmp_path):
    view, corpus = ModelView(tiny("llama")), random_corpus()
    run = criticals(view, corpus, layer=1, n_starts=8, n_steps=30)
    data = run["criticals"]
    assert (data.critical_distinct.sel(field=["attention only", "full"]) > 0).all()
    assert (data.critical_distinct <= data.critical_converged).all()
    assert np.nanmax(data.critical_score) <= 0.05
    assert np.allclose(data.critical_kind_share.sel(field=["attention only", "full"]).sum("kind"), 1)
    assert np.allclose(data.critical_kind_share_null_directions.sum("kind"), 1)
    assert data.critical_kind_share_null_weights.sel(field="attention only").isnull().all()
    assert out_of_bounds(data, "criticals") == []
    run.save(tmp_path / "run.nc")
    assert Run.load(tmp_path / "run.nc")["criticals"].identical(data)
    assert criticals(view, corpus, layer=1, n_starts=8, n_steps=30)["criticals"].identical(data)


def test_a_portrait_stands_still_at_its_pair_and_shows_the_flow_elsewhere():
    M = torch.diag(torch.tensor([3.0, 2, 1, -1], dtype=torch.float64))
    e = torch.eye(4, dtype=torch.float64)
    drawn = portrait(lambda u: u @ M, e[1], e[2], e[0])
    a, b, middle = drawn["a"], drawn["b"], GRID // 2
    # u ∝ m + a e₁ + b e₂ with m ± e₁ = √2 × the pair: its parts are x₁ = b, x₂, x₃ = (1 ∓ a)/√2
    assert drawn["score"][middle, abs(a[0] - 1).argmin()] < drawn["score"][middle, middle]
    share = (1 - a) / 2  # of m in the first of the pair, whose eigenvalue is 2; the second's is 1
    rate = 2 * share + (1 - share)
    assert torch.allclose(drawn["velocity_b"], (3 - rate) * b, atol=1e-12)
    assert torch.allclose(drawn["velocity_a"], (a**2 - 1) / 2, atol=1e-12)


def test_a_layer_that_is_not_there_is_refused():
    with pytest.raises(RheoscopeError, match="layer 3 asked for; the model has layers 0 to 2"):
        criticals(ModelView(tiny("llama")), random_corpus(), layer=3)
    with pytest.raises(Refused, match="norms the stream after every addition"):
        criticals(ModelView(tiny("bert")), random_corpus(), layer=0)


def test_the_zero_score_of_the_attention_field_is_zero_at_its_eigenvectors():
    view = ModelView(tiny("llama"))
    V = attention_matrix(view, 0)
    values, vectors = torch.linalg.eig(V.mT)
    real = vectors[:, (values.imag.abs() < 1e-9) & (values.abs() > 1e-6)].real.mT
    assert len(real)
    real = real / real.norm(dim=-1, keepdim=True)
    assert zero_score(real @ V, real).max() < 1e-9
