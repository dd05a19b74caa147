"""`check` holds on every family, says why where it does not apply, and fails where a row or the reading is wrong."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from rheoscope.models import check as check_module
from rheoscope.models import identities, interface
from rheoscope.models import view as view_module
from rheoscope.models.attention import Attention
from rheoscope.models.check import check
from rheoscope.models.families import FAMILIES, Packing, Residual, Rope
from rheoscope.models.identities import IDENTITIES
from rheoscope.models.precision import Float64Throughout
from rheoscope.models.view import ModelView
from rheoscope.models.weights import HeadWeights
from tests.models.views import view_of
from tests.tiny import CAUSAL, VARIANTS, WINDOW, tiny

MAPS = "attention maps read = the model's own"
REBUILT = "maps rebuilt from W_Q, W_K = the model's own"
VALUES = "attn_probs @ v = z"
WRITTEN = "z @ W_O = what attention writes"
SUM = "resid_pre + attn_out + ffn_out = resid_post"
PAST = "a changed token leaves the past bit-equal"
TAPPED = "tapped outputs = untapped outputs"
PADDING = "batching and padding change nothing"

YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "partial_rotary_factor": 0.4}
LONGROPE = {"rope_type": "longrope", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16} | {
    "short_factor": [1.1] * 5,
    "long_factor": [2.3] * 5,
}


def viewed(model):
    with Float64Throughout():
        return ModelView(model)


def statuses(view, **options):
    return {finding.identity: finding.status for finding in check(view, **options)}


def failing(view):
    return {identity for identity, status in statuses(view).items() if status == "fails"}


@pytest.mark.parametrize("name", VARIANTS)
def test_everything_holds_on_every_family(name):
    for finding in check(view_of(name)):
        if finding.identity == PAST and name not in CAUSAL:
            assert finding.status == "refused"
            assert finding.reason == f"{view_of(name).model_type} reads both ways: nothing is causal about it"
        else:
            assert finding.status == "holds", finding
            assert finding.error <= finding.floor < 1e-12
            assert finding.dtype == "float64"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0}}),
        ("llama", {"rope_parameters": LONGROPE, "max_position_embeddings": 64}),
        ("gpt_neox", {"rope_parameters": YARN, "max_position_embeddings": 32}),
        ("gpt_neox", {"attention_bias": False}),
        ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
        ("olmo2", {"attention_bias": True}),
        ("stablelm", {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 3}),
        ("mistral", {"sliding_window": 1}),
        ("gpt2", {"add_cross_attention": True}),
        ("llama", {"num_hidden_layers": 1}),
    ],
)
def test_everything_holds_in_settings_that_no_tiny_model_has(name, settings):
    assert set(statuses(viewed(tiny(name, **settings))).values()) == {"holds"}


def test_the_identities_are_those_that_are_promised():
    assert list(IDENTITIES) == [MAPS, REBUILT, VALUES, WRITTEN, SUM, PAST, TAPPED, PADDING]


@pytest.mark.parametrize(
    ("name", "wrong", "identity"),
    [
        ("gpt2", {"packing": Packing.PER_HEAD}, REBUILT),
        ("gpt2", {"packing": Packing.PER_HEAD}, VALUES),
        ("gpt_neox", {"packing": Packing.BLOCKS}, REBUILT),
        ("gpt_neox", {"packing": Packing.BLOCKS}, VALUES),
        ("gpt_bigcode:mha", {"packing": Packing.BLOCKS}, REBUILT),
        ("modernbert", {"packing": Packing.PER_HEAD}, REBUILT),
        ("llama", {"rope": Rope.INTERLEAVED}, REBUILT),
        ("llama", {"rope": Rope.NONE}, REBUILT),
        ("gptj", {"rope": Rope.HALVES}, REBUILT),
        ("gptj", {"sine_first": False}, REBUILT),
        ("cohere", {"rope": Rope.HALVES}, REBUILT),
        ("cohere2", {"rope_if": None}, REBUILT),
        ("smollm3", {"rope_if": None}, REBUILT),
        ("gpt_oss", {"half_tables": False}, REBUILT),
        ("opt", {"prescaled": False}, REBUILT),
        ("qwen3", {"q_norm": None}, REBUILT),
        ("qwen3", {"k_norm": None}, REBUILT),
        ("olmo2", {"norm_joint": False}, REBUILT),
        ("stablelm:qk-norm", {"norm_head_first": False}, REBUILT),
        ("olmo:clip-qkv", {"clip": None}, REBUILT),
        ("olmo:clip-qkv", {"clip": None}, VALUES),
        ("gpt2", {"transposed": False}, REBUILT),
        ("gpt2", {"transposed": False}, WRITTEN),
        ("llama:mha", {"transposed": True}, WRITTEN),
        ("llama:mha", {"q": "self_attn.k_proj", "k": "self_attn.q_proj"}, REBUILT),
        ("llama:mha", {"v": "self_attn.k_proj"}, VALUES),
        ("granite", {"multiplier": None}, SUM),
        ("llama", {"multiplier": "rms_norm_eps"}, SUM),
        ("gemma2", {"attn_term": None}, SUM),
        ("gemma2", {"ffn_term": None}, SUM),
        ("olmo2", {"attn_term": "mlp"}, SUM),
        ("bert", {"attn_term": "attention.self"}, SUM),
        ("gemma2", {"norm_ffn": "post_attention_layernorm"}, SUM),
        ("gpt_neox", {"residual": Residual.SEQUENTIAL}, SUM),
        ("bert", {"residual": Residual.SEQUENTIAL}, SUM),
        ("opt", {"ffn": ("fc1", "activation_fn")}, SUM),
        ("llama", {"ffn": ("feed_forward",)}, SUM),
    ],
)  # fmt: skip
def test_a_wrong_row_is_found_by_the_identity_it_breaks(name, wrong, identity, monkeypatch):
    family = VARIANTS[name].family
    monkeypatch.setitem(view_module.FAMILIES, family, replace(FAMILIES[family], **wrong))
    view = viewed(tiny(name))
    found = failing(view)
    assert identity in found
    assert not found & {MAPS, PAST, PADDING}  # what needs no row is not blamed


def test_the_row_is_not_wrong_to_begin_with():
    assert not failing(viewed(tiny("gpt_neox")))


def test_keys_and_values_tiled_over_a_group_are_found(monkeypatch):
    def tiled(self, layer, per_group, dim=0):
        times = [1] * per_group.dim()
        times[dim] = self.view.n_heads // self.view.n_kv_heads
        return per_group.repeat(*times)

    monkeypatch.setattr(HeadWeights, "_repeated", tiled)
    assert failing(viewed(tiny("llama"))) == {REBUILT, VALUES}
    assert not failing(viewed(tiny("llama:mqa")))  # with one key head, or as many as query heads, it is the same
    assert not failing(viewed(tiny("llama:mha")))


def test_a_mask_function_that_is_not_registered_is_found(monkeypatch):
    view = viewed(tiny("mistral"))
    monkeypatch.setattr(interface.AttentionMaskInterface, "register", lambda *_: None)
    monkeypatch.delitem(interface.AttentionMaskInterface._global_mapping, interface.IMPLEMENTATION)
    assert failing(view) == {MAPS, REBUILT, VALUES, TAPPED}  # its windows are lost


def test_lost_causality_is_found(monkeypatch):
    view = viewed(tiny("llama"))
    monkeypatch.setattr(Attention, "allowed", property(lambda self: None))
    monkeypatch.setattr(Attention, "_fused", Attention._mixed)
    assert {MAPS, REBUILT, VALUES, PAST, TAPPED} <= failing(view)


def test_a_forgotten_scale_or_softcap_is_found(monkeypatch):
    views = {name: viewed(tiny(name)) for name in ("granite", "gemma2")}
    original = interface._tapped_attention
    for name, forgotten in (("granite", {"scaling": None}), ("gemma2", {"softcap": None})):
        lacking = lambda *call, drop=forgotten, **options: original(*call, **{**options, **drop})  # noqa: E731
        monkeypatch.setattr(interface, "_tapped_attention", lacking)
        assert {MAPS, REBUILT, TAPPED} <= failing(views[name])


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3.0])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_bad_layer_is_not_hidden_by_the_others(bad, place):
    pairs = [(torch.ones(3), torch.ones(3)) for _ in range(3)]
    pairs[place] = (torch.tensor([1.0, bad, 1.0]), torch.ones(3))
    error = identities._largest(pairs)
    assert math.isnan(error) if math.isnan(bad) else error == bad - 1


def test_parts_of_different_shapes_are_no_match():
    assert identities._largest([(torch.ones(3), torch.ones(3)), (torch.ones(1), torch.ones(4))]) == math.inf


def test_a_model_that_ignores_its_tokens_proves_nothing_about_causality():
    model = tiny("llama")
    nn.init.ones_(model.model.embed_tokens.weight)
    view = viewed(model)
    finding = next(finding for finding in check(view) if finding.identity == PAST)
    assert finding.status == "refused"
    assert "do not depend on token" in finding.reason


def test_a_model_type_without_a_row_is_checked_where_no_row_is_needed(monkeypatch):
    monkeypatch.setattr(view_module, "FAMILIES", {})
    found = {finding.identity: finding for finding in check(viewed(tiny("llama")))}
    needs_row = {REBUILT, VALUES, WRITTEN, SUM}
    assert {identity for identity, finding in found.items() if finding.status == "refused"} == needs_row
    assert all("has no row in rheoscope/models/families.py" in found[identity].reason for identity in needs_row)
    assert all(found[identity].status == "holds" for identity in {MAPS, PAST, TAPPED, PADDING})


def test_progress_names_every_identity_before_it_is_tried():
    told = []
    check(view_of("llama"), progress=told.append)
    assert told == list(IDENTITIES)


def test_the_same_seed_tries_the_same_tokens_which_reach_past_any_window_and_are_no_special_ones():
    config = {**VARIANTS["mistral"].kwargs, "max_position_embeddings": 500, "sliding_window": 100}
    view = ModelView(LlamaForCausalLM(LlamaConfig(**VARIANTS["llama"].kwargs)))
    view.windows = [None, config["sliding_window"], WINDOW]
    view.config.max_position_embeddings = config["max_position_embeddings"]
    first, again, other = (check_module._tokens(view, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (1, 108)
    assert (first != view.pad_token).all()
    view.config.max_position_embeddings = 31
    assert check_module._tokens(view, 0).shape == (1, 31)


@pytest.mark.parametrize("padding", [-1, 61, 10**6])
def test_a_padding_token_that_is_no_word_counts_as_none(padding):
    view = ModelView(tiny("llama", dtype=torch.float32))
    view.config.pad_token_id = padding
    assert view.pad_token == 0
    assert all(finding.status != "fails" for finding in check(view))
