"""The decoder as a transformers model, for every kind of attention."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from rheoscope.errors import RheoscopeError
from rheoscope.nets.attention import eager_attention
from rheoscope.nets.config import KINDS, LINEAR_KINDS, RheoscopeConfig
from rheoscope.nets.decoder import RheoscopeForCausalLM
from rheoscope.nets.kinds import ATTENTION

from .models import VOCABULARY, WINDOW, tiny, tokens

ROOT = Path(__file__).parents[2]
SOFTMAX_KINDS = [kind for kind in KINDS if kind not in LINEAR_KINDS]
CAUSAL_KINDS = [kind for kind in KINDS if kind != "ega_published"]


def logits_after_a_change(kind, at=17, **changes):
    model, text = tiny(kind, **changes), tokens()
    other = text.clone()
    other[:, at] = (other[:, at] + 1) % VOCABULARY
    with torch.no_grad():
        return model(text).logits, model(other).logits


def test_every_kind_has_a_module():
    assert list(ATTENTION) == list(KINDS)


@pytest.mark.parametrize("positions", ["learned", "rotary", "morlet"])
@pytest.mark.parametrize("kind", CAUSAL_KINDS)
def test_changing_a_token_leaves_the_logits_before_it_bit_equal(kind, positions):
    before, after = logits_after_a_change(kind, positions=positions)
    assert torch.equal(before[:, :17], after[:, :17])
    assert not torch.allclose(before[:, 17:], after[:, 17:])


@pytest.mark.parametrize("kind", [kind for kind in SOFTMAX_KINDS if kind != "ega_published"])
def test_eager_attention_is_causal_too(kind):
    before, after = logits_after_a_change(kind, attn_implementation="eager")
    assert torch.equal(before[:, :17], after[:, :17])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_energy_gates_as_published_leak_the_future(implementation):
    before, after = logits_after_a_change("ega_published", attn_implementation=implementation)
    assert (before[:, :17] - after[:, :17]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", SOFTMAX_KINDS)
def test_fused_and_eager_attention_agree(kind):
    text = tokens()
    fused, eager = (tiny(kind, attn_implementation=name)(text).logits for name in ("sdpa", "eager"))
    torch.testing.assert_close(fused, eager, rtol=0, atol=1e-10)


@pytest.fixture
def foreign():
    """An attention function that knows nothing of rheoscope, registered with its mask; it notes what it is given."""
    calls = []

    def note(module, query, key, value, attention_mask, **kwargs):
        calls.append((module.kind, query, key, kwargs["scaling"], kwargs.get("position_bias")))
        return eager_attention(module, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register("foreign", note)
    AttentionMaskInterface.register("foreign", sdpa_mask)
    return calls


@pytest.mark.parametrize("kind", SOFTMAX_KINDS)
def test_an_attention_function_that_knows_nothing_of_the_kind_gives_the_same_logits(kind, foreign):
    text, model = tokens(), tiny(kind)
    mask = torch.ones_like(text)
    mask[0, :5] = 0
    wanted = model(text, attention_mask=mask).logits
    model.set_attn_implementation("foreign")
    got = model(text, attention_mask=mask).logits
    assert len(foreign) == 3
    torch.testing.assert_close(got[mask.bool()], wanted[mask.bool()], rtol=0, atol=1e-10)


def test_the_scores_an_attention_function_sees_are_skew_and_its_bias_is_minus_the_damping(foreign):
    model = tiny("sd", attn_implementation="foreign")
    model(tokens())
    _, query, key, scaling, bias = foreign[0]
    scores = scaling * query @ key.mT
    torch.testing.assert_close(scores, -scores.mT, rtol=0, atol=1e-12)
    damping = -bias.diagonal(dim1=-2, dim2=-1)
    assert (damping > 0).all()
    assert torch.equal(bias, torch.diag_embed(-damping))


@pytest.mark.parametrize("positions", ["learned", "rotary", "morlet"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_either_side_and_other_texts_in_the_batch_change_nothing(kind, positions):
    model, text = tiny(kind, positions=positions), tokens(batch=1)
    with torch.no_grad():
        alone = model(text).logits[0]
        for left, right in ((7, 0), (0, 7), (3, 4)):
            row = nn.functional.pad(text, (left, right), value=11)
            mask = nn.functional.pad(torch.ones_like(text), (left, right))
            batch, masks = (
                torch.cat([tokens(36, 1, seed=5), row]),
                torch.cat([torch.ones(1, 36, dtype=torch.long), mask]),
            )
            padded = model(batch, attention_mask=masks).logits
            assert padded.isfinite().all()
            torch.testing.assert_close(padded[1, left : left + 29], alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", sorted(LINEAR_KINDS))
def test_linear_kinds_call_an_attention_function_only_if_it_takes_their_mixing(kind, foreign):
    text, model = tokens(), tiny(kind)
    wanted = model(text).logits
    model.set_attn_implementation("foreign")
    assert torch.equal(model(text).logits, wanted)
    assert not foreign
    seen = []

    def mixing_of(_module, query, key, value, _mask, *, mixing, position_bias, **_):
        seen.append((query, key, position_bias))
        return mixing(query, key, value).transpose(1, 2), None

    mixing_of.takes_mixing = True
    AttentionInterface.register("foreign", mixing_of)
    assert torch.equal(model(text).logits, wanted)
    assert len(seen) == 3
    assert (seen[0][2] is not None) == (kind == "sd_linear")
    assert seen[0][0].shape[-1] == (6 if kind == "elu" else 12)


def test_without_norms_there_is_no_norm_at_all_not_even_a_final_one():
    model = tiny("sd", use_norm=False)
    assert not any(isinstance(module, nn.LayerNorm) for module in model.modules())
    assert sum(isinstance(module, nn.LayerNorm) for module in tiny("sd").modules()) == 7


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_changes_no_gradient(kind):
    text = tokens()
    plain, checkpointed = tiny(kind).train(), tiny(kind).train()
    checkpointed.activation_checkpointing_enable()
    for model in (plain, checkpointed):
        model(text, labels=text).loss.backward()
    for (name, one), other in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        assert one.grad is not None, name
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12)


def test_embeddings_and_head_are_one_tensor_unless_untied():
    model = tiny()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    untied = tiny(tie_word_embeddings=False)
    assert untied.lm_head.weight is not untied.model.embed_tokens.weight


def test_each_layer_may_have_its_own_kind_and_head_size():
    kinds, sizes = ["sd", "elu", "ega"], [2, 6, 4]
    model = tiny(kinds, head_dims=sizes)
    layers = model.model.layers
    assert [layer.self_attn.kind for layer in layers] == kinds
    assert [tuple(layer.self_attn.q_proj.weight.shape) for layer in layers] == [(5 * size, 26) for size in sizes]
    assert [tuple(layer.self_attn.o_proj.weight.shape) for layer in layers] == [(26, 5 * size) for size in sizes]
    assert model(tokens()).logits.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_comes_back_with_the_same_logits(kind, tmp_path):
    model = tiny([kind, "softmax", kind], head_dims=[2, 4, 6], dtype=torch.float32)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(loaded) is RheoscopeForCausalLM
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.attention, config.head_dims) == ([kind, "softmax", kind], [2, 4, 6])
    assert torch.equal(loaded(tokens()).logits, model(tokens()).logits)


def in_a_new_process(folder, *imports):
    """Logits of the model in that folder, computed by a fresh interpreter; its error output if it fails."""
    code = f"""
