"""Leading planes of a skew form and leading directions of a symmetric one, measured against a text.

Vectors x with Gram matrix G = X^T X make the table X C X^T of a form C. With R^T R = G and X = U R it is
U (R C R^T) U^T, so the best approximation of rank r in the Frobenius norm keeps what is largest of R C R^T. Carried
back by the pseudo-inverse of R it is again a form on x, which may be applied to one pair of vectors at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

# Directions whose share of the largest eigenvalue of G is less than this are rounding of the sum, not text.
RANK_ROUNDING = 1e-13


class Leading(NamedTuple):
    """Singular values of X C X^T, descending, and what carries each back to x, as columns.

    Skew: one value and one pair of columns per plane, C = sum of values (second first^T - first second^T).
    Symmetric: one signed value and one column each, `second` the same; C = sum of values first first^T.
    """

    values: Float64[Tensor, "*batch value"]
    first: Float64[Tensor, "*batch d value"]
    second: Float64[Tensor, "*batch d value"]


@torch.no_grad()
def leading_planes(gram: Float64[Tensor, "*batch d d"], form: Float64[Tensor, "d d"]) -> Leading:
    """Planes that the table of a skew form turns, by what they turn. Real Schur form, by way of a Hermitian matrix."""
    R, inverse = _roots(gram)
    values, V = torch.linalg.eigh(torch.complex(torch.zeros_like(R), R @ form @ R.mT))
    n_planes = form.shape[-1] // 2
    values, V = values.flip(-1)[..., :n_planes], V.flip(-1)[..., :n_planes]
    # i times the core is a sum of σ v v* - σ conj(v v*), one term per plane; √2 Re v and √2 Im v are orthonormal there.
    return Leading(values.clamp(min=0), inverse @ (V.real * 2**0.5), inverse @ (V.imag * 2**0.5))


@torch.no_grad()
def leading_directions(gram: Float64[Tensor, "*batch d d"], form: Float64[Tensor, "d d"]) -> Leading:
    """Directions along which the table of a symmetric form is largest, by magnitude, gain and damping alike."""
    R, inverse = _roots(gram)
    values, V = torch.linalg.eigh(R @ form @ R.mT)
    order = values.abs().argsort(dim=-1, descending=True, stable=True)
    first = inverse @ V.gather(-1, order[..., None, :].expand(V.shape))
    return Leading(values.gather(-1, order), first, first)


def kept_planes(leading: Leading, n: int) -> Float64[Tensor, "*batch d d"]:
    """The skew form of the n leading planes."""
    values, first, second = (part[..., :n] for part in leading)
    half = (second * values[..., None, :]) @ first.mT
    return half - half.mT


def kept_directions(leading: Leading, n: int) -> Float64[Tensor, "*batch d d"]:
    """The symmetric form of the n leading directions."""
    values, first = leading.values[..., :n], leading.first[..., :n]
    return (first * values[..., None, :]) @ first.mT


def _roots(gram: Float64[Tensor, "*batch d d"]) -> tuple[Float64[Tensor, "*batch d d"], Float64[Tensor, "*batch d d"]]:
    """R with R^T R = G, and its pseudo-inverse: rows, and columns, of directions that the text lacks are zero."""
    values, V = torch.linalg.eigh(gram)
    roots = values.clamp(min=0).sqrt()
    known = values > RANK_ROUNDING * values[..., -1:]
    inverse = torch.where(known, 1 / roots, 0.0)
    return (V * (roots * known)[..., None, :]).mT, V * inverse[..., None, :]
