"""Edits of attention patterns do what their names say on all families, and are undone bit for bit."""

import numpy as np
import pytest
import torch

from rheoscope.corpus import batches
from rheoscope.errors import RheoscopeError
from rheoscope.instruments.engine import run_pass
from rheoscope.instruments.sinks.sinks import SinkReadings
from rheoscope.models.view import ModelView
from rheoscope.surgery.edits import edited
from rheoscope.surgery.edits_sinks import (
    ConstantHeads,
    DiagonalHeads,
    DropHeads,
    IdentityHeads,
    SinkOneHot,
    UniformMixing,
)
from rheoscope.surgery.sink_effects import constant_heads, effect, head_means, measured, replaceable_heads
from tests.instruments.texts import random_corpus
from tests.tiny import CAUSAL, LENGTH, VARIANTS, Float64Throughout, input_ids, tiny

HEADS = ((0, 1), (1, 0), (1, 4), (2, 5))
EXPERTS = {"mixtral", "qwen3_moe", "gpt_oss"}  # tokens are sorted by expert, so sums of the others may round anew


def view_of(name):
    return ModelView(tiny(name))


@torch.no_grad()
def sites_of(view, *sites, edits=(), tokens=None, valid=None):
    """Copies of some sites in every layer, and the output, under edits."""
    kept = {site: {} for site in sites}
    tokens = input_ids(view.model) if tokens is None else tokens
    taps = {site: lambda layer, value, site=site: kept[site].__setitem__(layer, value.clone()) for site in sites}
    with Float64Throughout(), edited(view, *edits), view.tapped(taps):
        return kept, view.forward(tokens, valid)


def constants(view, heads=HEADS):
    rng = np.random.default_rng(0)
    return ConstantHeads(heads=heads, constants=tuple(map(tuple, rng.standard_normal((len(heads), view.d_value)))))


def edits_of(view):
    return {
        "one-hot": SinkOneHot(heads=HEADS),
        "one-hot, later": SinkOneHot(heads=HEADS, position=4),
        "identity": IdentityHeads(heads=HEADS),
        "mlp": DiagonalHeads(heads=HEADS),
        "drop": DropHeads(heads=HEADS),
        "constant": constants(view),
        "uniform": UniformMixing(layers=(1,), a=0.6),
    }


@pytest.mark.parametrize("name", VARIANTS)
def test_every_edit_changes_the_output_and_leaving_it_gives_the_model_back(name):
    view = view_of(name)
    _, before = sites_of(view)
    for edit in edits_of(view).values():
        _, changed = sites_of(view, edits=[edit])
        assert not torch.allclose(changed, before, rtol=1e-6), edit
        _, after = sites_of(view)
        assert torch.equal(after, before), edit


@pytest.mark.parametrize("name", CAUSAL)
def test_no_edit_lets_a_token_see_what_comes_after_it(name):
    view = view_of(name)
    tokens = input_ids(view.model)
    other = tokens.clone()
    other[:, 8] = (other[:, 8] - 3 + 7) % (view.model.config.vocab_size - 3) + 3
    for edit in edits_of(view).values():
        (_, one), (_, two) = (sites_of(view, edits=[edit], tokens=ids) for ids in (tokens, other))
        if name.partition(":")[0] in EXPERTS:
            torch.testing.assert_close(one[:, :8], two[:, :8], rtol=1e-12, atol=1e-12)
        else:
            assert torch.equal(one[:, :8], two[:, :8]), edit
        assert not torch.equal(one[:, 8:], two[:, 8:])


@pytest.mark.parametrize("name", VARIANTS)
def test_the_map_of_each_token_from_the_weights_equals_attention_to_itself(name):
    view = view_of(name)
    _, one = sites_of(view, edits=[IdentityHeads(heads=HEADS)])
    _, two = sites_of(view, edits=[DiagonalHeads(heads=HEADS)])
    torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["llama", "mistral", "modernbert", "gpt_oss", "gpt2"])
def test_maps_become_the_sink_the_identity_or_a_mixture(name):
    view = view_of(name)
    natural, _ = sites_of(view, "attn_probs")
    seen = (natural["attn_probs"][0] > 0).any(1)
    eye = torch.eye(LENGTH, dtype=torch.float64)
    probs = sites_of(view, "attn_probs", edits=[SinkOneHot(heads=((0, 1),), position=2)])[0]["attn_probs"][0]
    expected = torch.where(seen[:, :, 2, None], eye[2], natural["attn_probs"][0][:, 1])
    assert torch.equal(probs[:, 1], expected)
    others = [0, 2, 3, 4, 5]
    assert torch.equal(probs[:, others], natural["attn_probs"][0][:, others])
    probs = sites_of(view, "attn_probs", edits=[IdentityHeads(heads=((0, 3),))])[0]["attn_probs"][0]
    assert torch.equal(probs[:, 3], eye.expand_as(probs[:, 3]))
    probs = sites_of(view, "attn_probs", edits=[UniformMixing(layers=(0,), a=0.25)])[0]["attn_probs"][0]
    even = seen / seen.sum(-1, keepdim=True)
    torch.testing.assert_close(probs, (0.75 * eye + 0.25 * even)[:, None].expand_as(probs).to(probs))


