"""The maps of one layer that fields are made of, without the maps of all heads at once."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from rheoscope.models.attention import Attention

ROWS = 16  # queries at a time: the maps of a batch of four windows, nine heads and 512 keys then take 1 MB


def field_maps(attention: Attention, n_heads: int = 0) -> Float[Tensor, "field window query key"]:
    """The maps of every window averaged over heads, then those of the first `n_heads` heads; float32 or better."""
    n_windows, _, n_query, _ = attention.q.shape
    wide = torch.promote_types(attention.q.dtype, torch.float32)
    maps = attention.q.new_zeros(1 + n_heads, n_windows, n_query, attention.k.shape[2], dtype=wide)
    for queries, block in attention.blocks(ROWS):
        probs = block.probs
        keys = slice(probs.shape[-1])
        maps[0, :, queries, keys] = probs.mean(1, dtype=wide)
        maps[1:, :, queries, keys] = probs[:, :n_heads].transpose(0, 1)
    return maps
