"""Sums at each distance between two positions, of both signs, and the lags at which weights are read."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor


def signed_lag_sums(
    A: Float[Tensor, "*batch query key"], *, n: int, first: int = 0
) -> Float[Tensor, "*batch signed_lag"]:
    """Sum of A[i, i - lag] for lag = query minus key from -(n - 1) to n - 1: entry `lag + n - 1`.

    The rows of A are the queries `first`, `first` + 1 …, its columns the first keys; n: positions of the window.
    """
    A = A.to(torch.promote_types(A.dtype, torch.float32))
    sums = [_diagonal_sums(one).flip(0) for one in A.reshape(-1, *A.shape[-2:])]  # map by map, as `lag_sums` says
    found = A.new_zeros(len(sums), 2 * n - 1)
    least = first - A.shape[-1] + 1 + n - 1
    found[:, least : least + A.shape[-2] + A.shape[-1] - 1] = torch.stack(sums)
    return found.reshape(*A.shape[:-2], -1)


def _diagonal_sums(A: Float[Tensor, "query key"]) -> Float[Tensor, " diagonal"]:
    """Sums along the diagonals of one map, from the last row's first entry to the first row's last.

    With n_query - 1 zeros before every row, one step down and one to the right is a step of that row length plus 1: in
    rows of the longer length the entries of one diagonal stand in one column.
    """
    rows, columns = A.shape
    length = rows - 1 + columns
    padded = A.new_zeros(rows * length + rows - 1)
    padded[: rows * length].view(rows, length)[:, rows - 1 :] = A
    return padded.as_strided((rows, length), (length + 1, 1)).sum(0)


def pair_energies(
    Q: Float[Tensor, "*batch n d_head"], K: Float[Tensor, "*batch n d_head"], lags: Int[np.ndarray, " lag"]
) -> tuple[Float64[Tensor, "*batch lag"], Float64[Tensor, "*batch lag"]]:
    """Σ S² and Σ M² over all pairs of positions that lie `lag` apart, either way round, for M = Q K^T.

    Only the entries of M at these lags are formed, half precision raised to float32.
    """
    Q, K = (X.to(torch.promote_types(X.dtype, torch.float32)) for X in (Q, K))
    n = Q.shape[-2]
    routing, score = [], []
    for lag in lags.tolist():
        behind, ahead = slice(lag, n), slice(n - lag)
        pairs = (Q[..., behind, :], K[..., ahead, :]), (Q[..., ahead, :], K[..., behind, :])
        later, earlier = (torch.linalg.vecdot(q, k).to(torch.float64) for q, k in pairs)
        half = 1 if lag else 2  # at lag 0 both are the same entry
        routing.append((later - earlier).square().sum(-1) / 2)
        score.append((later.square() + earlier.square()).sum(-1) / half)
    return torch.stack(routing, -1), torch.stack(score, -1)


def lag_grid(window: int, *, per_octave: int = 3) -> np.ndarray:
    """Lags 0, 1, 2, … in even steps of a logarithm, up to the longest of a window: [lag] integers."""
    octaves = np.log2(max(window - 1, 1))
    steps = 2 ** np.linspace(0, octaves, int(octaves * per_octave) + 1)
    return np.unique(np.concatenate([[0], np.round(steps).astype(int)]))
