"""Tiny random models of every family, built from configs, for tests that need a whole model.

Every parameter is drawn anew: fresh biases are 0, fresh gains 1 and fresh sinks 0, and would hide mistakes. Sizes are
distinct where the architecture allows: 3 layers, 6 query and 2 key heads of width 10 in 43 dimensions, 61 tokens.
"""

from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import transformers
from jaxtyping import Int
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from rheoscope import nets
from rheoscope.models.precision import Float64Throughout as Float64Throughout

VOCAB = 61
WINDOW = 5
LENGTH = 13  # more than WINDOW + 2, so that a window off by one shows


@dataclass(frozen=True)
class Variant:
    """What it takes to build one tiny model, and what transformers promises of it."""

    family: str
    config: str
    model: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    sdpa: bool = True  # False: transformers itself refuses SDPA, for the soft-cap or the sinks
    causal: bool = True
    refused: str = ""  # why rheoscope does not read this family; empty where it does


# Sizes, by what the config lets us choose. Rotary widths must be even.
_COMMON = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_NAMED = {**_COMMON, "num_hidden_layers": 3, "num_attention_heads": 6, "max_position_embeddings": 31}
_LEARNED = {**_NAMED, "hidden_size": 42}  # d_head 7: odd is fine without RoPE
_BERT = {**_LEARNED, "intermediate_size": 37}
_ROPE = {**_NAMED, "hidden_size": 60, "intermediate_size": 37}  # d_head = 60 / 6 = 10, no choice
_GQA = {**_ROPE, "num_key_value_heads": 2}
_LLAMA = {**_GQA, "hidden_size": 42, "head_dim": 10}  # n_heads * d_head = 60 is not d_model
_FREE = {**_LLAMA, "hidden_size": 43}  # d_model need not be a multiple of n_heads
_GPT2 = {**_COMMON, "n_layer": 3, "n_head": 6, "n_embd": 42, "n_inner": 37, "n_positions": 31}
_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_MARKS = {"cls_token_id": 1, "sep_token_id": 2}
_MOE = {"num_experts_per_tok": 2, "num_local_experts": 5}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}


