"""Edited models as transformers uses them: generate, train, save, read in a new process, edit again."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import rheoscope
from rheoscope.errors import Refused, RheoscopeError
from rheoscope.models.view import ModelView
from rheoscope.surgery.edited_model import EditedConfig, EditedForCausalLM, save_edited
from rheoscope.surgery.edits import edited
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.edits_sinks import DropHeads, UniformMixing
from rheoscope.surgery.edits_structure import DropAttention, Parallelize
from rheoscope.surgery.mixing import StateLayer
from rheoscope.surgery.restructure import restructured
from tests.surgery.restructuring import logits_of, mixed_edits, single
from tests.tiny import input_ids


@pytest.mark.parametrize("name", ["llama", "gpt2", "gptj", "qwen2", "opt", "rheoscope_decoder"])
def test_generating_with_a_cache_and_with_padding_on_the_left_changes_nothing(name):
    view = single(name)
    model = restructured(view, mixed_edits(view))
    tokens = input_ids(view.model)
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    cached = model.generate(tokens, use_cache=True, **options)
    assert torch.equal(cached, model.generate(tokens, use_cache=False, **options))
    assert torch.equal(cached[:1], model.generate(tokens[:1], **options))
    width = 4
    padded = torch.cat([torch.zeros(2, width, dtype=torch.long), tokens], 1)
    mask = (torch.arange(padded.shape[1]) >= width).long().expand(2, -1)
    left = model.generate(padded, attention_mask=mask, **options)
    assert torch.equal(left[:, padded.shape[1] :], cached[:, tokens.shape[1] :])


def test_beams_and_chunks_go_through_the_states():
    view = single("llama")
    model = restructured(view, mixed_edits(view))
    tokens = input_ids(view.model)
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with_states = model.generate(tokens, use_cache=True, **options)
    assert torch.equal(with_states, model.generate(tokens, use_cache=False, **options))
    cache = DynamicCache()
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        parts = [model(part, cache=cache, use_cache=True).logits for part in tokens.split((5, 1, 3, 4), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


def test_the_state_of_linear_layers_does_not_grow_with_the_context():
    view = single("llama")
    model = restructured(view, [Linearize()])

    def kept(length):
        with torch.no_grad():
            cache = model(input_ids(view.model, length=length), use_cache=True).cache
        assert cache.get_seq_length() == length
        assert all(isinstance(layer, StateLayer) and layer.keys is None for layer in cache.layers)
        return [tuple(layer.state.shape) for layer in cache.layers]

    assert kept(3) == kept(29) == [(2, view.n_kv_heads, view.d_head, view.d_value + 1)] * 3


def test_a_cache_that_cannot_hold_states_is_refused():
    view = single("llama")
    model = restructured(view, mixed_edits(view))
    tokens = input_ids(view.model)
    with pytest.raises(RheoscopeError, match="a static cache was given"):
        model(tokens, cache=StaticCache(config=view.config, max_cache_len=32))
    with torch.no_grad():
        foreign = view.model(tokens, use_cache=True).cache
    with pytest.raises(RheoscopeError, match="holds keys of layer 0, which keeps none"):
        model(tokens, cache=foreign)
    own = model(tokens, use_cache=True).cache
    with pytest.raises(RheoscopeError, match="generate without an assistant"):
        own.layers[0].crop(-1)


def test_training_with_checkpointing_gives_the_same_gradients():
    view = single("llama")
    tokens = input_ids(view.model)
    gradients = []
    for checkpointing in (False, True):
        model = restructured(view, [*mixed_edits(view), Parallelize(layers=(1,))]).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        out = model(tokens, labels=tokens)
        assert out.loss.isfinite()
        out.loss.backward()
        gradients.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert len(gradients[0]) > 20
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient)


def test_saved_edited_and_saved_again_it_is_still_the_model(tmp_path):
    view = single("llama")
    first = save_edited(restructured(view, mixed_edits(view)), None, tmp_path / "first")
    once = rheoscope.load(first)
    twice = restructured(once, [DropHeads(heads=((1, 0), (1, 1), (1, 2)))])
    second = save_edited(twice, None, tmp_path / "second")
    config = json.loads((second / "config.json").read_text())
    assert [[edit["edit"] for edit in edits] for edits in config["rounds"]] == [
        ["DropAttention", "DropHeads", "Linearize"],
        ["DropHeads"],
    ]
    assert config["text_config"]["model_type"] == "llama"
    read = rheoscope.load(second)
    assert torch.equal(logits_of(read), logits_of(ModelView(twice)))
    assert read.sizes[1].n_heads == 0


def test_a_view_of_an_edited_model_reads_streams_and_edits_and_refuses_what_layers_do_not_share():
    view = single("llama")
    new = ModelView(restructured(view, mixed_edits(view)), ref="edited")
    assert [size.n_heads for size in new.sizes] == [0, 3, 6]
    assert new.has_loss
    seen = {}

    def keep(site):
        def tap(layer, x):
            seen[site, layer] = x.clone()

        return tap

    taps = {site: keep(site) for site in ("resid_pre", "attn_out", "ffn_out", "resid_post")}
    with new.tapped(taps):
        logits_of(new)
    for layer in range(3):
        total = seen["resid_pre", layer] + seen["attn_out", layer] + seen["ffn_out", layer]
        torch.testing.assert_close(total, seen["resid_post", layer])
    with pytest.raises(Refused, match="after its edits this model has 0, 3, 6"):
        _ = new.n_heads
    with pytest.raises(Refused, match=r"attn_probs asked for in layers \[0\]"), edited(new, UniformMixing()):
        pass
    plain = logits_of(new)
    with edited(new, UniformMixing(layers=(1,))):
        assert not torch.allclose(logits_of(new), plain)
    assert torch.equal(logits_of(new), plain)
    with pytest.raises(Refused, match="its attention away"):
        new.weights.W_Q(0)
    assert new.weights.W_Q(1).shape == (3, 42, 10)


def test_sites_inside_fused_layers_are_refused():
    view = single("llama")
    new = ModelView(restructured(view, [Parallelize(layers=(1,), fused=True)]))
    with (
        pytest.raises(Refused, match=r"ffn_out asked for in layers \[1\]; an edit has fused"),
        new.tapped({"ffn_out": print}),
    ):
        pass
    with new.tapped({"resid_post": lambda layer, x: None, "z": lambda layer, z: None}):
        logits_of(new)


def test_another_attention_implementation_and_unknown_arguments_are_refused():
    view = single("distilbert")
    model = restructured(view, [DropAttention(layers=(1,))])
    with pytest.raises(RheoscopeError, match="cache given; DistilBertForMaskedLM does not take it"):
        model(input_ids(view.model), cache=DynamicCache())
    with pytest.raises(Refused, match="attention by 'eager' asked for"):
        model.set_attn_implementation("eager")


def test_a_configuration_that_is_no_edited_model_is_refused():
    with pytest.raises(RheoscopeError, match="without the configuration of the original"):
        EditedForCausalLM(EditedConfig())
    with pytest.raises(RheoscopeError, match="names no original model type"):
        EditedConfig(text_config={"model_type": "rheoscope_edited"})
    view = single("llama")
    model = restructured(view, mixed_edits(view))
    assert model.config.vocab_size == view.config.vocab_size
    assert AutoModelForCausalLM.from_config(model.config).num_parameters() == model.num_parameters()
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = model.config.no_such_thing
