"""Sums at each distance between two positions, of both signs, and the lags at which weights are read."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from rheoscope.stats import lag_sums


def signed_lag_sums(A: Float[Tensor, "*batch n n"], *, causal: bool) -> Float[Tensor, "*batch signed_lag"]:
    """Sum of A[i, i - lag] for lag = query minus key from -(n - 1) to n - 1: entry `lag + n - 1`.

    `causal`: nothing stands above the diagonal, and it is not read.
    """
    n = A.shape[-1]
    forward = lag_sums(A, n_lags=n)
    backward = torch.zeros_like(forward) if causal else lag_sums(A.mT, n_lags=n)
    return torch.cat([backward[..., 1:].flip(-1), forward], -1)


def pair_energies(
    Q: Float[Tensor, "*batch n d_head"], K: Float[Tensor, "*batch n d_head"], lags: Int[np.ndarray, " lag"]
) -> tuple[Float64[Tensor, "*batch lag"], Float64[Tensor, "*batch lag"]]:
    """Σ S² and Σ M² over all pairs of positions that lie `lag` apart, either way round, for M = Q K^T.

    M is formed, half precision raised to float32.
    """
    Q, K = (X.to(torch.promote_types(X.dtype, torch.float32)) for X in (Q, K))
    M = Q @ K.mT
    routing, score = [], []
    for lag in lags.tolist():
        later, earlier = (M.diagonal(side, -2, -1).to(torch.float64) for side in (-lag, lag))
        half = 1 if lag else 2  # at lag 0 both are the same entry
        routing.append((later - earlier).square().sum(-1) / 2)
        score.append((later.square() + earlier.square()).sum(-1) / half)
    return torch.stack(routing, -1), torch.stack(score, -1)


def lag_grid(window: int, *, per_octave: int = 3) -> np.ndarray:
    """Lags 0, 1, 2, … in even steps of a logarithm, up to the longest of a window: [lag] integers."""
    octaves = np.log2(max(window - 1, 1))
    steps = 2 ** np.linspace(0, octaves, int(octaves * per_octave) + 1)
    return np.unique(np.concatenate([[0], np.round(steps).astype(int)]))
