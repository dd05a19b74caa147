"""Attention calls of an edited model: linear layers mix by their features, all others as transformers' SDPA does.

The model names this function as its attention implementation, so every family's own module hands it q, k and v as they
enter the score. A module with an attribute `mixing` is linear.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, StaticLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from rheoscope.errors import RheoscopeError
from rheoscope.models.attention import Attention
from rheoscope.surgery.edited_model import IMPLEMENTATION
from rheoscope.surgery.features import feature_attention, feature_root


class StateLayer(CacheLayerMixin):
    """What a cache keeps of a layer without keys: how many tokens it has seen, and the state of a linear layer."""

    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.state: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """The new keys and values as they are: the past is in the state."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.seen, self.state = 0, None

    def offload(self) -> None:
        self._change(lambda state: state.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Nothing to do: a state goes to its keys' device when it is used."""

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise RheoscopeError(
                f"{abs(tokens_to_remove)} tokens asked to be taken back from a cache that keeps sums, not tokens: "
                "generate without an assistant"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._change(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda state: state.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._change(lambda state: state[indices.to(state.device)])

    def _change(self, function: Any) -> None:
        if self.state is not None:
            self.state = function(self.state)


class Mixing:
    """How a linear layer mixes: its feature map, and the place of its state in the cache of the call under way."""

    def __init__(self, feature: str, *, scaled: bool):
        self.feature, self.scaled = feature, scaled
        self.kept: StateLayer | None = None

    def z(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float) -> Tensor:
        """What the heads hand to W_O, [batch head query d_value]; the state in the cache moves on."""
        kept = self.kept
        state = None if kept is None or kept.state is None else kept.state.to(k.device)
        root = feature_root(self.feature, scale, scaled=self.scaled)
        valid = new_keys(mask, k)
        z, state = feature_attention(q * root, k * root, v, feature=self.feature, valid=valid, state=state)
        if kept is not None:
            kept.state = state
        return z

    def of(self, call: Attention) -> Float[Tensor, "batch head query d_value"]:
        """The same of a tapped call."""
        return self.z(call.q, call.k, call.v, mask=call.mask, scale=call.scale)


def new_keys(mask: Tensor | None, k: Float[Tensor, "batch head new d"]) -> Bool[Tensor, "batch new"] | None:
    """Which of the new keys are no padding: those that their own query may attend to."""
    if mask is None:
        return None
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return allowed[:, 0, :, -k.shape[2] :].diagonal(dim1=-2, dim2=-1).expand(len(k), -1)


def edited_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention call, answered with z as [batch query head d_value]."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mixing: Mixing | None = getattr(module, "mixing", None)
    if mixing is not None:
        z = mixing.z(query, key, value, mask=attention_mask, scale=scale)
        return z.transpose(1, 2).contiguous(), None
    if kwargs.get("softcap") or kwargs.get("s_aux") is not None:
        z = _with_everything(module, (query, key, value), attention_mask, dropout=dropout, scale=scale, **kwargs)
        return z.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)


def _with_everything(
    module: nn.Module, qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, **given: Any
) -> Float[Tensor, "batch head query d_value"]:
    """Attention with a soft-cap or learned sinks, which SDPA does not have."""
    is_causal = given.get("is_causal")
    attention = Attention(
        *qkv,
        scale=given["scale"],
        softcap=given.get("softcap"),
        sinks=given.get("s_aux"),
        causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        mask=mask,
        bias=given.get("position_bias"),
        dropout=given["dropout"],
    )
    return attention.z


def attend_so(model: nn.Module) -> None:
    """Let a model attend by this implementation from now on. The mask goes with it, or causality is lost."""
    AttentionInterface.register(IMPLEMENTATION, edited_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation_internal = IMPLEMENTATION


def fit_cache(cache: Cache, layers: frozenset[int], n_layers: int) -> None:
    """Give a cache a `StateLayer` in the layers that keep no keys. Refuses one that cannot have it."""
    if any(isinstance(layer, StaticLayer) for layer in cache.layers):
        raise RheoscopeError("a static cache was given; an edited model needs one that grows: DynamicCache()")
    while len(cache.layers) < n_layers:
        cache.layers.append(DynamicLayer())
    for index in layers:
        kept = cache.layers[index]
        if isinstance(kept, StateLayer):
            continue
        if kept.get_seq_length():
            raise RheoscopeError(f"the cache holds keys of layer {index}, which keeps none: it is of another model")
        cache.layers[index] = StateLayer()
