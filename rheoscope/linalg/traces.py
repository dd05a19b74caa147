"""Energies of the scores from traces of d_head x d_head products: cheap enough for all text.

One Gram product per pair of Q and K, then float64. On a trained model of 135 M parameters, float32 Grams move ‖M‖² by
7e-7, ‖S‖² by 4e-6 and Σσ⁴ of S by 1e-5 of themselves at most: far below any standard error over documents. A routing
share below the rounding of ‖M‖² (1e-7 in float32, 1e-16 in float64) needs `routing_share` of a factor instead.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from rheoscope.linalg.factors import as_float64, grouped_shape


class ScoreEnergies(NamedTuple):
    """Sums per document and head whose quotients are shares; all in float64, in logits².

    `gauge` is the energy of f_i - f_j, f the row mean of S.
    """

    score: Float64[Tensor, "*batch"]
    routing: Float64[Tensor, "*batch"]
    filtering: Float64[Tensor, "*batch"]
    diagonal: Float64[Tensor, "*batch"]
    gauge: Float64[Tensor, "*batch"]


class _Products(NamedTuple):
    """What the energies depend on, in float64 and with Q scaled: Grams, mean vectors, energy of the diagonal."""

    qq: Float64[Tensor, "*batch d_head d_head"]
    kk: Float64[Tensor, "*kv_batch d_head d_head"]
    kq: Float64[Tensor, "*batch d_head d_head"]
    q_mean: Float64[Tensor, "*batch d_head"]
    k_mean: Float64[Tensor, "*kv_batch d_head"]
    diagonal: Float64[Tensor, "*batch"]


@torch.no_grad()
def score_energies(
    Q: Float[Tensor, "*batch position d_head"],
    K: Float[Tensor, "*kv_batch position d_head"],
    *,
    scale: float,
    valid: Bool[Tensor, "*#batch position"] | None = None,
) -> ScoreEnergies:
    """Energies of M = scale Q K^T and of its parts S and F, per document and head.

    Fewer key heads (dimension -3) than query heads serve a group each, uncopied.
    Positions where `valid` is False are left out; with grouped keys its head dimension is 1. Products are in the dtype
    of Q, half precision raised to float32. On CUDA, allow_tf32 would cost four digits: leave it off. What rounding has
    moved below zero is returned as 0.
    """
    shape, groups = Q.shape[:-2], grouped_shape(Q, K)
    precision = torch.promote_types(Q.dtype, torch.float32)
    Q, K = Q.to(precision), K.to(precision)
    n = torch.full(shape, float(Q.shape[-2]), dtype=torch.float64)
    if valid is not None:
        n = as_float64(valid.sum(-1).to(precision)).expand(shape)
        Q, K = (X.masked_fill(~valid[..., None], 0) for X in (Q, K))
    n = n.reshape(groups[:-2])
    p = _products(Q.reshape(groups), K.reshape(*groups[:-3], 1, *groups[-2:]), n, scale)
    parts = (*_energies(p), p.diagonal, _gauge_energy(p, n))
    return ScoreEnergies(*(part.clamp(min=0).reshape(shape) for part in parts))


def _products(
    Q: Float[Tensor, "*batch group position d_head"],
    K: Float[Tensor, "*batch one position d_head"],
    n: Float64[Tensor, "*batch group"],
    scale: float,
) -> _Products:
    """Products of Q and K for every head; the keys of a group are read in place, not repeated."""
    kq = torch.cat([K.mT @ Q[..., i : i + 1, :, :] for i in range(Q.shape[-3])], -3)
    n = n.to(Q.device if Q.device.type != "mps" else "cpu").clamp(min=1)[..., None]
    return _Products(
        qq=as_float64(Q.mT @ Q) * scale**2,
        kk=as_float64(K.mT @ K),
        kq=as_float64(kq) * scale,
        q_mean=as_float64(Q.sum(-2)) * scale / n,
        k_mean=as_float64(K.sum(-2)) / n,
        diagonal=as_float64((Q * K).sum(-1)).square().sum(-1) * scale**2,
    )


def _energies(p: _Products) -> tuple[Tensor, Tensor, Tensor]:
    """‖M‖², ‖S‖², ‖F‖² from ‖M‖² = tr(Q^TQ K^TK) and tr(M²) = tr((K^TQ)²)."""
    score, square = _inner(p.qq, p.kk), _inner(p.kq, p.kq.mT)
    return score, (score - square) / 2, (score + square) / 2


def _gauge_energy(p: _Products, n: Float64[Tensor, "*batch"]) -> Float64[Tensor, "*batch"]:
    """2N‖f‖² for the row mean f = (Q k̄ - K q̄)/2 of S: the energy of f_i - f_j, as Σf = 0."""
    q, k = p.q_mean[..., None], p.k_mean[..., None]
    square = k.mT @ p.qq @ k - 2 * (q.mT @ p.kq @ k) + q.mT @ p.kk @ q
    return n.to(square.device) / 2 * square[..., 0, 0]


def _inner(A: Float64[Tensor, "*batch d d"], B: Float64[Tensor, "*#batch d d"]) -> Float64[Tensor, "*batch"]:
    """Sum of elementwise products: tr(A B^T)."""
    return (A * B).sum((-2, -1))
