"""One row per model family: where it keeps its parts. Pure data.

Paths are attribute paths: `blocks`, `embed`, `final_norm` and `rotary` from the base model, all others from a block.
A `When` names a configuration flag on which a choice hangs. A family that needs a new kind of fact gets a new field,
never an `isinstance` elsewhere. docs/families.md says how to add a row.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum


class Packing(Enum):
    """How one fused projection holds query, key and value rows."""

    SEPARATE = "three modules"
    BLOCKS = "all queries, then all keys, then all values"
    PER_HEAD = "query, key and value of head 0, then of head 1, …"


class Rope(Enum):
    """Which pairs of coordinates a rotary embedding turns."""

    NONE = "no rotary embedding"
    HALVES = "coordinate i with i + d/2"
    INTERLEAVED = "coordinate 2i with 2i + 1"


class Residual(Enum):
    """How attention and feed-forward network join the residual stream."""

    SEQUENTIAL = "the feed-forward network reads what attention has written"
    PARALLEL = "both read resid_pre"
    POST_NORM = "a norm on the stream itself after each addition"


@dataclass(frozen=True)
class When:
    """`yes` where the configuration's flag is true, else `no`."""

    flag: str
    yes: object
    no: object


@dataclass(frozen=True)
class Family:
    """Where a family keeps its parts. `None`: it has no such part."""

    blocks: str = "layers"
    embed: str = "embed_tokens"
    final_norm: str | When | None = "norm"
    # attention
    attn: str = "self_attn"  # the module that calls the attention interface
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str | None = None
    packing: Packing | When = Packing.SEPARATE
    o: str = "self_attn.o_proj"
    transposed: bool = False  # weights stored [in, out], as GPT-2's Conv1D does
    prescaled: bool = False  # queries are multiplied by the module's `scaling` before the interface, which is given 1
    q_norm: str | When | None = None
    k_norm: str | When | None = None
    norm_joint: bool = False  # QK-norm over all heads at once, before they are split
    norm_head_first: bool = False  # QK-norm is given [batch head position d_head]
    clip: str | None = None  # configuration value that bounds q, k and v
    counts_in_config: bool = False  # the attention module looks up its number of heads in the configuration
    # position
    rotary: str = "rotary_emb"
    rope: Rope = Rope.HALVES
    rope_if: str | None = None  # attribute of the attention module; a layer where it is false or None has no RoPE
    sine_first: bool = False  # the rotary module returns sin, cos
    half_tables: bool = False  # and one angle per pair instead of one per coordinate
    # attention other than softmax(q·k)
    damped_if: str | None = None  # attribute of the attention module; a layer that has it hands on [q; k], [k; -q], -D
    averaged_if: str | None = None  # the same; its keys are averages over places, not made of each token alone
    leaks_if: str | None = None  # the same, if true; later tokens act on earlier ones past the mask
    # feed-forward network: modules applied one after the other
    ffn: tuple[str, ...] = ("mlp",)
    # the stream
    residual: Residual | When = Residual.SEQUENTIAL
    norm_attn: str | When | None = "input_layernorm"
    norm_ffn: str | When | None = "post_attention_layernorm"
    attn_term: str | None = None  # module whose output is added for attention, where it is not `attn`
    ffn_term: str | None = None  # the same for the feed-forward network, where it is not the last of `ffn`
    mid_output: str | When | None = None  # module whose output is resid_mid, where it is no module's input
    multiplier: str | None = None  # configuration value that scales both terms
    unit_offset: bool = False  # norm gain is 1 + weight

    def resolved(self, config: object) -> Family:
        """The row with every `When` decided by a model's configuration."""
        chosen = {}
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, When):
                chosen[part.name] = value.yes if getattr(config, value.flag) else value.no
        return replace(self, **chosen)


def _attention(module: str, q: str, k: str, v: str, o: str) -> dict[str, str]:
    """Paths of an attention module and its projections."""
    return {"attn": module, "q": f"{module}.{q}", "k": f"{module}.{k}", "v": f"{module}.{v}", "o": f"{module}.{o}"}


