"""Attention with only the largest weights of each row: how much of the output they carry."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from rheoscope.models.attention import Attention
from rheoscope.models.view import ModelView


def strongest(probs: Float[Tensor, "*shape query key"], k: int) -> Float[Tensor, "*shape query key"]:
    """Attention probabilities with only the k largest of every row, scaled to the row's former sum.

    That sum is 1, less what a learned sink takes; rows that see at most k keys stay as they are.
    """
    if k >= probs.shape[-1]:
        return probs
    kept = torch.zeros_like(probs)
    top = probs.topk(k, dim=-1)
    kept.scatter_(-1, top.indices, top.values)
    total, of_kept = probs.sum(-1, keepdim=True), top.values.sum(-1, keepdim=True)
    gain = torch.where(of_kept > 0, total / of_kept, 1.0)
    whole = (probs > 0).sum(-1, keepdim=True) <= k
    return torch.where(whole, probs, kept * gain)


def strongest_cosine(
    view: ModelView, layer: int, attention: Attention, *, k: int, every: int = 1
) -> Float[Tensor, "window position"]:
    """Cosine of what attention writes with its k largest weights per row and with all, after W_O, before post-norms.

    At every so-manieth position, from the first.
    """
    mixtures: tuple[list[Tensor], list[Tensor]] = [], []
    for _, block in attention.blocks(every=every):
        values = block.v.repeat_interleave(block.n_rep, 1)
        for mixture, probs in zip(mixtures, (strongest(block.probs, k), block.probs), strict=True):
            mixture.append(probs @ values)
    output = view.part(layer, view.family.o).forward
    heads = (torch.cat(mixture, 2).to(attention.v.dtype) for mixture in mixtures)  # as W_O takes them
    written = [output(z.transpose(1, 2).flatten(2)) for z in heads]
    return torch.cosine_similarity(*written, dim=-1)
