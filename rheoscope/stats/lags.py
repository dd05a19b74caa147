"""Sums over the pairs of positions at equal lag, as numerators and denominators for RatioOfSums."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def lag_sums(A: Float[Tensor, "*batch n n"], *, n_lags: int) -> Float[Tensor, "*batch lag"]:
    """Sum of A[i, i - lag] over the queries i, for lag = query minus key = 0 ... n_lags - 1.

    What lies above the diagonal is never read. Rows of padding must be zero. In the dtype of A, half raised to float32.
    """
    A = A.to(torch.promote_types(A.dtype, torch.float32))
    # Map by map: one padded copy of all of them would be page-faulted anew each time, five times slower on a CPU.
    sums = [_diagonal_sums(one, n_lags) for one in A.reshape(-1, *A.shape[-2:])]
    return torch.stack(sums).reshape(*A.shape[:-2], n_lags)


def _diagonal_sums(A: Float[Tensor, "n n"], n_lags: int) -> Float[Tensor, " lag"]:
    """Sums along the diagonals of one map, from the main one downwards.

    With n_lags - 1 zeros before every row of n, one step down and one to the right is a step of n + n_lags: in rows of
    that length the entries of one lag stand in one column, the largest lag first.
    """
    n = len(A)
    padded = torch.nn.functional.pad(A, (n_lags - 1, 0)).contiguous()
    return padded.as_strided((n, n_lags), (n + n_lags, 1)).sum(0).flip(0)


def lag_counts(lengths: Int[Tensor, " window"], *, n_lags: int) -> Int[Tensor, "window lag"]:
    """Number of pairs at every lag in windows of the given lengths: length - lag, or 0."""
    return (lengths[:, None] - torch.arange(n_lags, device=lengths.device)).clamp(min=0)
