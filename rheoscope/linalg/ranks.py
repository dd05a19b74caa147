"""Effective ranks: how many singular values matter, in three ways. An all-zero spectrum has none of them: NaN."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from rheoscope.errors import RheoscopeError
from rheoscope.linalg.factors import as_float64

# Shares of energy are compared to this: nine of ten equal singular values do hold 0.9, whatever the rounding says.
SHARE_ROUNDING = 1e-12


class EffectiveRanks(NamedTuple):
    """The effective ranks that a report shows; unit: number of singular values."""

    k90: Float64[Tensor, "*batch"]
    k95: Float64[Tensor, "*batch"]
    k99: Float64[Tensor, "*batch"]
    entropy_rank: Float64[Tensor, "*batch"]
    participation: Float64[Tensor, "*batch"]


def effective_ranks(singular_values: Float[Tensor, "*batch value"]) -> EffectiveRanks:
    """Effective ranks of a spectrum: k90, k95, k99, entropy rank and participation ratio."""
    shares = (rank_at_share(singular_values, share) for share in (0.90, 0.95, 0.99))
    return EffectiveRanks(*shares, entropy_rank(singular_values), participation_ratio(singular_values))


def rank_at_share(singular_values: Float[Tensor, "*batch value"], share: float) -> Float64[Tensor, "*batch"]:
    """Least number of singular values that hold `share` of the energy Σσ².

    At least 1, at most their number; for a skew matrix at least 2 once share > 0.5. Raises unless 0 < share <= 1.
    """
    if not 0 < share <= 1:
        raise RheoscopeError(f"the rank at share {share} was asked; a share of energy lies above 0, and at most at 1.")
    energy = _energy_shares(singular_values).sort(-1, descending=True).values
    short = energy.cumsum(-1) < share - SHARE_ROUNDING
    rank = short.sum(-1).clamp(max=energy.shape[-1] - 1) + 1.0
    return rank.to(torch.float64).masked_fill(energy.isnan().any(-1), torch.nan)


def entropy_rank(singular_values: Float[Tensor, "*batch value"]) -> Float64[Tensor, "*batch"]:
    """Exponential of the entropy of the energy shares σ²/Σσ². From 1 (one value) to their number (all equal)."""
    return torch.special.entr(_energy_shares(singular_values)).sum(-1).exp()


def participation_ratio(singular_values: Float[Tensor, "*batch value"]) -> Float64[Tensor, "*batch"]:
    """Participation ratio (Σσ²)²/Σσ⁴. From 1 (one value) to their number (all equal), never above the entropy rank."""
    return 1 / _energy_shares(singular_values).square().sum(-1)


def _energy_shares(singular_values: Float[Tensor, "*batch value"]) -> Float64[Tensor, "*batch value"]:
    """Shares σ²/Σσ², scaled by the largest value first: squares of 1e-200 would vanish. NaN if all are zero."""
    values = as_float64(singular_values)
    energy = (values / values.amax(-1, keepdim=True)).square()
    return energy / energy.sum(-1, keepdim=True)