import torch
{"; ".join(imports)}
from transformers import AutoModelForCausalLM
from safetensors.torch import save_file
model = AutoModelForCausalLM.from_pretrained({str(folder)!r}).eval()
text = torch.randint(0, {VOCABULARY}, (3, 29), generator=torch.Generator().manual_seed(1))
save_file({{"logits": model(text).logits.detach().contiguous()}}, {str(folder / "logits")!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    return load_file(folder / "logits")["logits"] if done.returncode == 0 else done.stderr


def test_a_new_process_gets_the_same_logits_and_one_without_rheoscope_fails_loudly(tmp_path):
    model = tiny(["sd", "ega", "elu"], dtype=torch.float32)
    model.save_pretrained(tmp_path)
    assert torch.equal(in_a_new_process(tmp_path, "import rheoscope.nets"), model(tokens()).logits)
    assert "rheoscope_decoder" in in_a_new_process(tmp_path)


def test_residual_projections_start_smaller_by_the_root_of_twice_the_layers():
    torch.manual_seed(0)
    model = RheoscopeForCausalLM(RheoscopeConfig(vocab_size=97, hidden_size=128, num_hidden_layers=8))
    layer = model.model.layers[3]
    for module, wanted in (
        (layer.self_attn.q_proj, 0.02),
        (layer.self_attn.o_proj, 0.005),
        (layer.mlp.down_proj, 0.005),
    ):
        assert module.weight.std().item() == pytest.approx(wanted, rel=0.03)


def test_eager_attention_returns_probabilities_whose_rows_sum_to_one():
    out = tiny("sd", attn_implementation="eager")(tokens(), output_attentions=True, output_hidden_states=True)
    assert [tuple(probs.shape) for probs in out.attentions] == [(3, 5, 29, 29)] * 3
    torch.testing.assert_close(out.attentions[1].sum(-1), torch.ones(3, 5, 29, dtype=torch.float64))
    assert [tuple(state.shape) for state in out.hidden_states] == [(3, 29, 26)] * 4


def test_half_precision_gives_finite_logits_near_those_of_float32():
    for kind in KINDS:
        model = tiny(kind, dtype=torch.float32)
        wanted = model(tokens()).logits
        with torch.autocast("cpu", torch.bfloat16):
            got = model(tokens()).logits
        assert (got.float() - wanted).abs().max() < 0.1 * wanted.abs().max(), kind


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": "sofmax"}, "no attention kind is called 'sofmax'"),
        ({"attention": ["sd", "elu"]}, "attention has 2 entries for 3 layers"),
        ({"head_dims": [4, 4]}, "head_dims has 2 entries for 3 layers"),
        ({"head_dims": 27}, "d_head 27 asked for in layer 0"),
        ({"head_dims": [4, 0, 4]}, "d_head 0 asked for in layer 1"),
        ({"head_dims": 5, "positions": "rotary"}, "rotary positions turn pairs"),
        ({"head_dims": None}, "hidden_size 26 is not a multiple of 5 heads"),
        ({"positions": "absolute"}, "no positions are called 'absolute'"),
        ({"positions": "morlet", "hidden_size": 25}, "hidden_size 25 is odd"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_in_one_sentence(fields, message):
    with pytest.raises(RheoscopeError, match=message):
        tiny(**fields)


def test_a_text_longer_than_the_learned_positions_is_refused():
    with pytest.raises(RheoscopeError, match="position 41 asked for; the model has 41 learned positions"):
        tiny()(tokens(WINDOW + 1))
    assert tiny(positions="rotary")(tokens(WINDOW + 1)).logits.isfinite().all()


def test_a_mask_with_one_entry_per_pair_is_refused():
    with pytest.raises(RheoscopeError, match="one entry per token"):
        tiny("elu")(tokens(), attention_mask=torch.ones(3, 1, 29, 29))


def test_morlet_frequencies_start_log_spaced_and_stay_admissible():
    positions = RheoscopeForCausalLM(RheoscopeConfig(hidden_size=64, positions="morlet")).model.embed_positions
    waves = positions(torch.arange(4)[None])[0]
    assert waves.shape == (4, 64)
    torch.testing.assert_close(waves[0], torch.tensor([1.0, 0.0]).repeat(32))
    lowest = torch.tensor(1.0)
    torch.testing.assert_close(waves[1, 0], torch.exp(-(lowest**2) / 50) * lowest.cos())
    frequency = positions.log_frequency.exp()
    assert frequency[-1].item() == pytest.approx(0.99 * torch.pi)
    highest = torch.tensor(0.95 * torch.pi)
    torch.testing.assert_close(waves[1, -2], torch.exp(-(highest**2) / 50) * highest.cos())
