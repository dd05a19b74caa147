"""A tiny Llama written as a GGUF file, the way llama.cpp's converter does it."""

from pathlib import Path

import gguf
import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_llama(model: PreTrainedModel, path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """`path`: matrices of a Llama as `kind`, everything else in float32, a byte-level vocabulary beside it."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_vocabulary(writer, config.vocab_size)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = _as_llama_cpp(name, parameter, config).float().numpy()
        if values.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            packed = gguf.quantize(values, kind)
            writer.add_tensor(_name(name), packed, raw_shape=packed.shape, raw_dtype=kind)
        else:
            writer.add_tensor(_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    letters = [chr(ord("a") + i) for i in range(26)]
    writer.add_token_list(["<pad>", "<s>", "</s>", *letters, "ab", *(f"<{i}>" for i in range(size - 30))])
    writer.add_token_types([3, 3, 3, *[1] * (size - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)


def _name(name: str) -> str:
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in whole | {"lm_head.weight": "output.weight"}:
        return (whole | {"lm_head.weight": "output.weight"})[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def _as_llama_cpp(name: str, weight: Tensor, config) -> Tensor:
    """llama.cpp turns neighbouring coordinates, so its rows of W_Q and W_K are interleaved."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, n_heads in heads.items():
        if part in name:
            return weight.reshape(n_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
    return weight
