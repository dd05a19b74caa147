"""A replacement has exactly the effect of another way of doing the same: other weights, another text, arithmetic."""

from functools import partial

import pytest
import torch

from rheoscope.models.families import Residual
from rheoscope.models.precision import Float64Throughout
from tests.models.views import caught, outputs, replacing, sites_of, tokens_of, view_of
from tests.tiny import VARIANTS, tiny

LAYER = 1
# Sites that together decide what a later site is: put another text's values there, and the later site is the other's.
DECIDES = [
    (("attn_in",), "q"),
    (("attn_in",), "k"),
    (("attn_in",), "v"),
    (("q", "k"), "attn_scores"),
    (("attn_scores",), "attn_probs"),
    (("attn_probs", "v"), "z"),
    (("q", "k", "v"), "z"),
    (("z",), "attn_out"),
    (("resid_pre", "attn_out"), "resid_mid"),
    (("resid_mid",), "resid_post"),
    (("ffn_in",), "ffn_out"),
    (("resid_pre",), "resid_post"),
    (("resid_pre", "attn_out", "ffn_out"), "resid_post"),
    (("resid_mid", "ffn_out"), "resid_post"),
]
DIFFERENTIATED = ("llama", "gpt2", "opt", "granite", "phi", "gemma2", "gpt_oss", "bert", "opt:post-norm")
TOLERANCE = {"rtol": 0, "atol": 1e-12}


def other_tokens(view):
    return tokens_of(view, seed=5)


def put_in(values, layer):
    """A tap that puts one value in place at one layer."""
    return {LAYER: lambda _x: values[LAYER]}.get(layer, lambda _x: None)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_site_that_holds_another_texts_values_makes_what_follows_that_texts(name):
    view = view_of(name)
    sites = sites_of(view)
    theirs = caught(view, other_tokens(view), *sites)
    mine = caught(view, tokens_of(view), *sites)
    for given, follows in DECIDES:
        if {*given, follows} <= set(sites):
            edits = {site: lambda layer, x, site=site: put_in(theirs[site], layer)(x) for site in given}
            got = caught(view, tokens_of(view), follows, edits=edits)[follows][LAYER]
            torch.testing.assert_close(got, theirs[follows][LAYER], **TOLERANCE, msg=f"{given} -> {follows}")
            assert not torch.allclose(got, mine[follows][LAYER], atol=1e-4)


@pytest.mark.parametrize("site", ["resid_pre", "resid_mid", "resid_post"])
@pytest.mark.parametrize("name", VARIANTS)
def test_another_texts_stream_gives_that_texts_outputs(name, site):
    view = view_of(name)
    if site not in sites_of(view):
        return  # parallel blocks: test_taps says that they refuse it
    theirs = caught(view, other_tokens(view), site)[site]
    got = outputs(view, tokens_of(view), {site: lambda layer, x: put_in(theirs, layer)(x)})
    torch.testing.assert_close(got, outputs(view, other_tokens(view)), rtol=0, atol=1e-11)


def zeroed(name, *paths, bias=True):
    """A copy of a tiny model, with parameters of one layer set to zero."""
    view = view_of(name)
    model = tiny(name)
    blocks = model.base_model.get_submodule(view.family.blocks)
    with torch.no_grad():
        for path in paths:
            for key, parameter in blocks[LAYER].get_submodule(path).named_parameters():
                if bias or not key.endswith("bias"):
                    parameter.zero_()
    return model


def logits(model, tokens):
    with torch.no_grad(), Float64Throughout():
        return model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits


