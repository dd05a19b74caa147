"""The blocks of the decoder: attention and feed-forward network, each added to the residual stream."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from rheoscope.nets.config import RheoscopeConfig
from rheoscope.nets.kinds import ATTENTION, ResidualLinear, Rotation


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

    def forward(
        self,
        hidden_states: Float[Tensor, "batch query d_model"],
        *,
        rotations: Mapping[int, Rotation],
        **kwargs: object,
    ) -> Float[Tensor, "batch query d_model"]:
        rotation = rotations.get(self.self_attn.head_dim)
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), rotation=rotation, **kwargs)
        hidden_states = hidden_states + self.dropout(attended)
        return hidden_states + self.dropout(self.mlp(self.post_attention_layernorm(hidden_states)))
