"""Edited scores and linear attention as their formulas read: one window, one head, one pair of tokens at a time."""

import torch


def routing(q, k, scale):
    """S_ij = scale (q_i·k_j - k_i·q_j)/2."""
    n = len(q)
    S = torch.zeros(n, n, dtype=q.dtype)
    for i in range(n):
        for j in range(n):
            S[i, j] = scale * (q[i] @ k[j] - k[i] @ q[j]) / 2
    return S


def filtering(q, k, scale):
    """F_ij = scale (q_i·k_j + k_i·q_j)/2."""
    n = len(q)
    F = torch.zeros(n, n, dtype=q.dtype)
    for i in range(n):
        for j in range(n):
            F[i, j] = scale * (q[i] @ k[j] + k[i] @ q[j]) / 2
    return F


def best(table, rank):
    """The best approximation of a rank in the Frobenius norm, which sees the whole window."""
    U, values, Vh = torch.linalg.svd(table)
    return (U[:, :rank] * values[:rank]) @ Vh[:rank]


def gauge(q, k, scale, q_mean, k_mean):
    """f_i - f_j with f_i the mean of row i of S over tokens of the given means."""
    f = [scale * (q[i] @ k_mean - k[i] @ q_mean) / 2 for i in range(len(q))]
    return torch.stack([torch.stack([f[i] - f[j] for j in range(len(q))]) for i in range(len(q))])


def feature(x):
    """elu(x) + 1, one number at a time."""
    return torch.stack([x_i + 1 if x_i > 0 else torch.exp(x_i) for x_i in x])


def linear(q, k, v, valid):
    """Σ_{j≤i} φ(q_i)·φ(k_j) v_j / Σ_{j≤i} φ(q_i)·φ(k_j) over keys that are no padding; 0 where there is none."""
    rows = []
    for i in range(len(q)):
        total, weight = torch.zeros_like(v[0]), 0.0
        for j in range(i + 1):
            if valid[j]:
                w = feature(q[i]) @ feature(k[j])
                total, weight = total + w * v[j], weight + w
        rows.append(total / weight if weight else total)
    return torch.stack(rows)
