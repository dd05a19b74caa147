"""Slow, literal formulas in dense float64: what the library's fast routes are compared with."""

import torch


def repeated(K, heads):
    """Key heads repeated for their groups of query heads: query head h reads key head h // (heads / kv_heads)."""
    return torch.stack([K[..., h // (heads // K.shape[-3]), :, :] for h in range(heads)], -3)


def scores(Q, K, scale):
    """M = scale Q K^T, N x N."""
    return scale * Q.double() @ K.double().mT


def skew(M):
    return (M - M.mT) / 2


def symmetric(M):
    return (M + M.mT) / 2


def energy(M):
    """Squared Frobenius norm, entry by entry."""
    return (M**2).sum((-2, -1))


def gauge_part(S):
    """G_ij = f_i - f_j with f_i the mean of row i of S."""
    f = S.mean(-1)
    return f[..., :, None] - f[..., None, :]


def rank_at_share(singular_values, share):
    """Least k with Σ_{i<=k} σ² >= share Σσ², by counting up."""
    squares = sorted((float(value) ** 2 for value in singular_values), reverse=True)
    k = 1
    while sum(squares[:k]) < share * sum(squares) * (1 - 1e-12):
        k += 1
    return k


def kernel(W_Q, W_K):
    """W_QK = W_Q W_K^T, d_model x d_model."""
    return W_Q.double() @ W_K.double().mT


def rotation(lag, d_head, base=100.0):
    """RoPE's R_lag on half-split pairs, with q_i R_i (k_j R_j)^T = q_i R_{i-j} k_j^T."""
    R = torch.zeros(d_head, d_head, dtype=torch.float64)
    half = d_head // 2
    for pair in range(half):
        angle = torch.tensor(lag * base ** (-pair / half), dtype=torch.float64)
        R[pair, pair] = R[pair + half, pair + half] = angle.cos()
        R[pair, pair + half], R[pair + half, pair] = angle.sin(), -angle.sin()
    return R


def jackknife_ratio_se(numerators, denominators):
    """Standard error of a ratio of sums by leaving out one document at a time."""
    m = len(numerators)
    total_n, total_d = sum(numerators), sum(denominators)
    left_out = [(total_n - n) / (total_d - d) for n, d in zip(numerators, denominators, strict=True)]
    centre = sum(left_out) / m
    return ((m - 1) / m * sum((value - centre) ** 2 for value in left_out)) ** 0.5


def lag_sums(A, n_lags):
    """Sum of A[i, i - τ] over i, for τ = 0 ... n_lags - 1."""
    n = len(A)
    return [sum(float(A[i, i - lag]) for i in range(n) if i >= lag) for lag in range(n_lags)]
