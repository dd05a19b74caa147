"""The fixtures themselves: the tiny models run, are what they claim to be, and would show mistakes."""

import pytest
import torch

from tests.tiny import ALL, CAUSAL, FAMILIES, LENGTH, REFUSED, VARIANTS, Float64Throughout, input_ids, tiny

CHANGED = 7  # the position of the token that is changed
MOE = {"mixtral", "qwen3_moe", "gpt_oss"}


@torch.no_grad()
def logits(model, ids):
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return model(ids, use_cache=False, **decoder).logits


@torch.no_grad()
def attentions(model, ids):
    return model(ids, use_cache=False, output_attentions=True).attentions


def differences_after_one_change(name):
    """Largest change of the logits at every position, when one token is replaced."""
    model = tiny(name)
    before = input_ids(model)
    after = before.clone()
    after[:, CHANGED] = 3 + (before[:, CHANGED] - 2) % (model.config.vocab_size - 3)
    assert (after != before).any(0).nonzero().tolist() == [[CHANGED]]
    with Float64Throughout():
        return (logits(model, before) - logits(model, after)).abs().amax((0, 2))


@pytest.mark.parametrize("name", ALL)
def test_every_model_runs(name):
    model = tiny(name)
    out = logits(model, input_ids(model))
    assert out.shape == (2, LENGTH, model.config.vocab_size)
    assert out.isfinite().all()
    assert out.std() > 0.01


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_of_float64_models_are_float64(name):
    model = tiny(name)
    assert logits(model, input_ids(model)).dtype == torch.float64


@pytest.mark.parametrize("name", VARIANTS)
def test_eager_and_sdpa_agree_where_transformers_offers_both(name):
    model = tiny(name)
    ids = input_ids(model)
    with Float64Throughout():
        eager = logits(model, ids)
        if not VARIANTS[name].sdpa:
            with pytest.raises(ValueError, match="does not support an attention implementation"):
                model.set_attn_implementation("sdpa")
            return
        model.set_attn_implementation("sdpa")
        assert model.config._attn_implementation == "sdpa"
        torch.testing.assert_close(logits(model, ids), eager, rtol=0, atol=1e-9)


def test_without_the_float64_mode_models_are_good_to_float32_only():
    model = tiny("llama")
    ids = input_ids(model)
    with Float64Throughout():
        exact = logits(model, ids)
    error = (logits(model, ids) - exact).abs().max()
    assert 1e-9 < error < 1e-4


@pytest.mark.parametrize("name", ALL)
def test_no_parameter_keeps_a_value_that_hides_mistakes(name):
    for parameter_name, parameter in tiny(name).named_parameters():
        assert parameter.isfinite().all(), parameter_name
        assert parameter.std() > 0.05, parameter_name
        assert not ((parameter == 0) | (parameter == 1)).any(), parameter_name


def test_biases_that_start_at_zero_are_nonzero():
    biases = [value for key, value in tiny("llama:biases").named_parameters() if key.endswith("bias")]
    assert len(biases) == 3 * (4 + 3)  # q, k, v, o and gate, up, down of three layers
    assert all((bias.abs() > 1e-4).all() for bias in biases)


def test_tied_weights_stay_tied():
    model = tiny("llama:tied")
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("name", CAUSAL)
def test_a_changed_token_leaves_earlier_logits_as_they_were(name):
    change = differences_after_one_change(name)
    # an expert multiplies all its tokens at once, and the size of a product may change its rounding
    assert change[:CHANGED].max() <= (1e-12 if ALL[name].family in MOE else 0)
    assert change[CHANGED] > 1e-3
    assert change[CHANGED + 1 :].max() > 1e-3


@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in CAUSAL])
def test_a_changed_token_changes_earlier_logits_of_an_encoder(name):
    assert differences_after_one_change(name)[:CHANGED].min() > 1e-6


@pytest.mark.parametrize("name", VARIANTS)
def test_attention_is_far_from_uniform(name):
    model = tiny(name)
    for probs in attentions(model, input_ids(model)):
        visible = probs > 0
        uniform = visible / visible.sum(-1, keepdim=True)
        distance = (probs / probs.sum(-1, keepdim=True) - uniform).abs().sum(-1) / 2
        assert distance[..., -1].mean() > 0.08


@pytest.mark.parametrize("name", VARIANTS)
def test_each_layer_sees_the_keys_that_its_config_says(name):
    model = tiny(name)
    config, variant = model.config, VARIANTS[name]
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * 3
    lag = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    for kind, probs in zip(kinds, attentions(model, input_ids(model)), strict=True):
        expected = lag >= 0 if variant.causal else torch.ones_like(lag, dtype=torch.bool)
        if kind == "sliding_attention":
            expected = expected & (lag < window if variant.causal else lag.abs() <= window)
        assert ((probs > 0) == expected).all()


def test_rows_of_learned_sinks_sum_to_less_than_one():
    model = tiny("gpt_oss")
    for probs in attentions(model, input_ids(model)):
        assert (probs.sum(-1) < 1 - 1e-6).all()
        assert probs.sum(-1).mean() < 0.95


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_seed_gives_the_same_model_and_another_seed_another(family):
    first, second, other = tiny(family), tiny(family), tiny(family, seed=1)
    ids = input_ids(first)
    assert torch.equal(logits(first, ids), logits(second, ids))
    assert not torch.allclose(logits(first, ids), logits(other, ids))


def test_building_a_model_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    tiny("llama")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bare_model_gives_hidden_states(family):
    model = tiny(family, bare=True)
    out = model(input_ids(model), use_cache=False).last_hidden_state
    assert out.shape[:2] == (2, LENGTH)
    assert not hasattr(model, "lm_head")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_bigcode", "bert"])
def test_overrides_reach_the_config_and_dtype_the_parameters(name):
    model = tiny(name, vocab_size=67, dtype=torch.float32)
    assert model.config.vocab_size == 67
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_refused_families_say_why():
    assert {"bloom", "mpt", "falcon", "gpt_neo", "t5", "mamba", "jamba", "deepseek_v3"} <= set(REFUSED)
    assert all(variant.refused for variant in REFUSED.values())
    assert not set(REFUSED) & set(VARIANTS)
