"""Projection weights in one convention rebuild what attention is given; the wrong layout is rejected."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from rheoscope.errors import Refused
from rheoscope.linalg import kernel_factors, routing_share, score_factors
from rheoscope.models.families import Packing, Residual, Rope
from rheoscope.models.precision import Float64Throughout
from rheoscope.models.view import ModelView
from tests.models.views import caught, outputs, tokens_of, view_of
from tests.tiny import LENGTH, VARIANTS, tiny

POSITIONS = torch.arange(LENGTH)
BIASED = (
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "opt",
    "llama:biases",
    "qwen2",
    "qwen3:biases",
    "phi",
    "stablelm:biases",
    "starcoder2",
    "gpt_oss",
    "bert",
    "roberta",
    "distilbert",
    "modernbert:biases",
)
TOLERANCE = {"rtol": 0, "atol": 1e-12}
# Families whose q, k or v are bounded or normed, so that they are no linear image of the input.
NORMED = [name for name in VARIANTS if view_of(name).family.q_norm or view_of(name).family.clip]


@pytest.mark.parametrize("name", VARIANTS)
def test_queries_keys_and_values_rebuilt_from_weights_are_those_that_attention_gets(name):
    view = view_of(name)
    read = caught(view, tokens_of(view), "attn_in", "q", "k", "v")
    groups = view.n_heads // view.n_kv_heads
    for layer in range(view.n_layers):
        with torch.no_grad(), Float64Throughout():
            q, k = view.weights.projected(layer, read["attn_in"][layer], POSITIONS)
            v = view.weights.values(layer, read["attn_in"][layer])
        torch.testing.assert_close(q, read["q"][layer], **TOLERANCE)
        torch.testing.assert_close(k, read["k"][layer].repeat_interleave(groups, 1), **TOLERANCE)
        torch.testing.assert_close(v, read["v"][layer].repeat_interleave(groups, 1), **TOLERANCE)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_attention_writes_is_the_sum_over_heads_of_z_times_W_O(name):
    view = view_of(name)
    direct = view.family.attn_term in (None, view.family.o) and view.multiplier == 1
    read = caught(view, tokens_of(view), "z", "attn_out")
    for layer in range(view.n_layers):
        rebuilt = torch.einsum("bhpd,hdm->bpm", read["z"][layer], view.weights.W_O(layer)) + view.weights.b_O(layer)
        if not direct:
            norm = view.part(layer, view.family.attn_term) if view.family.attn_term else nn.Identity()
            with torch.no_grad(), Float64Throughout():
                rebuilt = norm(rebuilt) * view.multiplier
        torch.testing.assert_close(rebuilt, read["attn_out"][layer], **TOLERANCE)


@pytest.mark.parametrize("name", VARIANTS)
def test_weights_have_one_shape_per_query_head(name):
    view = view_of(name)
    heads, model, head, value = view.n_heads, view.d_model, view.d_head, view.d_value
    for layer in range(view.n_layers):
        weights = view.weights
        assert weights.W_Q(layer).shape == weights.W_K(layer).shape == (heads, model, head)
        assert weights.W_V(layer).shape == (heads, model, value)
        assert weights.W_O(layer).shape == (heads, value, model)
        assert weights.b_Q(layer).shape == weights.b_K(layer).shape == (heads, head)
        assert weights.b_V(layer).shape == (heads, value)
        assert weights.b_O(layer).shape == weights.gain(layer).shape == (model,)


@pytest.mark.parametrize("name", VARIANTS)
def test_absent_biases_are_zero_and_present_ones_are_not(name):
    weights = view_of(name).weights
    for bias in (weights.b_Q(1), weights.b_K(1), weights.b_V(1)):
        family = VARIANTS[name].family
        assert (bias != 0).all() if name in BIASED or family in BIASED else (bias == 0).all()


@pytest.mark.parametrize("name", ["llama:mqa", "llama", "llama:biases", "gpt_bigcode", "phi3", "gpt_oss"])
def test_keys_of_a_group_are_repeated_and_not_tiled(name):
    view = view_of(name)
    groups = view.n_heads // view.n_kv_heads
    for matrix in (view.weights.W_K(1), view.weights.W_V(1), view.weights.b_K(1), view.weights.b_V(1)):
        for head in range(view.n_heads):
            assert torch.equal(matrix[head], matrix[head // groups * groups])
    assert torch.equal(view.weights.W_K(1)[0], view.weights.W_K(1)[-1]) == (view.n_kv_heads == 1)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in NORMED])
def test_the_score_of_one_content_at_a_lag_is_that_of_the_kernel_turned_by_the_lag(name):
    view = view_of(name)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(view.d_model, generator=generator, dtype=torch.float64)
    same = {"attn_in": lambda layer, given: x.expand_as(given)}
    scores = caught(view, tokens_of(view), "attn_scores", edits=same)["attn_scores"]
    for layer in range(view.n_layers):
        weights = view.weights
        with torch.no_grad(), Float64Throughout():
            q = (x @ weights.W_Q(layer) + weights.b_Q(layer))[:, None]
            k = (x @ weights.W_K(layer) + weights.b_K(layer))[:, None]
            cos, sin = weights.rotation(layer, POSITIONS)
            turned = weights.rotated(q.expand(-1, LENGTH, -1), cos, sin)  # by every lag
            still = weights.rotated(k, cos[:1], sin[:1])
        by_lag = view.scales[layer] * (turned * still).sum(-1)
        for lag in range(LENGTH):
            measured = scores[layer].diagonal(-lag, -2, -1)[0]
            # angles are float32 numbers, of up to 12 radians here, and 2^-24 of that moves a score of about 10
            torch.testing.assert_close(measured, by_lag[:, lag, None].expand_as(measured), rtol=0, atol=2e-5)
        turns = cos.numel() > 0
        assert turns == (not torch.allclose(by_lag[:, :1], by_lag, atol=1e-4))


def test_layers_without_rotation_have_no_pairs():
    assert [view_of("smollm3").weights.rotation(layer, POSITIONS)[0].shape[1] for layer in range(3)] == [5, 0, 5]
    assert [view_of("cohere2").weights.rotation(layer, POSITIONS)[0].shape[1] for layer in range(3)] == [5, 0, 5]
    assert view_of("gpt2").weights.rotation(0, POSITIONS)[0].shape == (LENGTH, 0)


def test_partial_rotation_turns_the_share_of_coordinates_it_says():
    pairs = {"gpt_neox": 2, "gptj": 2, "phi": 2, "stablelm": 2, "nemotron": 2, "phi3:partial-sliding": 4, "llama": 5}
    assert {name: view_of(name).weights.rotation(1, POSITIONS)[0].shape[1] for name in pairs} == pairs


def test_the_gain_of_yarn_is_in_its_cosines():
    cos, _ = view_of("llama:yarn").weights.rotation(0, torch.zeros(1, dtype=torch.long))
    assert (cos > 1.1).all()  # 0.1 ln 4 + 1


@pytest.mark.parametrize("rope", [Rope.HALVES, Rope.INTERLEAVED])
def test_a_rotation_keeps_lengths_and_adds_its_angles(rope):
    view = view_of("llama" if rope is Rope.HALVES else "cohere")
    x = torch.randn(7, view.d_head, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    angle = torch.linspace(0.1, 3, 5, dtype=torch.float64)
    once = view.weights.rotated(x, angle.cos()[None], angle.sin()[None])
    twice = view.weights.rotated(once, angle.cos()[None], angle.sin()[None])
    torch.testing.assert_close(once.norm(dim=-1), x.norm(dim=-1), **TOLERANCE)
    by_twice = view.weights.rotated(x, (2 * angle).cos()[None], (2 * angle).sin()[None])
    torch.testing.assert_close(twice, by_twice, **TOLERANCE)


GAINED = [name for name in VARIANTS if view_of(name).family.residual is not Residual.POST_NORM]


@pytest.mark.parametrize("name", GAINED)
def test_the_gain_is_what_the_norm_before_attention_multiplies_by(name):
    view = view_of(name)
    read = caught(view, tokens_of(view), "resid_pre", "attn_in")
    for layer in range(view.n_layers):
        gain, given, x = view.weights.gain(layer), read["attn_in"][layer], read["resid_pre"][layer]
        norm = view.part(layer, view.family.norm_attn) if view.family.norm_attn else None
        if norm is None or isinstance(norm, nn.Identity):
            assert torch.equal(gain, torch.ones_like(gain))
            assert torch.equal(given, x)
            continue
        bias = getattr(norm, "bias", None)
        unit = (given if bias is None else given - bias) / gain
        # whatever the kind of norm, without its gain it gives vectors of length sqrt(d_model), but for epsilon
        torch.testing.assert_close(unit.square().mean(-1), torch.ones_like(unit[..., 0]), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "name", ["qwen3", "gemma3_text", "olmo2", "qwen3_moe", "stablelm:qk-norm", "stablelm:12-heads", "cohere:qk-norm"]
)
def test_the_kernel_makes_of_a_unit_input_the_direction_of_normed_queries_and_keys(name):
    view = view_of(name)
    read = caught(view, tokens_of(view), "attn_in")["attn_in"]
    for layer in range(view.n_layers):
        W_Q, W_K = view.weights.kernel(layer)
        unit = read[layer] / view.weights.gain(layer)
        with torch.no_grad(), Float64Throughout():
            q, k = view.weights.projected(layer, read[layer], torch.zeros(LENGTH, dtype=torch.long))
        for normed, W in ((q, W_Q), (k, W_K)):
            ratio = normed / torch.einsum("bpm,hmd->bhpd", unit, W)
            torch.testing.assert_close(ratio, ratio.mean(-1, keepdim=True).expand_as(ratio), rtol=1e-9, atol=0)
            assert (ratio > 0).all()


def tied(name):
    """A tiny model with its query weights and biases for its keys too, written in by the family's own layout."""
    model = tiny(name)
    n_heads, d_head = 6, view_of(name).d_head
    width = n_heads * d_head
    for key, parameter in model.named_parameters():
        value = parameter.detach().clone()
        if "k_proj" in key:
            value = model.get_parameter(key.replace("k_proj", "q_proj")).detach().clone()
        elif "c_attn" in key:  # columns: all queries, all keys, all values
            value[..., width : 2 * width] = value[..., :width]
        elif "query_key_value" in key:  # rows: query, key, value of head 0, then of head 1
            per_head = value.unflatten(0, (n_heads, 3, d_head))
            per_head[:, 1] = per_head[:, 0]
            value = per_head.flatten(0, 2)
        parameter.data.copy_(value)
    with Float64Throughout():
        return ModelView(model)


