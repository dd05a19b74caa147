"""The blocks of the decoder: one attention module per kind, the feed-forward network, the two residual additions.

Kinds that end in a softmax hand query, key, value, scale, mask and, as `position_bias`, what is added to the scores to
transformers' attention interface, so any attention function registered there sees what the model uses. With "sdpa"
S-D and energy-gated layers take their own fused call instead of an L x L bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers import Cache
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention import (
    diagonal_bias,
    eager_attention,
    key_biased_attention,
    lagged_keys,
    sd_attention,
    skew_pair,
)
from .config import RheoscopeConfig
from .gates import log_gate
from .linear import elu_attention, sd_linear_attention
from .positions import rotated, rotation
from .states import linear_state, remember_state

N_LAGS = 5  # keys averaged by the lag convolution, as published


@dataclass(frozen=True)
class Call:
    """What one attention call is given."""

    hidden: Float[Tensor, "batch query d_model"]
    q: Float[Tensor, "batch head query d_head"]
    k: Float[Tensor, "batch head query d_head"]
    v: Float[Tensor, "batch head query d_head"]
    mask: Tensor | None  # in the form of the attention function in use; None: causal, nothing padded
    valid: Bool[Tensor, "batch key"] | None  # False at padded keys, those in the cache included
    cache: Cache | None


Mixed = tuple[Float[Tensor, "batch query head d_head"], Tensor | None]  # z, and the probabilities where formed


class ResidualLinear(nn.Linear):
    """A projection that writes to the residual stream. It starts smaller than the others."""


class SelfAttention(nn.Module):
    """softmax(q·k / sqrt(d_head)) v: the standard kind, and what the other kinds share."""

    is_causal = True
    num_key_value_groups = 1

    def __init__(self, config: RheoscopeConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.kind = config.attention[layer_idx]
        self.n_heads, self.head_dim = config.num_attention_heads, config.head_dims[layer_idx]
        self.scaling = self.head_dim**-0.5
        inner = self.n_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.o_proj = ResidualLinear(inner, config.hidden_size, bias=False)

    def forward(
        self,
        hidden_states: Float[Tensor, "batch query d_model"],
        *,
        position_ids: Int[Tensor, "batch query"],
        attention_mask: Tensor | None = None,
        valid: Bool[Tensor, "batch key"] | None = None,
        cache: Cache | None = None,
        **_: object,
    ) -> tuple[Float[Tensor, "batch query d_model"], Tensor | None]:
        """What the layer adds to the residual stream, and the attention probabilities where they were formed."""
        q, k, v = (self._heads(linear(hidden_states)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        if self.config.positions == "rotary":
            cos, sin = rotation(position_ids, self.head_dim, self.config.rope_theta)
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        z, probs = self.attend(Call(hidden_states, q, k, v, attention_mask, valid, cache))
        return self.o_proj(z.flatten(2)), probs

    def attend(self, call: Call) -> Mixed:
        """What the heads hand to W_O."""
        k, v = self.remembered(call, call.k)
        return self.interface(call, call.q, k, v)

    def remembered(self, call: Call, key: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, in the form this kind keeps them, and values of all tokens so far."""
        return (key, call.v) if call.cache is None else call.cache.update(key, call.v, self.layer_idx)

    def interface(self, call: Call, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Mixed:
        """The attention function that the configuration names, called as transformers calls it."""
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        extra = {} if bias is None else {"position_bias": bias}
        return function(self, query, key, value, call.mask, dropout=0.0, scaling=self.scaling, **extra)

    def may_fuse(self, call: Call) -> bool:
        """Whether the kind's own fused call serves: the mask is a plain one, and nobody asked for another function."""
        return self.config._attn_implementation == "sdpa" and (call.mask is None or call.mask.dtype == torch.bool)

    def _heads(self, x: Float[Tensor, "batch query inner"]) -> Float[Tensor, "batch head query d_head"]:
        return rearrange(x, "batch query (head d) -> batch head query d", head=self.n_heads)


class Damped(SelfAttention):
    """Attention with a damping of its own for every head and token."""

    def __init__(self, config: RheoscopeConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.damping = nn.Linear(config.hidden_size, self.n_heads)

    def damping_of(self, hidden: Float[Tensor, "batch query d_model"]) -> Float[Tensor, "batch head query"]:
        """d_i = softplus(w·h_i + c), at least 0; h_i is the input of the attention module."""
        return softplus(self.damping(hidden)).mT


class SkewAttention(Damped):
    """softmax(S - D) v. The cache holds b = [k; -q], as a later query needs both."""

    def attend(self, call: Call) -> Mixed:
        damping = self.damping_of(call.hidden)
        if call.cache is None and self.may_fuse(call):
            return self._fused(call, damping, None)
        a, b = skew_pair(call.q, call.k)
        b, v = self.remembered(call, b)
        if self.may_fuse(call):
            n_past = b.shape[2] - a.shape[2]
            return self._fused(call, damping, (b[:, :, :n_past], v[:, :, :n_past]) if n_past else None)
        return self.interface(call, a, b, v, diagonal_bias(damping, b.shape[2]))

    def _fused(self, call: Call, damping: Tensor, past: tuple[Tensor, Tensor] | None) -> Mixed:
        z = sd_attention(call.q, call.k, call.v, damping, mask=call.mask, scale=self.scaling, past=past)
        return z.transpose(1, 2), None


class EnergyGatedAttention(SelfAttention):
    """Attention probabilities times a gate on each key, renormalised. The cache holds each key's energy beside it.

    The energy is w·x + b in the source; standardising removes b, so it is left out here.
    """

    def __init__(self, config: RheoscopeConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.energy = nn.Linear(config.hidden_size, self.n_heads, bias=False)
        self.gate_slope = nn.Parameter(torch.empty(self.n_heads))
        self.gate_threshold = nn.Parameter(torch.empty(self.n_heads))

    def attend(self, call: Call) -> Mixed:
        energy = self.energy(call.hidden).mT[..., None].to(call.k.dtype)
        kept, v = self.remembered(call, torch.cat([call.k, energy], -1))
        k, energy = kept[..., :-1], kept[..., -1]
        causal = self.kind == "ega"
        bias = log_gate(energy, self.gate_slope, self.gate_threshold, valid=call.valid, causal=causal)
        if self.may_fuse(call):
            z = key_biased_attention(call.q, k, v, bias, mask=call.mask, scale=self.scaling)
            return z.transpose(1, 2), None
        return self.interface(call, call.q, k, v, bias[:, :, None].expand(-1, -1, call.q.shape[2], -1))


class LagConvolution(SelfAttention):
    """Scores averaged over a key and the four before it, with learned weights."""

    def __init__(self, config: RheoscopeConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.lag_logits = nn.Parameter(torch.empty(self.n_heads, N_LAGS))

    def attend(self, call: Call) -> Mixed:
        k, v = self.remembered(call, call.k)
        return self.interface(call, call.q, lagged_keys(k, self.lag_logits.softmax(-1), call.valid), v)


class LinearAttention(SelfAttention):
    """Features elu + 1 on q and k ("elu") or on [q; k] and [k; -q] ("sd_elu"). The cache holds a state and a count."""

    def attend(self, call: Call) -> Mixed:
        n_query = call.q.shape[2]
        here = None if call.valid is None else call.valid[:, -n_query:]
        state, seen = linear_state(call.cache, self.layer_idx, like=call.hidden)
        z, state = self.mix(call, here, state, seen)
        if call.cache is not None:
            count = torch.full_like(seen, n_query) if here is None else here.sum(-1, keepdim=True)
            remember_state(call.cache, self.layer_idx, state, seen + count)
        return z.transpose(1, 2), None

    def mix(self, call: Call, valid: Tensor | None, state: Tensor | None, _seen: Tensor) -> tuple[Tensor, Tensor]:
        """z [batch head query d_head] and the new state."""
        a, b = skew_pair(call.q, call.k) if self.kind == "sd_elu" else (call.q, call.k)
        return elu_attention(a, b, call.v, valid=valid, state=state)


class SkewLinearAttention(LinearAttention, Damped):
    """(sum over j < i of S_ij v_j - d_i v_i) / sqrt(i)."""

    def mix(self, call: Call, valid: Tensor | None, state: Tensor | None, seen: Tensor) -> tuple[Tensor, Tensor]:
        a, b = skew_pair(call.q, call.k)
        damping = self.damping_of(call.hidden)
        return sd_linear_attention(a, b, call.v, damping, scale=self.scaling, valid=valid, state=state, seen=seen)


ATTENTION = {
    "softmax": SelfAttention,
    "sd": SkewAttention,
    "sd_linear": SkewLinearAttention,
    "elu": LinearAttention,
    "sd_elu": LinearAttention,
    "ega": EnergyGatedAttention,
    "ega_published": EnergyGatedAttention,
    "lag_conv": LagConvolution,
}


class FeedForward(nn.Module):
    """W_down act(W_up x)."""

    def __init__(self, config: RheoscopeConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = ResidualLinear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, x: Float[Tensor, "batch query d_model"]) -> Float[Tensor, "batch query d_model"]:
        return self.down_proj(self.act(self.up_proj(x)))


def norm_of(config: RheoscopeConfig) -> nn.Module:
    """A LayerNorm, or nothing where the configuration has no norms."""
    return nn.LayerNorm(config.hidden_size, config.layer_norm_eps) if config.use_norm else nn.Identity()


class DecoderLayer(GradientCheckpointingLayer):
    """Attention and feed-forward network, each added to the residual stream after its norm."""

    def __init__(self, config: RheoscopeConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = norm_of(config)
        self.self_attn = ATTENTION[config.attention[layer_idx]](config, layer_idx)
        self.post_attention_layernorm = norm_of(config)
        self.mlp = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden_states: Float[Tensor, "batch query d_model"], **kwargs: object) -> Tensor:
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.dropout(attended)
        return hidden_states + self.dropout(self.mlp(self.post_attention_layernorm(hidden_states)))
