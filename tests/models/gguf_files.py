"""A tiny Llama written as a GGUF file, the way llama.cpp's converter does it."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from einops import rearrange
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

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


def write_llama(
    model: PreTrainedModel,
    path: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    more: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    drop: str = "",
) -> Path:
    """The path, with a Llama in it: matrices as `kind`, all else in float32; `more` adds to it, `drop` is left out."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_vocabulary(writer, config.vocab_size)
    more(writer)
    for name, parameter in model.state_dict().items():
        if name == drop or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        values = np.ascontiguousarray(_as_llama_cpp(name, parameter, config).float().numpy())
        if values.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            packed = gguf.quantize(values, kind)
            writer.add_tensor(_name(name), packed, raw_shape=packed.shape, raw_dtype=kind)
        else:
            writer.add_tensor(_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rounded(model: PreTrainedModel, kind: gguf.GGMLQuantizationType) -> None:
    """The model's matrices as they come back from `kind`."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            there = _as_llama_cpp(name, parameter.detach(), model.config).contiguous().numpy()
            back = torch.from_numpy(gguf.dequantize(gguf.quantize(there, kind), kind)).reshape(parameter.shape)
            parameter.data.copy_(_from_llama_cpp(name, back, model.config))


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


def _as_llama_cpp(name: str, weight: Tensor, config: PreTrainedConfig) -> Tensor:
    """llama.cpp turns neighbouring coordinates, so its rows of W_Q and W_K are interleaved."""
    n_heads = _heads(name, config)
    return rearrange(weight, "(h two d) m -> (h d two) m", h=n_heads, two=2) if n_heads else weight


def _from_llama_cpp(name: str, weight: Tensor, config: PreTrainedConfig) -> Tensor:
    n_heads = _heads(name, config)
    return rearrange(weight, "(h d two) m -> (h two d) m", h=n_heads, two=2) if n_heads else weight


def _heads(name: str, config: PreTrainedConfig) -> int | None:
    return config.num_attention_heads if "q_proj" in name else config.num_key_value_heads if "k_proj" in name else None
