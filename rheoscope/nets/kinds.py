"""One attention module per kind: projections, what is cached, and the call of the attention function.

Kinds that end in a softmax hand query, key, value, scale, mask and, as `position_bias`, what is added to the scores to
transformers' attention interface, so any attention function registered there sees what the model uses. With "sdpa"
S-D and energy-gated layers take their own fused call instead of an L x L bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rheoscope.nets.attention import (
    diagonal_bias,
    eager_attention,
    key_biased_attention,
    lagged_keys,
    sd_attention,
    skew_pair,
)
from rheoscope.nets.config import RheoscopeConfig
from rheoscope.nets.gates import log_gate
from rheoscope.nets.linear import elu_attention, sd_linear_attention
from rheoscope.nets.positions import rotated
from rheoscope.nets.states import linear_state, remember_state

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


# cosines and sines of the rotary angles of every token
Rotation = tuple[Float[Tensor, "batch query d_head"], Float[Tensor, "batch query d_head"]]
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
        rotation: Rotation | None = None,
        attention_mask: Tensor | None = None,
        valid: Bool[Tensor, "batch key"] | None = None,
        cache: Cache | None = None,
        **_: object,
    ) -> tuple[Float[Tensor, "batch query d_model"], Tensor | None]:
        """What the layer adds to the residual stream, and the attention probabilities where they were formed."""
        q, k = self.query_and_key(hidden_states, rotation)
        v = self._heads(self.v_proj(hidden_states))
        z, probs = self.attend(Call(hidden_states, q, k, v, attention_mask, valid, cache))
        return self.o_proj(z.flatten(2)), probs

    def query_and_key(
        self, hidden: Float[Tensor, "batch query d_model"], rotation: Rotation | None
    ) -> tuple[Float[Tensor, "batch head query d_head"], Float[Tensor, "batch head query d_head"]]:
        """q and k after rotary positions, for the input of the attention module."""
        q, k = self._heads(self.q_proj(hidden)), self._heads(self.k_proj(hidden))
        return (q, k) if rotation is None else (rotated(q, *rotation), rotated(k, *rotation))

    def routing_vectors(
        self, hidden: Float[Tensor, "batch query d_model"], rotation: Rotation | None
    ) -> tuple[Float[Tensor, "batch head query d_head"], Float[Tensor, "batch head query d_head"], float]:
        """q, k and a scale: the layer routes by the skew part of scale q·k."""
        return *self.query_and_key(hidden, rotation), self.scaling

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


class Skew(SelfAttention):
    """What kinds with scores (q_i·k_j - k_i·q_j) / sqrt(d_head) share."""

    def routing_vectors(
        self, hidden: Float[Tensor, "batch query d_model"], rotation: Rotation | None
    ) -> tuple[Float[Tensor, "batch head query d_head"], Float[Tensor, "batch head query d_head"], float]:
        """q, k and twice the scale, as the skew part is half the difference."""
        return *self.query_and_key(hidden, rotation), 2 * self.scaling


class Damped(Skew):
    """Skew attention with a damping of its own for every head and token."""

    def __init__(self, config: RheoscopeConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.damping = nn.Linear(config.hidden_size, self.n_heads)

    def damping_of(self, hidden: Float[Tensor, "batch query d_model"]) -> Float[Tensor, "batch head query"]:
        """d_i = softplus(w·h_i + c), at least 0; h_i is the input of the attention module."""
        return softplus(self.damping(hidden)).mT

    def generator(
        self, hidden: Float[Tensor, "batch query d_model"], rotation: Rotation | None
    ) -> Float[Tensor, "batch head query query"]:
        """S - D without a mask. Re λ = -v*Dv for its eigenvalues (v of length 1), so none is positive.

        The layer itself uses the causal half: its eigenvalues are the -d_i, but it is far from normal, so they bound
        nothing, and it may amplify. The theorem says nothing of softmax, V, W_O or the layers that follow either.
        """
        a, b = skew_pair(*self.query_and_key(hidden, rotation))
        return self.scaling * a @ b.mT + diagonal_bias(self.damping_of(hidden), a.shape[2])


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

    @property
    def uses_future(self) -> bool:
        """Whether later tokens move the gates of earlier ones."""
        return self.kind == "ega_published"

    def attend(self, call: Call) -> Mixed:
        energy = self.energy(call.hidden).mT[..., None].to(call.k.dtype)
        kept, v = self.remembered(call, torch.cat([call.k, energy], -1))
        k, energy = kept[..., :-1], kept[..., -1]
        causal = not self.uses_future
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

    def routing_vectors(
        self, hidden: Float[Tensor, "batch query d_model"], rotation: Rotation | None
    ) -> tuple[Float[Tensor, "batch head query d_head"], Float[Tensor, "batch head query d_head"], float]:
        """q, the averaged keys and the scale."""
        q, k = self.query_and_key(hidden, rotation)
        return q, lagged_keys(k, self.lag_logits.softmax(-1), None), self.scaling

    def attend(self, call: Call) -> Mixed:
        k, v = self.remembered(call, call.k)
        return self.interface(call, call.q, lagged_keys(k, self.lag_logits.softmax(-1), call.valid), v)


class LinearAttention(SelfAttention):
    """Features elu + 1 on q and k. The cache holds a state and a count.

    There is no softmax, so an attention function is called only if it has the attribute `takes_mixing`: it is then
    given query, key and value as ever, and `mixing`, a function of the three that returns z, to call in place of a
    softmax.
    """

    def attend(self, call: Call) -> Mixed:
        a, b = self.pair(call)
        function = ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation)
        if not getattr(function, "takes_mixing", False):
            return self._mixed(call, a, b, call.v).transpose(1, 2), None
        extra = {"mixing": partial(self._mixed, call), "position_bias": self.bias_of(call)}
        return function(self, a, b, call.v, call.mask, dropout=0.0, scaling=self.scaling, **extra)

    def pair(self, call: Call) -> tuple[Tensor, Tensor]:
        """What stands in the places of query and key."""
        return call.q, call.k

    def bias_of(self, _call: Call) -> Tensor | None:
        """What is added to the scores."""
        return None

    def mix(self, call: Call, abv: tuple[Tensor, Tensor, Tensor], **past: Tensor | None) -> tuple[Tensor, Tensor]:
        """z [batch head query d_head] and the new state."""
        del call, past["seen"]
        return elu_attention(*abv, **past)

    def _mixed(self, call: Call, a: Tensor, b: Tensor, value: Tensor) -> Float[Tensor, "batch head query d_head"]:
        n_query = a.shape[2]
        here = None if call.valid is None else call.valid[:, -n_query:]
        state, seen = linear_state(call.cache, self.layer_idx, like=call.hidden)
        z, state = self.mix(call, (a, b, value), valid=here, state=state, seen=seen)
        if call.cache is not None:
            count = torch.full_like(seen, n_query) if here is None else here.sum(-1, keepdim=True)
            remember_state(call.cache, self.layer_idx, state, seen + count)
        return z


class SkewFeatureAttention(LinearAttention, Skew):
    """Features elu + 1 on a = [q; k] and b = [k; -q]."""

    def pair(self, call: Call) -> tuple[Tensor, Tensor]:
        return skew_pair(call.q, call.k)


class SkewLinearAttention(SkewFeatureAttention, Damped):
    """(sum over j < i of S_ij v_j - d_i v_i) / sqrt(i)."""

    def bias_of(self, call: Call) -> Tensor:
        return diagonal_bias(self.damping_of(call.hidden), call.q.shape[2])

    def mix(self, call: Call, abv: tuple[Tensor, Tensor, Tensor], **past: Tensor | None) -> tuple[Tensor, Tensor]:
        return sd_linear_attention(*abv, self.damping_of(call.hidden), scale=self.scaling, **past)


ATTENTION = {
    "softmax": SelfAttention,
    "sd": SkewAttention,
    "sd_linear": SkewLinearAttention,
    "elu": LinearAttention,
    "sd_elu": SkewFeatureAttention,
    "ega": EnergyGatedAttention,
    "ega_published": EnergyGatedAttention,
    "lag_conv": LagConvolution,
}
