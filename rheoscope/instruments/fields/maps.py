"""The maps of one layer and of each of its heads, without the probabilities of all heads at once."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from rheoscope.models.attention import MEAN_BLOCK, Attention


def maps_of_heads(attention: Attention) -> Float[Tensor, "field window query key"]:
    """The maps of every window averaged over heads, then those of every head; float32 or better."""
    n_windows, n_heads, n_query, _ = attention.q.shape
    wide = torch.promote_types(attention.q.dtype, torch.float32)
    maps = attention.q.new_zeros(1 + n_heads, n_windows, n_query, attention.k.shape[2], dtype=wide)
    for queries, block in attention.blocks(MEAN_BLOCK):
        probs = block.probs
        keys = slice(probs.shape[-1])
        maps[0, :, queries, keys] = probs.mean(1, dtype=wide)
        maps[1:, :, queries, keys] = probs.transpose(0, 1)
    return maps
