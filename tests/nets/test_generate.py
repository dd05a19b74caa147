"""Generation with a cache: keys and values, or a state of constant size."""

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from rheoscope.errors import RheoscopeError
from rheoscope.nets.config import KINDS, LINEAR_KINDS

from .models import tiny, tokens

# The published gate standardises over what follows too, so a token's logits change when the text grows.
CACHED_KINDS = [kind for kind in KINDS if kind != "ega_published"]
MIXED = ["elu", "sd", "lag_conv"]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("positions", ["learned", "rotary", "morlet"])
@pytest.mark.parametrize("kind", [*CACHED_KINDS, MIXED], ids=str)
def test_token_by_token_with_a_cache_gives_the_logits_of_one_pass(kind, positions, implementation):
    model, text = tiny(kind, positions=positions, attn_implementation=implementation), tokens()
    with torch.no_grad():
        whole = model(text).logits
        out = model(text[:, :13], use_cache=True)
        parts = [out.logits]
        for piece in (*text[:, 13:20].split(1, 1), text[:, 20:]):
            out = model(piece, cache=out.cache)
            parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", [*KINDS, MIXED], ids=str)
def test_generated_text_is_the_same_alone_and_left_padded_in_a_batch(kind):
    model, short, long = tiny(kind), tokens(9, 1, seed=2), tokens(16, 1, seed=3)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    alone = [model.generate(text, **options)[0, text.shape[1] :] for text in (short, long)]
    batch = torch.cat([nn.functional.pad(short, (7, 0)), long])
    mask = torch.ones_like(batch)
    mask[0, :7] = 0
    together = model.generate(batch, attention_mask=mask, **options)[:, 16:]
    assert torch.equal(together, torch.stack(alone))


@pytest.mark.parametrize("kind", [*CACHED_KINDS, MIXED], ids=str)
def test_generating_with_and_without_a_cache_gives_the_same_text(kind):
    model, text = tiny(kind), tokens(11)
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(text, **options), model.generate(text, use_cache=False, **options))


@pytest.mark.parametrize("kind", [*sorted(LINEAR_KINDS), "sd", MIXED], ids=str)
def test_beam_search_carries_the_state_of_each_beam(kind):
    model, text = tiny(kind), tokens(7, 2)
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 3, "pad_token_id": 0}
    assert torch.equal(model.generate(text, **options), model.generate(text, use_cache=False, **options))


@pytest.mark.parametrize("kind", sorted(LINEAR_KINDS))
def test_the_state_of_a_linear_kind_does_not_grow(kind):
    model = tiny(kind)
    sizes = []
    for length in (2, 40):
        with torch.no_grad():
            layers = model(tokens(length), use_cache=True).cache.layers
        sizes.append([state.numel() for layer in layers for state in layer.recurrent_states.values()])
    assert sizes[0] == sizes[1]


def test_a_cache_made_without_the_configuration_is_refused_by_linear_kinds_only():
    assert tiny("sd")(tokens(), cache=DynamicCache()).logits.isfinite().all()
    with pytest.raises(RheoscopeError, match="no place for the state of layer 0"):
        tiny("elu")(tokens(), cache=DynamicCache())


def test_a_cache_made_without_the_configuration_masks_padding():
    model, text = tiny("sd"), tokens()
    mask = torch.ones_like(text)
    mask[:, :4] = 0
    wanted = model(text, attention_mask=mask).logits
    got = model(text, attention_mask=mask, cache=DynamicCache()).logits
    torch.testing.assert_close(got[:, 4:], wanted[:, 4:], rtol=0, atol=1e-10)


def test_a_static_cache_is_refused():
    with pytest.raises(RheoscopeError, match="static cache"):
        tiny("sd").generate(tokens(5, 1), max_new_tokens=2, cache_implementation="static", pad_token_id=0)
