"""The maps of one layer and of each of its heads, without the probabilities of all heads at once."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from rheoscope.models.attention import MEAN_BLOCK, Attention


def maps_of_heads(attention: Attention) -> Float[Tensor, "field window query key"]:
    """The maps of every window averaged over heads, then those of every head; float32 or better."""
    call = attention.raised()
    n_windows, n_heads, n_query, _ = call.q.shape
    maps = call.q.new_zeros(1 + n_heads, n_windows, n_query, call.k.shape[2])
    for queries, block in call.blocks(MEAN_BLOCK):
        probs = block.probs
        keys = slice(probs.shape[-1])
        maps[0, :, queries, keys] = probs.mean(1)
        maps[1:, :, queries, keys] = probs.transpose(0, 1)
    return maps