def test_even_mixing_gives_nothing_to_padding():
    view = view_of("bert")
    valid = torch.arange(LENGTH) < torch.tensor([[9], [LENGTH]])
    probs = sites_of(view, "attn_probs", edits=[UniformMixing(a=1.0)], valid=valid)[0]["attn_probs"][1]
    torch.testing.assert_close(probs[0, 0, 0], (torch.arange(LENGTH) < 9).double() / 9)


@pytest.mark.parametrize("name", ["llama", "olmo2", "gpt2"])
def test_dropped_heads_write_nothing_and_constant_ones_the_same_everywhere(name):
    view = view_of(name)
    natural = sites_of(view, "z")[0]["z"][0]
    z = sites_of(view, "z", edits=[DropHeads(heads=HEADS)])[0]["z"]
    assert not z[0][:, 1].any()
    assert not z[1][:, [0, 4]].any()
    assert torch.equal(z[0][:, [0, 2, 3, 4, 5]], natural[:, [0, 2, 3, 4, 5]])
    edit = constants(view)
    z = sites_of(view, "z", edits=[edit])[0]["z"]
    for (layer, head), constant in zip(edit.heads, edit.constants, strict=True):
        expected = torch.tensor(constant, dtype=torch.float64).expand_as(z[layer][:, head])
        torch.testing.assert_close(z[layer][:, head], expected)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (DropHeads(), "without heads"),
        (IdentityHeads(heads=((3, 0),)), r"head \(3, 0\) asked for; the model has layers 0 to 2"),
        (SinkOneHot(heads=((0, 6),)), r"head \(0, 6\)"),
        (SinkOneHot(heads=((0, 1),), position=99), "position 99"),
        (ConstantHeads(heads=((0, 1),), constants=((1.0,),)), "give one of 10 numbers for each head"),
        (ConstantHeads(heads=((0, 1),)), "with 0 constants"),
        (UniformMixing(a=1.5), "give a number from 0 to 1"),
    ],
)
def test_what_cannot_be_edited_is_refused(edit, message):
    view = view_of("llama")
    with pytest.raises(RheoscopeError, match=message):
        sites_of(view, edits=[edit])


def test_the_layers_of_an_edit_follow_from_its_heads():
    assert DropHeads(heads=HEADS).layers == (0, 1, 2)
    assert SinkOneHot(heads=((2, 1),), layers=(0,)).layers == (2,)


def test_cosines_measured_in_the_shared_pass_are_those_after_the_edit():
    view, corpus = view_of("llama"), random_corpus().of_windows(np.array([0]))
    reader = SinkReadings(view, corpus, SinkReadings.Options(n_sampled=1, n_geometry=0))
    tokens = torch.tensor(corpus.tokens, dtype=torch.int64)

    with Float64Throughout():
        run_pass(view, batches(corpus, 1), [reader])
    data = reader.finalize()
    for layer in range(3):
        for place, a in enumerate(data.mixing.values):
            edit = UniformMixing(layers=(layer,), a=float(a))
            after = sites_of(view, "resid_mid", edits=[edit], tokens=tokens)[0]["resid_mid"][layer][0, 1:]
            unit = after / after.norm(dim=-1, keepdim=True)
            n = len(unit)
            exact = ((unit @ unit.T).sum() - n) / (n * (n - 1))
            assert float(data.cosine_measured[layer, place]) == pytest.approx(float(exact), abs=1e-10)


def test_effects_are_paired_and_an_edit_that_changes_nothing_costs_nothing():
    view, corpus = view_of("llama"), random_corpus()
    with Float64Throughout():
        before = measured(view, corpus)
        some = effect(view, corpus, [UniformMixing(layers=(0,), a=1.0)], before=before)
        same = effect(view, corpus, [], before=before)
        means = head_means(view, corpus)
    assert float(same.loss.value) == float(same.cosine.value) == 0
    assert float(some.loss.value) != 0
    assert float(some.cosine.se) > 0
    kept = sites_of(view, "z", tokens=torch.tensor(corpus.tokens[:2], dtype=torch.int64))[0]["z"]
    assert means.shape == (3, 6, view.d_value)
    few = corpus.of_windows(np.arange(2))
    with Float64Throughout():
        np.testing.assert_allclose(head_means(view, few)[1], kept[1].mean((0, 2)).numpy(), rtol=1e-9)
    assert constant_heads(HEADS, means).constants[0] == tuple(means[0, 1].tolist())


def test_a_head_that_is_constant_is_listed_as_one_and_others_as_what_they_are():
    view, corpus = view_of("llama"), random_corpus()
    with Float64Throughout():
        means = head_means(view, corpus)
        with edited(view, constant_heads(((1, 2),), means), IdentityHeads(heads=((0, 3),))):
            within = head_means(view, corpus)
            found = {
                (one.layer, one.head): one
                for one in replaceable_heads(view, corpus, [(1, 2), (0, 3), (2, 0)], means=within)
            }
    assert found[1, 2].verdict(1e-9) == "constant"
    assert found[0, 3].verdict(1e-9) == "mlp"
    assert found[2, 0].verdict(1e-9) == ""
    assert float(found[0, 3].as_mlp.loss.value) == pytest.approx(0, abs=1e-12)