_LLAMA = Family()
_QK_NORM = replace(_LLAMA, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
_GEMMA = replace(_LLAMA, unit_offset=True)
_SANDWICH = replace(
    _GEMMA,
    norm_ffn="pre_feedforward_layernorm",
    attn_term="post_attention_layernorm",
    ffn_term="post_feedforward_layernorm",
)
_GPT2 = Family(
    blocks="h",
    embed="wte",
    final_norm="ln_f",
    attn="attn",
    qkv="attn.c_attn",
    packing=Packing.BLOCKS,
    o="attn.c_proj",
    transposed=True,
    rope=Rope.NONE,
    norm_attn="ln_1",
    norm_ffn="ln_2",
)
_COHERE2 = replace(
    _LLAMA,
    rope=Rope.INTERLEAVED,
    rope_if="sliding_window",
    residual=Residual.PARALLEL,
    norm_ffn="input_layernorm",
)
_BERT = Family(
    blocks="encoder.layer",
    embed="embeddings.word_embeddings",
    final_norm=None,
    **_attention("attention.self", "query", "key", "value", "") | {"o": "attention.output.dense"},
    rope=Rope.NONE,
    ffn=("intermediate", "output.dense"),
    residual=Residual.POST_NORM,
    norm_attn="attention.output.LayerNorm",
    norm_ffn="output.LayerNorm",
    attn_term="attention.output.dense",
    mid_output="attention",
)

FAMILIES: dict[str, Family] = {
    "gpt2": _GPT2,
    "gpt_bigcode": replace(
        _GPT2, transposed=False, packing=When("multi_query", yes=Packing.BLOCKS, no=Packing.PER_HEAD)
    ),
    "gpt_neox": Family(
        embed="embed_in",
        final_norm="final_layer_norm",
        attn="attention",
        qkv="attention.query_key_value",
        packing=Packing.PER_HEAD,
        o="attention.dense",
        residual=When("use_parallel_residual", yes=Residual.PARALLEL, no=Residual.SEQUENTIAL),
    ),
    "gptj": Family(
        blocks="h",
        embed="wte",
        final_norm="ln_f",
        **_attention("attn", "q_proj", "k_proj", "v_proj", "out_proj"),
        rope=Rope.INTERLEAVED,
        sine_first=True,
        half_tables=True,
        residual=Residual.PARALLEL,
        norm_attn="ln_1",
        norm_ffn="ln_1",
    ),
    "opt": Family(
        blocks="decoder.layers",
        embed="decoder.embed_tokens",
        final_norm=When("do_layer_norm_before", yes="decoder.final_layer_norm", no=None),
        **_attention("self_attn", "q_proj", "k_proj", "v_proj", "out_proj"),
        prescaled=True,
        rope=Rope.NONE,
        ffn=("fc1", "activation_fn", "fc2"),
        residual=When("do_layer_norm_before", yes=Residual.SEQUENTIAL, no=Residual.POST_NORM),
        norm_attn="self_attn_layer_norm",
        norm_ffn="final_layer_norm",
        mid_output=When("do_layer_norm_before", yes=None, no="self_attn_layer_norm"),
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _QK_NORM,
    "qwen3_moe": _QK_NORM,
    "gemma": _GEMMA,
    "gemma2": _SANDWICH,
    "gemma3_text": replace(_SANDWICH, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
    "phi": replace(
        _LLAMA,
        final_norm="final_layernorm",
        o="self_attn.dense",
        q_norm=When("qk_layernorm", yes="self_attn.q_layernorm", no=None),
        k_norm=When("qk_layernorm", yes="self_attn.k_layernorm", no=None),
        residual=Residual.PARALLEL,
        norm_ffn="input_layernorm",
    ),
    "phi3": replace(_LLAMA, qkv="self_attn.qkv_proj", packing=Packing.BLOCKS, counts_in_config=True),
    "olmo": replace(_LLAMA, clip="clip_qkv"),
    "olmo2": replace(
        _QK_NORM,
        norm_joint=True,
        norm_attn=None,
        norm_ffn=None,
        attn_term="post_attention_layernorm",
        ffn_term="post_feedforward_layernorm",
    ),
    "granite": replace(_LLAMA, multiplier="residual_multiplier"),
    "cohere": replace(
        _COHERE2,
        rope_if=None,
        q_norm=When("use_qk_norm", yes="self_attn.q_norm", no=None),
        k_norm=When("use_qk_norm", yes="self_attn.k_norm", no=None),
    ),
    "cohere2": _COHERE2,
    "stablelm": replace(
        _LLAMA,
        q_norm=When("qk_layernorm", yes="self_attn.q_layernorm", no=None),
        k_norm=When("qk_layernorm", yes="self_attn.k_layernorm", no=None),
        norm_head_first=True,
        residual=When("use_parallel_residual", yes=Residual.PARALLEL, no=Residual.SEQUENTIAL),
        norm_ffn=When("use_parallel_residual", yes="input_layernorm", no="post_attention_layernorm"),
    ),
    "starcoder2": _LLAMA,
    "smollm3": replace(_LLAMA, rope_if="use_rope"),
    "nemotron": replace(_LLAMA, unit_offset=True),
    "gpt_oss": replace(_LLAMA, half_tables=True),
    "rheoscope_decoder": replace(
        _LLAMA,
        rope=When("uses_rotary", yes=Rope.HALVES, no=Rope.NONE),
        damped_if="damping",
        averaged_if="lag_logits",
        leaks_if="uses_future",
    ),
    "bert": _BERT,
    "roberta": _BERT,
    "distilbert": replace(
        _BERT,
        blocks="transformer.layer",
        **_attention("attention", "q_lin", "k_lin", "v_lin", "out_lin"),
        ffn=("ffn",),
        norm_attn="sa_layer_norm",
        norm_ffn="output_layer_norm",
        attn_term=None,
        mid_output="sa_layer_norm",
    ),
    "modernbert": Family(
        embed="embeddings.tok_embeddings",
        final_norm="final_norm",
        attn="attn",
        qkv="attn.Wqkv",
        packing=Packing.BLOCKS,
        o="attn.Wo",
        norm_attn="attn_norm",
        norm_ffn="mlp_norm",
    ),
}

# Model types that cannot be read, and why. Refused before any weight is loaded.
_INSIDE = "computes attention inside its own module, without transformers' attention interface"
_RECURRENT = "is recurrent and has no attention to read"
REFUSED: dict[str, str] = {
    "bloom": _INSIDE,
    "mpt": _INSIDE,
    "falcon": _INSIDE,
    "gpt_neo": _INSIDE,
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "rwkv": _RECURRENT,
    "jamba": "has recurrent layers between those with attention, and what they do to the stream is not handled",
}

# Configuration values, true or set, that mark a whole kind of model as one that cannot be read.
REFUSED_KINDS: dict[str, str] = {
    "is_encoder_decoder": "is an encoder-decoder, with two streams of layers",
    "kv_lora_rank": "has multi-head latent attention, whose keys and values are of different widths",
}
