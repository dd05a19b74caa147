"""What a cache keeps of a linear layer: its state, and how many tokens it has seen. Their size does not grow."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import LinearAttentionCacheLayerMixin, StaticLayer

from rheoscope.errors import RheoscopeError

STATE, SEEN = 0, 1  # places of the two tensors in transformers' cache layer


def linear_state(
    cache: Cache | None, layer: int, *, like: Tensor
) -> tuple[Float[Tensor, "batch head d d_value"] | None, Int[Tensor, "batch 1"]]:
    """The layer's state (None before its first token) and the number of tokens in it; batch and device of `like`."""
    if cache is not None:
        kept = cache.layers[layer]
        if kept.is_recurrent_states_initialized[STATE]:
            return kept.recurrent_states[STATE], kept.recurrent_states[SEEN]
    return None, torch.zeros(len(like), 1, dtype=torch.long, device=like.device)


def remember_state(
    cache: Cache, layer: int, state: Float[Tensor, "batch head d d_value"], seen: Int[Tensor, "batch 1"]
) -> None:
    """Put the state and the count after the last token in the cache."""
    cache.update_recurrent_state(state, layer, state_idx=STATE)
    cache.update_recurrent_state(seen, layer, state_idx=SEEN)
    cache.layers[layer].device = state.device  # transformers sets it for convolution states only; beam search reads it


def refuse_foreign(cache: Cache, kinds: list[str], linear: frozenset[str]) -> None:
    """Raise RheoscopeError for a cache whose layers do not fit: one made without the configuration, or a static one."""
    if any(isinstance(layer, StaticLayer) for layer in cache.layers):
        raise RheoscopeError("a static cache was given; this decoder needs one that grows: DynamicCache(config=…)")
    for index, kind in enumerate(kinds):
        kept = cache.layers[index] if index < len(cache.layers) else None
        if kind in linear and not isinstance(kept, LinearAttentionCacheLayerMixin):
            raise RheoscopeError(
                f"the cache has no place for the state of layer {index} ({kind}): make it by "
                "DynamicCache(config=model.config)"
            )


def only_states(cache: Cache) -> bool:
    """Whether the cache keeps no keys in any layer."""
    return bool(cache.layers) and all(cache.is_linear)


def tokens_seen(cache: Cache) -> int | Int[Tensor, "batch 1"]:
    """Tokens before this call; where keys are kept, padding counts too."""
    if not only_states(cache):
        return cache.get_seq_length()
    first = cache.layers[0]
    return first.recurrent_states[SEEN] if first.is_recurrent_states_initialized[SEEN] else 0
