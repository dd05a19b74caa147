"""Sums at each distance between two positions, of both signs, and the lags at which weights are read."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..stats import lag_sums


def signed_lag_sums(A: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch signed_lag"]:
    """Sum of A[i, i - lag] for lag = query minus key from -(n - 1) to n - 1: entry `lag + n - 1`."""
    n = A.shape[-1]
    return torch.cat([lag_sums(A.mT, n_lags=n)[..., 1:].flip(-1), lag_sums(A, n_lags=n)], -1)


def pair_sums(A: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch lag"]:
    """Sum of A over all pairs that lie a lag apart, either way round; entry 0 is the diagonal."""
    n = A.shape[-1]
    both = signed_lag_sums(A)
    forward, backward = both[..., n - 1 :], both[..., : n - 1].flip(-1)
    return torch.cat([forward[..., :1], forward[..., 1:] + backward], -1)


def lag_grid(window: int, *, per_octave: int = 3) -> np.ndarray:
    """Lags 0, 1, 2, … in even steps of a logarithm, up to the longest of a window: [lag] integers."""
    octaves = np.log2(max(window - 1, 1))
    steps = 2 ** np.linspace(0, octaves, int(octaves * per_octave) + 1)
    return np.unique(np.concatenate([[0], np.round(steps).astype(int)]))


def nearest_lag(lags: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Index in `grid` of the entry nearest to the size of each lag, by ratio of lag + 1."""
    return np.abs(np.log1p(np.abs(lags))[:, None] - np.log1p(grid)[None, :]).argmin(1)