def _partial(fraction: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": fraction, **more}


def _scaled(rope: dict[str, Any], original: int) -> dict[str, Any]:
    return {"rope_parameters": {**rope, "original_max_position_embeddings": original}, "max_position_embeddings": 32}


_MLA = {
    **{**_ROPE, "hidden_size": 42, "num_key_value_heads": 6, "moe_intermediate_size": 11},
    **{"num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 17, "q_lora_rank": 19},
    **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 7},
}
_REFUSED = {
    "bloom": "residual inside the modules, ALiBi, no attention interface",
    "mpt": "residual inside the FFN, ALiBi, no attention interface",
    "falcon": "no attention interface",
    "gpt_neo": "no attention interface",
    "t5": "encoder and decoder",
    "mamba": "no attention",
    "jamba": "attention in some layers only",
    "deepseek_v2": "multi-head latent attention",
    "deepseek_v3": "multi-head latent attention",
}

_LINES: list[tuple[str, str, str, dict[str, Any]]] = [
    # learned positions
    ("gpt2", "GPT2Config", "GPT2LMHeadModel", _GPT2),
    ("gpt2:by-layer-scale", "", "", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt2:unscaled", "", "", {"scale_attn_weights": False}),
    ("gpt_bigcode", "GPTBigCodeConfig", "GPTBigCodeForCausalLM", {**_GPT2, "multi_query": True}),
    ("gpt_bigcode:mha", "", "", {"multi_query": False}),
    ("opt", "OPTConfig", "OPTForCausalLM", {**_LEARNED, "ffn_dim": 37}),
    ("opt:post-norm", "", "", {"do_layer_norm_before": False, "word_embed_proj_dim": 29}),
    # RoPE
    ("gpt_neox", "GPTNeoXConfig", "GPTNeoXForCausalLM", {**_ROPE, "rope_parameters": _partial(0.4)}),
    ("gpt_neox:sequential", "", "", {"use_parallel_residual": False}),
    ("gptj", "GPTJConfig", "GPTJForCausalLM", {**_GPT2, "n_embd": 60, "rotary_dim": 4}),
    ("llama", "LlamaConfig", "LlamaForCausalLM", _LLAMA),
    ("llama:mqa", "", "", {"num_key_value_heads": 1}),
    ("llama:mha", "", "", {"num_key_value_heads": 6}),
    ("llama:biases", "", "", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 3}),
    ("llama:llama3-rope", "", "", _scaled(_LLAMA3, 16)),
    ("llama:yarn", "", "", _scaled(_YARN, 8)),
    ("llama:tied", "", "", {"tie_word_embeddings": True}),
    ("mistral", "MistralConfig", "MistralForCausalLM", {**_FREE, "sliding_window": WINDOW}),
    ("mistral:full", "", "", {"sliding_window": None}),
    ("mixtral", "MixtralConfig", "MixtralForCausalLM", {**_FREE, **_MOE}),
    ("qwen2", "Qwen2Config", "Qwen2ForCausalLM", _GQA),
    ("qwen2:sliding", "", "", {"use_sliding_window": True, **_SLIDING}),
    ("qwen3", "Qwen3Config", "Qwen3ForCausalLM", _FREE),
    ("qwen3:biases", "", "", {"attention_bias": True}),
    (
        "qwen3_moe",
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**_FREE, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 11, "mlp_only_layers": [1]},
    ),
    ("gemma", "GemmaConfig", "GemmaForCausalLM", _FREE),
    (
        "gemma2",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **_LLAMA,
            **_SLIDING,
            "query_pre_attn_scalar": 7,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    ("gemma3_text", "Gemma3TextConfig", "Gemma3ForCausalLM", {**_LLAMA, **_SLIDING, "query_pre_attn_scalar": 7}),
    ("phi", "PhiConfig", "PhiForCausalLM", {**_GQA, "rope_parameters": _partial(0.4)}),
    ("phi:qk-norm", "", "", {"qk_layernorm": True}),
    ("phi3", "Phi3Config", "Phi3ForCausalLM", {**_GQA, "original_max_position_embeddings": 31}),
    ("phi3:partial-sliding", "", "", {"sliding_window": WINDOW, "rope_parameters": _partial(0.8)}),
    ("olmo", "OlmoConfig", "OlmoForCausalLM", _GQA),
    ("olmo:clip-qkv", "", "", {"clip_qkv": 1.1}),
    ("olmo2", "Olmo2Config", "Olmo2ForCausalLM", _GQA),
    (
        "granite",
        "GraniteConfig",
        "GraniteForCausalLM",
        {**_GQA, "embedding_multiplier": 3.0, "logits_scaling": 1.7}
        | {"residual_multiplier": 0.23, "attention_multiplier": 0.41},
    ),
    ("cohere", "CohereConfig", "CohereForCausalLM", {**_GQA, "logit_scale": 0.3}),
    ("cohere:qk-norm", "", "", {"use_qk_norm": True}),
    ("cohere2", "Cohere2Config", "Cohere2ForCausalLM", {**_GQA, **_SLIDING, "logit_scale": 0.3}),
    ("stablelm", "StableLmConfig", "StableLmForCausalLM", {**_GQA, "rope_parameters": _partial(0.4)}),
    ("stablelm:biases", "", "", {"use_qkv_bias": True}),
    ("stablelm:parallel", "", "", {"use_parallel_residual": True}),
    ("stablelm:qk-norm", "", "", {"qk_layernorm": True}),
    ("stablelm:12-heads", "", "", {"qk_layernorm": True, "num_attention_heads": 12, "num_key_value_heads": 12}),
    ("starcoder2", "Starcoder2Config", "Starcoder2ForCausalLM", {**_GQA, "sliding_window": WINDOW}),
    ("smollm3", "SmolLM3Config", "SmolLM3ForCausalLM", {**_GQA, "no_rope_layers": [1, 0, 1]}),
    ("nemotron", "NemotronConfig", "NemotronForCausalLM", {**_FREE, "rope_parameters": _partial(0.4)}),
    (
        "gpt_oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        {**_FREE, **_SLIDING, **_MOE, **_scaled({**_YARN, "truncate": False}, 8)},
    ),
    # trained by rheoscope itself
    ("rheoscope_decoder", "RheoscopeConfig", "RheoscopeForCausalLM", _BERT),  # other kinds: tests/nets/models.py
    ("rheoscope_decoder:rotary", "", "", {"positions": "rotary", "hidden_size": 60}),
    ("rheoscope_decoder:morlet", "", "", {"positions": "morlet"}),
    # encoders
    ("bert", "BertConfig", "BertForMaskedLM", _BERT),
    ("bert:decoder", "", "BertLMHeadModel", {"is_decoder": True}),
    ("roberta", "RobertaConfig", "RobertaForMaskedLM", {**_BERT, "pad_token_id": 1, "bos_token_id": 0}),
    (
        "distilbert",
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {**_COMMON, "n_layers": 3, "n_heads": 6, "dim": 42, "hidden_dim": 37, "max_position_embeddings": 31},
    ),
    ("modernbert", "ModernBertConfig", "ModernBertForMaskedLM", {**_ROPE, **_SLIDING, "sliding_window": 3, **_MARKS}),
    ("modernbert:biases", "", "", {"attention_bias": True, "mlp_bias": True, "norm_bias": True}),
    # refused
    ("bloom", "BloomConfig", "BloomForCausalLM", {**_COMMON, "n_layer": 3, "n_head": 6, "hidden_size": 42}),
    ("mpt", "MptConfig", "MptForCausalLM", {**_COMMON, "n_layers": 3, "n_heads": 6, "d_model": 42, "max_seq_len": 31}),
    ("falcon", "FalconConfig", "FalconForCausalLM", {**_ROPE, "ffn_hidden_size": 37}),
    (
        "gpt_neo",
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {**_COMMON, "num_layers": 3, "num_heads": 6, "hidden_size": 42, "intermediate_size": 37}
        | {
            "max_position_embeddings": 31,
            "attention_types": [[["global", "local", "global"], 1]],
            "window_size": WINDOW,
        },
    ),
    (
        "t5",
        "T5Config",
        "T5ForConditionalGeneration",
        {**_COMMON, "num_layers": 3, "num_heads": 6, "d_model": 43, "d_kv": 7, "d_ff": 37, "decoder_start_token_id": 0},
    ),
    (
        "mamba",
        "MambaConfig",
        "MambaForCausalLM",
        {**_COMMON, "num_hidden_layers": 3, "hidden_size": 42, "state_size": 5},
    ),
    (
        "jamba",
        "JambaConfig",
        "JambaForCausalLM",
        {**_GQA, "num_experts": 5, "attn_layer_period": 3, "attn_layer_offset": 1, "mamba_d_state": 5},
    ),
    ("deepseek_v2", "DeepseekV2Config", "DeepseekV2ForCausalLM", {**_MLA, "n_routed_experts": 5}),
    (
        "deepseek_v3",
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**_MLA, "n_routed_experts": 4, "n_group": 2, "topk_group": 1},
    ),
]
_NO_SDPA = {"gemma2", "gpt_oss"}
_NOT_CAUSAL = {"bert", "roberta", "distilbert", "modernbert", "modernbert:biases"}


