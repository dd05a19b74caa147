"""Spectra of the scores M = s Q K^T and of its routing and filtering parts, from the small factor T alone.

With T = [T_Q T_K] (`factors`), M = U T_Q T_K^T U^T for some U with orthonormal columns. So M, S = (M - M^T)/2 and
F = (M + M^T)/2 have the nonzero singular values of T_Q T_K^T and of its skew and symmetric part.
"""

from typing import NamedTuple

import torch
from jaxtyping import Complex128, Float64
from torch import Tensor

from rheoscope.linalg.factors import split_factors

# An eigenvalue this much smaller than the largest is taken for an exact zero that rounding has moved.
ZERO_EIGENVALUE = 1e-10


class Stability(NamedTuple):
    """Largest real part, in logits, and share of positive real parts, of the nonzero eigenvalues; NaN without any."""

    max_re: Float64[Tensor, "*batch"]
    share_positive: Float64[Tensor, "*batch"]


def routing_core(T: Float64[Tensor, "*batch row column"]) -> Float64[Tensor, "*batch row row"]:
    """Skew-symmetric part of T_Q T_K^T: the routing part S in a basis of the span of Q and K."""
    T_Q, T_K = split_factors(T)
    A = T_Q @ T_K.mT
    return (A - A.mT) / 2


def filtering_core(T: Float64[Tensor, "*batch row column"]) -> Float64[Tensor, "*batch row row"]:
    """Symmetric part of T_Q T_K^T: the filtering part F in a basis of the span of Q and K."""
    T_Q, T_K = split_factors(T)
    A = T_Q @ T_K.mT
    return (A + A.mT) / 2


@torch.no_grad()
def routing_singular_values(T: Float64[Tensor, "*batch row column"]) -> Float64[Tensor, "*batch value"]:
    """Singular values of S, descending, in exactly equal pairs.

    As many as S can have nonzero, min(N, 2 d_head); an odd last one is exactly 0, as for every skew matrix of odd size.
    """
    values = torch.linalg.svdvals(routing_core(T))[..., : min(T.shape[-2:])]
    planes = values.shape[-1] // 2
    paired = values[..., : 2 * planes].unflatten(-1, (planes, 2)).mean(-1).repeat_interleave(2, -1)
    return torch.cat([paired, torch.zeros_like(values[..., 2 * planes :])], -1)


@torch.no_grad()
def filtering_eigenvalues(T: Float64[Tensor, "*batch row column"]) -> Float64[Tensor, "*batch value"]:
    """Eigenvalues of F (real), by descending magnitude: gain where positive, damping where negative."""
    values = torch.linalg.eigvalsh(filtering_core(T))
    order = values.abs().argsort(dim=-1, descending=True, stable=True)
    return values.gather(-1, order)[..., : min(T.shape[-2:])]


def filtering_singular_values(T: Float64[Tensor, "*batch row column"]) -> Float64[Tensor, "*batch value"]:
    """Singular values of F, descending; as many as F can have nonzero, min(N, 2 d_head)."""
    return filtering_eigenvalues(T).abs()


@torch.no_grad()
def score_singular_values(T: Float64[Tensor, "*batch row column"]) -> Float64[Tensor, "*batch value"]:
    """Singular values of M, descending; as many as M can have nonzero, min(N, d_head)."""
    T_Q, T_K = split_factors(T)
    return torch.linalg.svdvals(torch.linalg.qr(T_Q, mode="r")[1] @ T_K.mT)


@torch.no_grad()
def routing_energy_spectrum(T: Float64[Tensor, "*batch row column"]) -> Float64[Tensor, "*batch value"]:
    """Squares of `routing_singular_values`, descending, to 1e-15 of the largest: 1.7 times faster.

    All that shares of energy need. Singular values below 1e-7 of the largest are lost, which is why those have an SVD.
    """
    core = routing_core(T)
    squares = torch.linalg.eigvalsh(core.mT @ core).flip(-1).clamp(min=0)
    return squares[..., : min(T.shape[-2:])]


@torch.no_grad()
def score_energy_spectrum(T: Float64[Tensor, "*batch row column"]) -> Float64[Tensor, "*batch value"]:
    """Squares of `score_singular_values`, descending, to 1e-15 of the largest; T triangular, as `factors` makes it."""
    T_Q, T_K = split_factors(T)
    A = T_Q[..., : T_Q.shape[-1] + 1, :] @ T_K.mT  # the query half has no rows below: 1 for the means, d_head for Q
    squares = torch.linalg.eigvalsh(A @ A.mT).flip(-1).clamp(min=0)
    return squares[..., : min(T_Q.shape[-2:])]


@torch.no_grad()
def score_eigenvalues(T: Float64[Tensor, "*batch row column"]) -> Complex128[Tensor, "*batch d_head"]:
    """Eigenvalues of s K^T Q: the nonzero ones of M, in no particular order, and zeros where Q or K lacks rank."""
    T_Q, T_K = split_factors(T)
    return torch.linalg.eigvals(T_K.mT @ T_Q)


def stability(eigenvalues: Complex128[Tensor, "*batch value"]) -> Stability:
    """Largest real part, and share of positive real parts, of the nonzero eigenvalues (ZERO_EIGENVALUE).

    Of the unmasked score. A random matrix is almost never stable: show it beside a random null of the same shape.
    """
    size = eigenvalues.abs()
    nonzero = (size > ZERO_EIGENVALUE * size.amax(-1, keepdim=True)).to(torch.float64)
    count = nonzero.sum(-1)
    largest = eigenvalues.real.masked_fill(nonzero == 0, -torch.inf).amax(-1)
    positive = ((eigenvalues.real > 0) * nonzero).sum(-1)
    return Stability(largest.masked_fill(count == 0, torch.nan), positive / count)


def routing_share(T: Float64[Tensor, "*batch row column"]) -> Float64[Tensor, "*batch"]:
    """Share ‖S‖²/‖M‖² of the score energy that is skew-symmetric. In [0, 1]; NaN for M = 0.

    Free of cancellation: a share of 1e-20 is still right, where ‖M‖² - tr(M²) bottoms out at the rounding of ‖M‖².
    """
    skew, symmetric = (core.square().sum((-2, -1)) for core in (routing_core(T), filtering_core(T)))
    return skew / (skew + symmetric)


def gauge_share(T: Float64[Tensor, "*batch row column"]) -> Float64[Tensor, "*batch"]:
    """Share 1 - ‖HSH‖²/‖S‖² of the routing energy in the family f_i - f_j, f the row mean of S; T from `score_factors`.

    In [0, 1]; NaN for S = 0. Softmax ignores constants of a row, so this part is only a key bias. It fills the first
    row and column of the core, so nothing has to be subtracted.
    """
    core = routing_core(T)
    return 2 * core[..., 0, :].square().sum(-1) / core.square().sum((-2, -1))
