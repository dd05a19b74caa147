"""What is read of attention is what the model computes: maps, masks, sinks, padding, against the literal formula."""

import pytest
import torch

from rheoscope.errors import RheoscopeError
from rheoscope.models.precision import Float64Throughout
from rheoscope.models.view import ModelView
from tests.models.views import caught, outputs, own_maps, tokens_of, view_of
from tests.tiny import VARIANTS, WINDOW, tiny

LEFT, RIGHT = 5, 3
READING = ("q", "k", "v", "attn_scores", "attn_probs", "z", "resid_post")
LITERAL = ("llama:mqa", "llama", "llama:mha", "gemma2", "gpt_oss", "mistral", "modernbert", "opt")
SDPA = [name for name, variant in VARIANTS.items() if variant.sdpa]
SIDES = [(name, side) for name in VARIANTS for side in ("left", "right")]


def literal_map(attention, row, head):
    """Eq. by eq. for one head: scale, soft-cap, mask, softmax with one more entry for a sink."""
    q, k = attention.q[row, head], attention.k[row, head // (attention.q.shape[1] // attention.k.shape[1])]
    probs = torch.zeros(len(q), len(k), dtype=q.dtype)
    for i in range(len(q)):
        for j in range(len(k)):
            score = attention.scale * (q[i] * k[j]).sum()
            score = score if attention.softcap is None else attention.softcap * torch.tanh(score / attention.softcap)
            allowed = j <= i or not attention.causal
            if attention.mask is not None:
                allowed = bool(attention.mask[row % len(attention.mask), 0, i, j])
            probs[i, j] = score.exp() if allowed else 0
        sink = 0 if attention.sinks is None else attention.sinks[head].double().exp()
        probs[i] /= probs[i].sum() + sink
    return probs


def padded(view, tokens, side):
    """The tokens padded on one side and another text in full; which tokens are no padding; the places of the first."""
    n_pad = LEFT if side == "left" else RIGHT
    pad = torch.full_like(tokens[:, :n_pad], view.pad_token)
    row = torch.cat([pad, tokens] if side == "left" else [tokens, pad], 1)
    other = tokens_of(view, batch=1, length=row.shape[1], seed=7)
    valid = torch.ones(2, row.shape[1], dtype=torch.bool)
    valid[0, slice(0, n_pad) if side == "left" else slice(-n_pad, None)] = False
    return torch.cat([row, other]), valid, slice(n_pad, None) if side == "left" else slice(0, tokens.shape[1])


@pytest.mark.parametrize("name", VARIANTS)
def test_maps_are_those_that_the_eager_model_reports(name):
    view = view_of(name)
    tokens = tokens_of(view)
    read = caught(view, tokens, "attn_probs")["attn_probs"]
    for probs, own in zip(read, own_maps(view, tokens), strict=True):
        torch.testing.assert_close(probs, own, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", LITERAL)
def test_maps_follow_the_literal_formula(name):
    view = view_of(name)
    read = caught(view, tokens_of(view), "attn_probs", "attention")
    for probs, attention in zip(read["attn_probs"], read["attention"], strict=True):
        for head in range(view.n_heads):
            torch.testing.assert_close(probs[1, head], literal_map(attention, 1, head), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_z_is_the_same_fused_and_by_way_of_the_map(name):
    view = view_of(name)
    fused = caught(view, tokens_of(view), "z")["z"]
    by_map = caught(view, tokens_of(view), "attn_probs", "z")["z"]
    for one, other in zip(fused, by_map, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("side", ["", "left", "right"])
def test_the_mean_map_is_that_of_the_maps_and_z_and_normalisers_come_out_the_same(name, side):
    view = view_of(name)
    tokens = tokens_of(view)
    tokens, valid, _ = padded(view, tokens[:1], side) if side else (tokens, None, None)
    fused = caught(view, tokens, "z", "attention", valid=valid)
    by_mean = caught(view, tokens, "attn_mean", "z", "attention", valid=valid)
    maps = caught(view, tokens, "attn_probs", valid=valid)["attn_probs"]
    for layer, mean in enumerate(by_mean["attn_mean"]):
        torch.testing.assert_close(mean, maps[layer].mean(1), rtol=0, atol=1e-12)
        torch.testing.assert_close(by_mean["z"][layer], fused["z"][layer], rtol=0, atol=1e-12)
        one, other = (found["attention"][layer].normaliser for found in (by_mean, fused))
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_the_mean_map_is_taken_of_maps_that_were_replaced_and_replaces_nothing():
    view = view_of("llama")
    tokens = tokens_of(view)
    with view.tapped({"attn_probs": lambda layer, probs: torch.eye(probs.shape[-1]).expand_as(probs).clone()}):
        mean = caught(view, tokens, "attn_mean")["attn_mean"][0]
    torch.testing.assert_close(mean, torch.eye(mean.shape[-1]).expand_as(mean).to(mean), rtol=0, atol=0)
    with pytest.raises(RheoscopeError, match="attn_mean returned a replacement; it is read only"):
        outputs(view, tokens, {"attn_mean": lambda layer, mean: mean * 2})


@pytest.mark.parametrize("name", SDPA)
def test_an_sdpa_model_and_an_eager_model_are_read_alike(name):
    eager, sdpa = view_of(name), tiny(name)
    sdpa.set_attn_implementation("sdpa")
    with Float64Throughout():
        other = ModelView(sdpa)
    one, two = (caught(v, tokens_of(eager), *READING) for v in (eager, other))
    for site, layers in one.items():
        for a, b in zip(layers, two[site], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=site)
    assert sdpa.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", VARIANTS)
def test_a_sliding_window_holds_exactly_the_keys_it_says(name):
    view = view_of(name)
    length = 2 * WINDOW + 5
    lag = torch.arange(length)[:, None] - torch.arange(length)
    causal = VARIANTS[name].causal
    read = caught(view, tokens_of(view, length=length), "attn_probs")["attn_probs"]
    for window, probs in zip(view.windows, read, strict=True):
        expected = lag >= 0 if causal else torch.ones_like(lag, dtype=torch.bool)
        if window is not None:
            expected = expected & (lag < window if causal else lag.abs() < window)
            assert not expected[-1, : length - window].any()  # the window is shorter than the text
        assert ((probs > 0) == expected).all()


def test_the_windows_of_each_layer_are_those_of_the_configuration():
    assert view_of("mistral").windows == [WINDOW] * 3
    assert view_of("mistral:full").windows == [None] * 3
    assert view_of("gemma2").windows == [WINDOW, None, WINDOW]
    assert view_of("modernbert").windows == [4, None, 4]  # three keys to either side


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_of_a_map_sum_to_one_or_with_learned_sinks_to_less(name):
    for probs in caught(view_of(name), tokens_of(view_of(name)), "attn_probs")["attn_probs"]:
        if VARIANTS[name].family == "gpt_oss":
            assert (probs.sum(-1) < 1 - 1e-6).all()
        else:
            torch.testing.assert_close(probs.sum(-1), torch.ones_like(probs[..., 0]), rtol=0, atol=1e-14)


@pytest.mark.parametrize(("name", "side"), SIDES)
def test_a_text_is_read_the_same_alone_and_padded_in_a_batch(name, side):
    view = view_of(name)
    alone = tokens_of(view, batch=1)
    tokens, valid, place = padded(view, alone, side)
    sites = ("q", "k", "v", "z", "resid_post")
    one, batch = caught(view, alone, *sites, "attn_probs"), caught(view, tokens, *sites, "attn_probs", valid=valid)
    for layer in range(view.n_layers):
        for site in sites:
            torch.testing.assert_close(batch[site][layer][:1, ..., place, :], one[site][layer], rtol=0, atol=1e-12)
        probs = batch["attn_probs"][layer]
        torch.testing.assert_close(probs[:1, :, place, place], one["attn_probs"][layer], rtol=0, atol=1e-12)
        assert (probs[0].transpose(0, -1)[~valid[0]] == 0).all()  # nobody attends to padding
        assert probs.isfinite().all()
    torch.testing.assert_close(outputs(view, tokens, None, valid)[:1, place], outputs(view, alone), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", VARIANTS)
def test_padding_on_the_left_leaves_no_trace_where_no_map_is_asked_for(name):
    view = view_of(name)
    alone = tokens_of(view, batch=1)
    tokens, valid, place = padded(view, alone, "left")
    fused, by_map = (caught(view, tokens, *sites, valid=valid)["z"] for sites in (("z",), ("attn_probs", "z")))
    for one, other in zip(fused, by_map, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)
    read = outputs(view, tokens, {"q": lambda layer, q: None}, valid)
    torch.testing.assert_close(read[:1, place], outputs(view, alone), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["llama", "llama:mha", "bert"])
@pytest.mark.parametrize("site", ["q", "k", "v", "attn_scores", "attn_probs", "z"])
def test_a_replacement_may_lie_in_memory_in_any_way(name, site):
    view = view_of(name)
    tokens = tokens_of(view)
    straight = outputs(view, tokens, {site: lambda layer, x: x.clone()})
    for odd in (lambda x: x.mT.contiguous().mT, lambda x: torch.stack([x, x], -1)[..., 0], lambda x: x.flip(0).flip(0)):
        got = outputs(view, tokens, {site: lambda layer, x, odd=odd: odd(x)})
        torch.testing.assert_close(got, straight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_row_normalisers_of_the_fused_kernel_are_those_of_the_masked_scores(name):
    view = view_of(name)
    for attention in caught(view, tokens_of(view), "z", "attention")["attention"]:
        if attention.softcap or attention.sinks is not None:
            assert attention.normaliser is None  # these go by the map
            continue
        scores = attention.scores
        if attention.allowed is not None:
            scores = scores.masked_fill(~attention.allowed, -torch.inf)
        torch.testing.assert_close(attention.normaliser, scores.logsumexp(-1), rtol=0, atol=1e-12)
        attention.scores = attention.scores
        assert attention.normaliser is None  # scores that were replaced have others


def test_a_query_that_may_see_nothing_has_a_row_of_zeros_and_z_of_zero():
    view = view_of("llama")
    tokens, valid, _ = padded(view, tokens_of(view, batch=1), "left")
    read = caught(view, tokens, "attn_probs", "z", valid=valid)
    for probs, z in zip(read["attn_probs"], read["z"], strict=True):
        assert (probs[0, :, :LEFT] == 0).all()
        assert (z[0, :, :LEFT] == 0).all()


def test_what_reads_both_ways_is_measured_and_not_taken_from_a_flag():
    model = tiny("llama", is_causal=False)
    assert all(layer.self_attn.is_causal for layer in model.model.layers)  # the flag says otherwise
    with Float64Throughout():
        assert not ModelView(model).causal
