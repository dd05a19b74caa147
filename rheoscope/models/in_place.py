"""Arithmetic on query-by-key maps in the memory that they have, unless gradients are recorded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass
class Workspace:
    """One buffer for the query-by-key maps of a layer, reused by all layers.

    Large tensors are mapped and page-faulted anew at every allocation; reuse makes eager attention about a third
    faster on a CPU. Never handed out while gradients are recorded.
    """

    buffer: Tensor | None = None

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        size = 1
        for extent in shape:
            size *= extent
        stale = self.buffer is None or self.buffer.dtype != like.dtype or self.buffer.device != like.device
        if stale or self.buffer.numel() < size:
            self.buffer = torch.empty(size, dtype=like.dtype, device=like.device)
        return self.buffer[:size].view(shape)


def capped(scores: Float[Tensor, "*shape"], cap: float) -> Float[Tensor, "*shape"]:
    """cap tanh(scores / cap)."""
    return torch.tanh(scores / cap) * cap if torch.is_grad_enabled() else scores.div_(cap).tanh_().mul_(cap)


def plus(scores: Float[Tensor, "*shape"], added: Float[Tensor, "*#shape"]) -> Float[Tensor, "*shape"]:
    """The sum; with memory of its own as well where it is in a higher precision."""
    keep = torch.is_grad_enabled() or torch.result_type(scores, added) != scores.dtype
    return scores + added if keep else scores.add_(added)


def hidden(scores: Float[Tensor, "*shape"], where: Bool[Tensor, "*#shape"]) -> Float[Tensor, "*shape"]:
    """-inf in the marked places."""
    keep = torch.is_grad_enabled()
    return scores.masked_fill(where, -torch.inf) if keep else scores.masked_fill_(where, -torch.inf)