@pytest.mark.parametrize("name", ["llama:mha", "gpt2", "gpt_neox", "gptj", "opt"])
def test_a_model_with_keys_like_queries_routes_nothing(name):
    view = tied(name)
    for layer in range(view.n_layers):
        share = routing_share(kernel_factors(*view.weights.kernel(layer)))
        assert (share < 1e-12).all()
    untied = view_of(name)
    assert (routing_share(kernel_factors(*untied.weights.kernel(0))) > 0.1).all()


def test_the_scores_of_such_a_model_without_positions_in_them_are_symmetric():
    view = tied("gpt2")
    read = caught(view, tokens_of(view), "q", "k", "attn_scores")
    for layer in range(view.n_layers):
        T = score_factors(read["q"][layer], read["k"][layer], scale=view.scales[layer])
        assert (routing_share(T) < 1e-12).all()
        torch.testing.assert_close(read["attn_scores"][layer], read["attn_scores"][layer].mT, **TOLERANCE)


@pytest.mark.parametrize(("name", "wrong"), [("gpt2", Packing.PER_HEAD), ("gpt_neox", Packing.BLOCKS)])
def test_the_wrong_packing_makes_such_a_model_seem_to_route(name, wrong):
    view = tied(name)
    view.family = replace(view.family, packing=wrong)
    assert (routing_share(kernel_factors(*view.weights.kernel(1))) > 0.1).any()


