"""W_QK = W_Q R_lag W_K^T of eight families, read off transformers' modules by hand, dense and d_model x d_model."""

import torch

from tests import naive


def weights_of(family, model, layer):
    """W_Q and W_K [head d_model d_head], keys repeated, with the gains of the norm before them and of a QK-norm."""
    return _READERS[family](model, layer)


def _heads(columns, n_heads):
    """[d_model, n_heads * d_head] → [head d_model d_head], head after head."""
    return torch.stack(columns.chunk(n_heads, 1))


def _folded(Q, K, gain):
    Q, K = ((gain[:, None] * W).detach() for W in (Q, K))
    return Q, naive.repeated(K, len(Q))


def _gpt2(model, layer):
    block = model.transformer.h[layer]
    W = block.attn.c_attn.weight  # Conv1D: [in, out]; all queries, all keys, all values
    return _folded(_heads(W[:, :42], 6), _heads(W[:, 42:84], 6), block.ln_1.weight)


def _gpt_neox(model, layer):
    block = model.gpt_neox.layers[layer]
    heads = block.attention.query_key_value.weight.T.chunk(6, 1)  # each: its query, its key, its value
    Q, K = (torch.stack([head[:, part : part + 10] for head in heads]) for part in (0, 10))
    return _folded(Q, K, block.input_layernorm.weight)


def _bert(model, layer):
    attention = model.bert.encoder.layer[layer].attention.self
    Q, K = (_heads(part.weight.T, 6) for part in (attention.query, attention.key))
    return _folded(Q, K, torch.ones(42))  # the norm stands behind, and feeds the next block


def _modernbert(model, layer):
    block = model.model.layers[layer]
    W = block.attn.Wqkv.weight.T
    gain = torch.ones(60) if layer == 0 else block.attn_norm.weight  # the first block has no norm before attention
    return _folded(_heads(W[:, :60], 6), _heads(W[:, 60:120], 6), gain)


def _llama(model, layer, offset=0.0, qk_norm=False):
    block = model.model.layers[layer]
    attention = block.self_attn
    Q, K = _heads(attention.q_proj.weight.T, 6), _heads(attention.k_proj.weight.T, 2)
    if qk_norm:
        Q, K = Q * attention.q_norm.weight, K * attention.k_norm.weight
    return _folded(Q, K, offset + block.input_layernorm.weight)


_READERS = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "bert": _bert,
    "modernbert": _modernbert,
    "llama": _llama,
    "gpt_oss": _llama,
    "gemma2": lambda model, layer: _llama(model, layer, offset=1.0),
    "qwen3": lambda model, layer: _llama(model, layer, qk_norm=True),
}


def angles_of(family, model, layer):
    """Angle per position of every pair of coordinates (i, i + pairs); none without RoPE."""
    if family in ("gpt2", "bert"):
        return torch.zeros(0)
    rotary = model.base_model.rotary_emb
    if family == "modernbert":
        return getattr(rotary, f"{model.config.layer_types[layer]}_inv_freq")
    return rotary.inv_freq


def rotation(lag, angles, d_head):
    """R_lag with x R turning the first 2 * pairs coordinates, i with i + pairs, and leaving the rest."""
    R = torch.eye(d_head, dtype=torch.float64)
    for a, angle in enumerate(angles.double().tolist()):
        b = a + len(angles)
        turn = torch.tensor(lag * angle, dtype=torch.float64)
        R[a, a] = R[b, b] = turn.cos()
        R[a, b], R[b, a] = turn.sin(), -turn.sin()
    return R


def energies(W_Q, W_K, R):
    """‖skew‖² and ‖·‖² of W_Q R W_K^T per head."""
    kernel = torch.stack([naive.kernel(Q @ R, K) for Q, K in zip(W_Q, W_K, strict=True)])
    return naive.energy(naive.skew(kernel)), naive.energy(kernel)
