"""Every site of every family can be read and replaced, where and in the order that is asked for, or says why not."""

from dataclasses import replace

import pytest
import torch

from rheoscope.errors import Refused, RheoscopeError
from rheoscope.models import view as view_module
from rheoscope.models.families import FAMILIES, Residual
from rheoscope.models.precision import Float64Throughout
from rheoscope.models.taps import RESIDUAL_SITES
from rheoscope.models.view import ModelView
from tests.models.views import (
    PARTS,
    caught,
    has_experts,
    is_attention,
    outputs,
    replacing,
    sites_of,
    tokens_of,
    view_of,
)
from tests.tiny import CAUSAL, VARIANTS, tiny

PARALLEL = ("gpt_neox", "gptj", "phi", "phi:qk-norm", "cohere", "cohere:qk-norm", "cohere2", "stablelm:parallel")
CHANGED = 7  # the position of the token that is changed


def close(a, b, tolerance=1e-12):
    return float((a - b).detach().abs().max()) <= tolerance


@pytest.mark.parametrize("name", VARIANTS)
def test_every_site_is_seen_once_per_layer_in_order_and_in_its_shape(name):
    view = view_of(name)
    tokens = tokens_of(view)
    seen = []
    sites = [*sites_of(view), "call", "attn_mean", "attention"]
    outputs(view, tokens, {site: lambda layer, x, site=site: seen.append((layer, site, x)) for site in sites})
    batch, length = tokens.shape
    stream = (batch, length, view.d_model)
    heads, keys = (batch, view.n_heads, length), (batch, view.n_kv_heads, length)
    shapes = dict.fromkeys(RESIDUAL_SITES, stream) | {
        "q": (*heads, view.d_head),
        "k": (*keys, view.d_head),
        "v": (*keys, view.d_value),
        "z": (*heads, view.d_value),
        "attn_scores": (*heads, length),
        "attn_probs": (*heads, length),
        "attn_mean": (batch, length, length),
    }
    assert {site for _, site, _ in seen} == set(sites)
    assert [layer for layer, *_ in seen] == sorted(layer for layer, *_ in seen)
    for site in sites:
        assert [layer for layer, other, _ in seen if other == site] == [0, 1, 2]
    for _, site, x in seen:
        assert site in ("call", "attention") or x.shape == shapes[site], site


@pytest.mark.parametrize("name", VARIANTS)
def test_the_stream_adds_up(name):
    view = view_of(name)
    read = caught(view, tokens_of(view), "resid_pre", "attn_out", "ffn_out", "resid_post")
    after = read["resid_pre"][1:]
    for layer in range(view.n_layers):
        pre, attn, ffn, post = (read[site][layer] for site in read)
        if view.family.residual is not Residual.POST_NORM:
            assert close(pre + attn + ffn, post)
        if layer < len(after):
            assert torch.equal(post, after[layer])


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in PARALLEL])
def test_resid_mid_stands_between_attention_and_feed_forward(name):
    view = view_of(name)
    read = caught(view, tokens_of(view), "resid_pre", "attn_out", "resid_mid", "ffn_out", "resid_post")
    for layer in range(view.n_layers):
        pre, attn, mid, ffn, post = (read[site][layer] for site in read)
        first = second = torch.nn.Identity()
        if view.family.residual is Residual.POST_NORM:
            first, second = (view.part(layer, path) for path in (view.family.norm_attn, view.family.norm_ffn))
        with Float64Throughout():
            assert close(first(pre + attn), mid)
            assert close(second(mid + ffn), post)


@pytest.mark.parametrize("name", VARIANTS)
def test_putting_the_same_value_back_changes_nothing(name):
    view = view_of(name)
    tokens = tokens_of(view)
    plain = outputs(view, tokens)
    for site in sites_of(view):
        seen = outputs(view, tokens, {site: lambda layer, x: None})
        same = outputs(view, tokens, {site: lambda layer, x: x})
        # scores that are put back were multiplied out, where the map otherwise takes a fused product and scale
        exact = site != "attn_scores" and (site not in ("attn_out", "ffn_out") or view.multiplier == 1)
        assert torch.equal(same, seen) if exact else close(same, seen), site
        assert close(seen, plain) if is_attention(site) else torch.equal(seen, plain), site


