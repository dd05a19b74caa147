"""The gate of energy-gated attention, and the standardisation it rests on (docs/equations; arXiv 2606.06573)."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid

VARIANCE_FLOOR = 1e-5  # keeps the first token, whose variance is 0, at z = 0


def log_gate(
    energy: Float[Tensor, "batch head key"],
    slope: Float[Tensor, " head"],
    threshold: Float[Tensor, " head"],
    *,
    valid: Bool[Tensor, "batch key"] | None = None,
    causal: bool = True,
) -> Float[Tensor, "batch head key"]:
    """log sigmoid(slope (z_j - threshold)), at most 0: added to the scores of key j it multiplies probability by gate.

    Renormalised probabilities times gates are softmax(score + log gate), exactly. `causal = False` is the published
    form: z of a token then depends on tokens after it. Zero at padded keys, which the mask removes.
    """
    exact = energy.float() if energy.dtype in (torch.float16, torch.bfloat16) else energy
    present = torch.ones_like(exact[:, :1]) if valid is None else valid[:, None].to(exact.dtype)
    z = (running_standard if causal else whole_standard)(exact, present)
    return logsigmoid(slope[:, None] * (z - threshold[:, None])) * present


def running_standard(
    energy: Float[Tensor, "batch head key"], present: Float[Tensor, " batch #head key"]
) -> Float[Tensor, "batch head key"]:
    """Energy of each token in standard deviations from the mean of the tokens up to it, itself included.

    Sums of squares by Welford's recurrence, whose terms are never negative: a difference of sums would cancel.
    """
    count = present.cumsum(-1).clamp_min(1)
    mean = (energy * present).cumsum(-1) / count
    before = torch.cat([mean[..., :1], mean[..., :-1]], -1)
    squares = ((energy - before).square() * (1 - 1 / count) * present).cumsum(-1)
    return (energy - mean) * torch.rsqrt(squares / count + VARIANCE_FLOOR)


def whole_standard(
    energy: Float[Tensor, "batch head key"], present: Float[Tensor, " batch #head key"]
) -> Float[Tensor, "batch head key"]:
    """Energy of each token in standard deviations from the mean of the whole sequence: its future is in it."""
    count = present.sum(-1, keepdim=True).clamp_min(1)
    mean = (energy * present).sum(-1, keepdim=True) / count
    squares = ((energy - mean).square() * present).sum(-1, keepdim=True)
    return (energy - mean) * torch.rsqrt(squares / count + VARIANCE_FLOOR)