class Packed(nn.Parameter):
    """A parameter whose numbers are not what its bytes say, as quantised weights are."""


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (
            "integers",
            r"weights of Linear asked for; they are stored as int8 and cannot be read through it .*: load the m",
        ),
        ("meta", r"weight of Linear asked for; it has no numbers: load the model whole"),
    ],
)
def test_weights_that_cannot_be_read_are_refused(how, sentence):
    view = ModelView(tiny("llama"))
    weight = view.part(1, "self_attn.k_proj").weight
    to = {"integers": torch.int8, "meta": "meta"}[how]
    view.part(1, "self_attn.k_proj").weight = nn.Parameter(weight.detach().to(to), requires_grad=False)
    with pytest.raises(Refused, match=sentence):
        view.weights.W_K(1)
    assert view.weights.W_K(0).isfinite().all()


@pytest.mark.parametrize("name", ["llama:biases", "gpt2"])
def test_packed_weights_are_what_the_module_does_with_unit_vectors(name):
    plain, view = (ModelView(tiny(name)) for _ in range(2))
    for path in ("self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj") if "llama" in name else ("attn.c_attn",):
        module = view.part(1, path)
        module.weight = Packed(module.weight.detach())
        module.in_features = module.weight.shape[0 if name == "gpt2" else 1]
    for kind in ("W_Q", "W_K", "W_V"):
        found, expected = (getattr(one.weights, kind)(1) for one in (view, plain))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_reading_weights_leaves_the_model_as_it_was():
    view = view_of("gpt_neox")
    before = [parameter.clone() for parameter in view.model.parameters()]
    plain = outputs(view, tokens_of(view))
    for layer in range(view.n_layers):
        view.weights.W_Q(layer).zero_()
        view.weights.kernel(layer)[1].zero_()
    assert all(torch.equal(a, b) for a, b in zip(before, view.model.parameters(), strict=True))
    assert torch.equal(outputs(view, tokens_of(view)), plain)