@pytest.mark.parametrize("name", VARIANTS)
def test_putting_another_value_in_changes_the_outputs(name):
    view = view_of(name)
    tokens = tokens_of(view)
    plain = outputs(view, tokens)
    for site in sites_of(view):
        other = outputs(view, tokens, {site: lambda layer, x: 0.6 * x + 0.4 * x.flip(-1)}, layers=[1])
        assert not close(other, plain, 1e-4), site


@pytest.mark.parametrize("name", CAUSAL)
def test_under_every_replacement_a_changed_token_leaves_the_past_as_it_was(name):
    view = view_of(name)
    before = tokens_of(view)
    after = before.clone()
    after[:, CHANGED] = 3 + (before[:, CHANGED] - 2) % (view.config.vocab_size - 3)
    for site in sites_of(view):
        one, two = (outputs(view, tokens, {site: lambda layer, x: 0.7 * x}) for tokens in (before, after))
        past = (one[:, :CHANGED], two[:, :CHANGED])
        assert close(*past, 1e-11) if has_experts(name) else torch.equal(*past), site
        assert not close(one[:, CHANGED:], two[:, CHANGED:], 1e-4), site


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "phi", "bert"])
def test_layers_asked_for_are_the_only_ones_tapped(name):
    view = view_of(name)
    for site in [*sites_of(view), "attention"]:
        seen = []
        outputs(view, tokens_of(view), {site: lambda layer, x, seen=seen: seen.append(layer)}, layers={2, 0})
        assert seen == [0, 2], site
        outputs(view, tokens_of(view), {site: lambda layer, x, seen=seen: seen.append(layer)}, layers=[])
        assert seen == [0, 2], site


@pytest.mark.parametrize("site", PARTS)
def test_an_outer_tap_acts_before_an_inner_one(site):
    view = view_of("llama")
    tokens = tokens_of(view)
    was = caught(view, tokens, site)[site][1]
    seen = []
    outer, inner = {site: lambda layer, x: 2 * x}, {site: lambda layer, x: x + 1}
    with view.tapped(outer, layers=[1]), view.tapped(inner, layers=[1]):
        outputs(view, tokens, {site: lambda layer, x: seen.append(x.clone())}, layers=[1])
    torch.testing.assert_close(seen[0], 2 * was + 1, rtol=0, atol=1e-12)


def test_an_inner_measurement_sees_the_edited_model():
    view = view_of("llama")
    tokens = tokens_of(view)
    plain, edited = (caught(view, tokens, "resid_post", edits=e) for e in (None, {"q": replacing(torch.zeros_like)}))
    assert not close(plain["resid_post"][2], edited["resid_post"][2], 1e-3)
    with view.tapped({"q": replacing(torch.zeros_like)}):
        assert torch.equal(outputs(view, tokens), outputs(view, tokens, {"resid_pre": lambda layer, x: None}))


@pytest.mark.parametrize("site", PARTS)
def test_what_an_outer_measurement_keeps_is_not_changed_by_an_edit_inside_it(site):
    view = view_of("llama")
    kept = []
    with view.tapped({site: lambda layer, x: kept.append(x)}, layers=[1]):
        outputs(view, tokens_of(view), {site: replacing(torch.zeros_like)}, layers=[1])
    assert not close(kept[0], torch.zeros_like(kept[0]), 1e-3)


def test_a_replacement_takes_the_dtype_of_what_it_replaces():
    view = ModelView(tiny("llama", dtype=torch.float32))
    for site in sites_of(view):
        with view.tapped({site: lambda layer, x: x.double()}), torch.no_grad():
            assert view.forward(tokens_of(view)).dtype == torch.float32


