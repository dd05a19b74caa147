"""The maps of one layer that fields are made of, without the maps of all heads at once."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from rheoscope.models.attention import Attention

ROWS = 16  # queries at a time: the maps of a batch of four windows, nine heads and 512 keys then take 1 MB


def field_maps(attention: Attention, n_heads: int = 0) -> Float[Tensor, "field window query key"]:
    """The maps of every window averaged over heads, then those of the first `n_heads` heads; float32 or better."""
    if not n_heads and attention.normaliser is not None and attention.mask is None and attention.causal:
        return _from_normaliser(attention)[None]
    n_windows, _, n_query, _ = attention.q.shape
    wide = torch.promote_types(attention.q.dtype, torch.float32)
    maps = attention.q.new_zeros(1 + n_heads, n_windows, n_query, attention.k.shape[2], dtype=wide)
    for queries, block in attention.blocks(ROWS):
        probs = block.probs
        keys = slice(probs.shape[-1])
        maps[0, :, queries, keys] = probs.mean(1, dtype=wide)
        maps[1:, :, queries, keys] = probs[:, :n_heads].transpose(0, 1)
    return maps


def _from_normaliser(attention: Attention) -> Float[Tensor, "window query key"]:
    """Mean over heads of exp(M - L), L the log-sum-exp of each row, which fused attention has left; causal, no mask.

    L is one more column of the queries, against a column of ones: one product gives M - L. Keys ahead of the queries
    are cut off after the mean over heads, which is a ninth of the work for nine heads.
    """
    wide = torch.promote_types(attention.q.dtype, torch.float32)
    k = attention.k.to(wide)
    q = torch.cat([attention.q.to(wide) * attention.scale, -attention.normaliser[..., None].to(wide)], -1)
    n_windows, n_heads, n, width = q.shape
    keys = torch.cat([k, k.new_ones(*k.shape[:3], 1)], -1).flatten(0, 1).mT
    queries = q.reshape(len(keys), -1, n, width)
    maps = q.new_zeros(n_windows, n, n)
    buffer = q.new_empty(n_windows * n_heads * ROWS * n)
    for first in range(0, n, ROWS):
        stop = min(first + ROWS, n)
        rows = queries[:, :, first:stop].flatten(1, 2)
        block = buffer[: rows.shape[0] * rows.shape[1] * stop].view(*rows.shape[:2], stop)
        torch.bmm(rows, keys[:, :, :stop], out=block).exp_()
        maps[:, first:stop, :stop] = block.view(n_windows, n_heads, stop - first, stop).sum(1)
    return maps.tril_().div_(n_heads)