def _named(name: str) -> Any:
    """A class of transformers, or of the networks that rheoscope trains."""
    return getattr(nets if hasattr(nets, name) else transformers, name)


def _variants() -> dict[str, Variant]:
    """The table above, each row on top of the first row of its family."""
    first: dict[str, Variant] = {}
    variants = {}
    for name, config, model, kwargs in _LINES:
        family = name.partition(":")[0]
        parent = first.get(family)
        if parent is not None:
            config, model, kwargs = config or parent.config, model or parent.model, {**parent.kwargs, **kwargs}
        variants[name] = Variant(
            family,
            config,
            model,
            kwargs,
            sdpa=family not in _NO_SDPA,
            causal=name not in _NOT_CAUSAL,
            refused=_REFUSED.get(family, ""),
        )
        first.setdefault(family, variants[name])
    return variants


ALL = _variants()
VARIANTS = {name: variant for name, variant in ALL.items() if not variant.refused}  # what rheoscope reads
REFUSED = {name: variant for name, variant in ALL.items() if variant.refused}
FAMILIES = tuple(dict.fromkeys(variant.family for variant in VARIANTS.values()))
CAUSAL = tuple(name for name, variant in VARIANTS.items() if variant.causal)


def tiny(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.float64, bare: bool = False, **overrides: Any
) -> PreTrainedModel:
    """A tiny random model of the named family or variant, in evaluation mode with eager attention.

    `overrides` go to the config. `bare` builds the model without its head, as AutoModel would.
    """
    variant = ALL[name]
    config = _named(variant.config)(**{**variant.kwargs, **overrides})
    config._experts_implementation = "eager"  # the default, grouped_mm, takes no float64
    builder = AutoModel.from_config if bare else _named(variant.model)._from_config
    with torch.random.fork_rng(devices=[]):
        model = builder(config, attn_implementation="eager")
    perturb(model, seed=seed)
    return model.to(dtype).eval()


@torch.no_grad()
def perturb(model: nn.Module, *, seed: int = 0) -> None:
    """Draws every parameter anew: matrices so that sizes are kept, gains and biases about their fresh value."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
        if id(parameter) in embeddings:
            parameter.copy_(0.5 * noise)
        elif parameter.max() == parameter.min():  # a fresh gain, bias or sink
            parameter.add_(0.3 * noise)
        else:
            parameter.copy_(1.4 * noise / prod(parameter.shape[-2:]) ** 0.25)


def input_ids(
    model: PreTrainedModel, *, batch: int = 2, length: int = LENGTH, seed: int = 0
) -> Int[Tensor, "batch token"]:
    """Random token ids, special tokens left out."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, model.config.vocab_size, (batch, length), generator=generator).to(model.device)