@pytest.mark.parametrize("site", PARTS)
@pytest.mark.parametrize("wrong", [lambda x: x[:1], lambda x: x[..., 1:], lambda x: float(x.mean())])
def test_a_replacement_of_another_shape_is_refused(site, wrong):
    view = view_of("llama")
    with pytest.raises(RheoscopeError, match=rf"the tap at {site} returned a .*: return that shape, or None"):
        outputs(view, tokens_of(view, length=11), {site: replacing(wrong)})


@pytest.mark.parametrize("name", PARALLEL)
def test_a_family_with_parallel_blocks_has_no_resid_mid_and_says_what_to_use(name):
    view = view_of(name)
    with pytest.raises(Refused, match=f"{view.model_type} runs attention and FFN in parallel: .*; use resid_pre"):
        outputs(view, tokens_of(view), {"resid_mid": lambda layer, x: None})


def test_a_site_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(RheoscopeError, match=r"no site is called 'resid_middle'; the sites are resid_pre, .*attention"):
        outputs(view_of("llama"), tokens_of(view_of("llama")), {"resid_middle": lambda layer, x: None})


@pytest.mark.parametrize("layers", [[3], [-1], [0, 17]])
def test_a_layer_that_does_not_exist_is_refused(layers):
    view = view_of("llama")
    with pytest.raises(RheoscopeError, match="asked for; the model has layers 0 to 2"):
        outputs(view, tokens_of(view), {"q": lambda layer, x: None}, layers=layers)


@pytest.fixture
def unknown(monkeypatch):
    """A llama of which no row says where it keeps its parts."""
    monkeypatch.setattr(view_module, "FAMILIES", {name: row for name, row in FAMILIES.items() if name != "llama"})
    model = tiny("llama")
    with Float64Throughout():
        return ModelView(model)


def test_a_model_type_without_a_row_has_its_layers_and_the_sites_that_need_no_row(unknown):
    known = view_of("llama")
    assert unknown.family is None
    for fact in ("n_layers", "n_heads", "n_kv_heads", "d_head", "d_value", "d_model", "windows", "scales", "causal"):
        assert getattr(unknown, fact) == getattr(known, fact), fact
    sites = sites_of(unknown)
    assert sites == ["resid_pre", "resid_post", "q", "k", "v", "attn_scores", "attn_probs", "z"]
    one, two = caught(unknown, tokens_of(known), *sites), caught(known, tokens_of(known), *sites)
    for site in sites:
        assert all(torch.equal(a, b) for a, b in zip(one[site], two[site], strict=True)), site


@pytest.mark.parametrize("site", ["attn_in", "attn_out", "resid_mid", "ffn_in", "ffn_out"])
def test_a_model_type_without_a_row_refuses_the_sites_that_need_one(unknown, site):
    with pytest.raises(Refused, match=f"{site} asked for; the model type 'llama' has no row .*or add a row"):
        outputs(unknown, tokens_of(unknown), {site: lambda layer, x: None})


def test_a_model_whose_blocks_hand_on_no_single_stream_has_attention_sites_only(monkeypatch):
    view = replace_stream(monkeypatch)
    assert sites_of(view) == ["q", "k", "v", "attn_scores", "attn_probs", "z"]
    with pytest.raises(Refused, match=r"resid_pre asked for; the layers of llama do not hand one stream .*: use the"):
        outputs(view, tokens_of(view), {"resid_pre": lambda layer, x: None})


def replace_stream(monkeypatch):
    """A llama whose layers scale the stream between each other, as a model with several streams would mix it."""
    model = tiny("llama")
    model.model.layers[1].register_forward_pre_hook(lambda module, args: (0.5 * args[0], *args[1:]), prepend=True)
    with Float64Throughout():
        return ModelView(model)


def test_rows_are_data_and_cannot_be_changed_by_accident():
    with pytest.raises(AttributeError):
        FAMILIES["llama"].o = "elsewhere"
    assert replace(FAMILIES["llama"], o="elsewhere") != FAMILIES["llama"]