@pytest.mark.parametrize("name", VARIANTS)
def test_no_attention_output_is_an_output_projection_of_zeros(name):
    view = view_of(name)
    tokens = tokens_of(view)
    got = outputs(view, tokens, {"attn_out": replacing(torch.zeros_like)}, layers=[LAYER])
    torch.testing.assert_close(got, logits(zeroed(name, view.family.o), tokens), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", VARIANTS)
def test_no_z_is_an_output_projection_of_zeros_with_its_bias(name):
    view = view_of(name)
    tokens = tokens_of(view)
    got = outputs(view, tokens, {"z": replacing(torch.zeros_like)}, layers=[LAYER])
    torch.testing.assert_close(got, logits(zeroed(name, view.family.o, bias=False), tokens), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", VARIANTS)
def test_no_feed_forward_output_is_a_feed_forward_network_of_zeros(name):
    view = view_of(name)
    tokens = tokens_of(view)
    got = outputs(view, tokens, {"ffn_out": replacing(torch.zeros_like)}, layers=[LAYER])
    torch.testing.assert_close(got, logits(zeroed(name, view.family.ffn[-1]), tokens), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", VARIANTS)
def test_no_attention_output_is_what_is_left_when_it_is_subtracted(name):
    view = view_of(name)
    tokens = tokens_of(view)
    read = caught(view, tokens, "resid_pre", "attn_out")
    zero = caught(view, tokens, "resid_post", edits={"attn_out": partial(zero_at, LAYER)})["resid_post"][LAYER]
    x = read["resid_pre"][LAYER]
    if view.family.residual is Residual.PARALLEL:
        expected = caught(view, tokens, "resid_post")["resid_post"][LAYER] - read["attn_out"][LAYER]
    else:
        with torch.no_grad(), Float64Throughout():
            x = view.part(LAYER, view.family.norm_attn)(x) if view.family.residual is Residual.POST_NORM else x
        edits = {"resid_mid": lambda layer, _x: x if layer == LAYER else None}
        expected = caught(view, tokens, "resid_post", edits=edits)["resid_post"][LAYER]
    torch.testing.assert_close(zero, expected, **TOLERANCE)


def zero_at(chosen, layer, x):
    return torch.zeros_like(x) if layer == chosen else None


@pytest.mark.parametrize("name", VARIANTS)
def test_queries_of_zero_attend_alike_to_every_key_they_may_see(name):
    view = view_of(name)
    tokens = tokens_of(view)
    read = caught(view, tokens, "attn_probs", "attention", edits={"q": replacing(torch.zeros_like)})
    for probs, attention in zip(read["attn_probs"], read["attention"], strict=True):
        allowed = torch.ones_like(probs) if attention.allowed is None else attention.allowed.expand_as(probs).double()
        sink = 0 if attention.sinks is None else attention.sinks.double().exp().reshape(1, -1, 1, 1)
        torch.testing.assert_close(probs, allowed / (allowed.sum(-1, keepdim=True) + sink), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", VARIANTS)
def test_each_part_of_attention_enters_what_follows_by_its_formula(name):
    view = view_of(name)
    tokens = tokens_of(view)
    mine = caught(view, tokens, "q", "k", "v", "attn_scores", "attn_probs", "z")
    n_rep = view.n_heads // view.n_kv_heads

    def effect(site, edit, follows):
        return caught(view, tokens, follows, edits={site: lambda layer, x: edit(x) if layer == 0 else None})[follows][0]

    q, k, v, scores, probs, z = (mine[site][0] for site in mine)
    torch.testing.assert_close(effect("q", lambda q: 2 * q, "attn_scores"), 2 * scores, **TOLERANCE)
    torch.testing.assert_close(effect("k", lambda k: -k, "attn_scores"), -scores, **TOLERANCE)
    torch.testing.assert_close(effect("v", lambda v: v + 1, "z"), z + probs.sum(-1, keepdim=True), **TOLERANCE)
    torch.testing.assert_close(effect("attn_probs", lambda p: p / 2, "z"), z / 2, **TOLERANCE)
    diagonal = torch.eye(tokens.shape[1], dtype=torch.float64).expand_as(probs)
    torch.testing.assert_close(
        effect("attn_probs", lambda p: diagonal, "z"), v.repeat_interleave(n_rep, 1), **TOLERANCE
    )
    torch.testing.assert_close(view.scales[0] * q @ k.repeat_interleave(n_rep, 1).mT, scores, **TOLERANCE)
    if view.family.residual is not Residual.POST_NORM and mine and VARIANTS[name].family not in ("gemma2", "gpt_oss"):
        shifted = effect("attn_scores", lambda s: s + 3, "attn_probs")
        torch.testing.assert_close(shifted, probs, **TOLERANCE)  # a constant does nothing to a softmax


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama:mqa", "llama:mha", "phi3", "gemma2", "bert"])
def test_a_head_without_z_is_a_head_without_rows_in_the_output_projection(name):
    view = view_of(name)
    tokens, head = tokens_of(view), 4
    model = zeroed(name)
    weight = model.base_model.get_submodule(view.family.blocks)[LAYER].get_submodule(view.family.o).weight
    with torch.no_grad():
        inputs = weight if view.family.transposed else weight.T
        inputs[head * view.d_value : (head + 1) * view.d_value] = 0
    keep = torch.ones(view.n_heads, 1, 1, dtype=torch.float64)
    keep[head] = 0
    got = outputs(view, tokens, {"z": lambda layer, z: z * keep}, layers=[LAYER])
    torch.testing.assert_close(got, logits(model, tokens), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_flow_through_every_replacement(name):
    view = view_of(name)
    tokens = tokens_of(view, batch=1, length=9)
    for site in sites_of(view):
        gain = torch.ones((), dtype=torch.float64, requires_grad=True)
        step = 1e-5
        with Float64Throughout():
            with view.tapped({site: lambda layer, x, gain=gain: gain * x}, layers=[LAYER]):
                total = view.forward(tokens).square().sum()
            (slope,) = torch.autograd.grad(total, gain)
        up, down = (
            outputs(view, tokens, {site: lambda layer, x, g=g: g * x}, layers=[LAYER]).square().sum()
            for g in (1 + step, 1 - step)
        )
        # central difference: its error is the third derivative times step^2, here far below 1e-5 of the slope
        torch.testing.assert_close(slope, (up - down) / (2 * step), rtol=1e-5, atol=1e-6, msg=site)


def test_gradients_are_finite_where_a_query_may_see_nothing():
    view = view_of("llama")
    tokens = tokens_of(view, batch=1)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[:, :4] = False
    gain = torch.ones((), dtype=torch.float64, requires_grad=True)
    with Float64Throughout(), view.tapped({"q": lambda layer, q: gain * q, "attn_probs": lambda layer, p: None}):
        total = view.forward(tokens, valid)[:, 4:].square().sum()
    assert torch.autograd.grad(total, gain)[0].isfinite()
