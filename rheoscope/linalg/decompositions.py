"""Decompositions with fixed signs, and angles between subspaces.

Vectors of equal singular values are defined up to a rotation among them only: compare such subspaces, never vectors.
"""

import numpy as np
import torch
from jaxtyping import Float, Float64
from scipy.linalg import subspace_angles
from torch import Tensor

from rheoscope.linalg.factors import as_float64


@torch.no_grad()
def svd_fixed_signs(
    A: Float[Tensor, "*batch row column"],
) -> tuple[Float[Tensor, "*batch row k"], Float[Tensor, "*batch k"], Float[Tensor, "*batch k column"]]:
    """Thin SVD U, σ, Vh; the largest entry of each left vector, by magnitude, is positive."""
    U, values, Vh = torch.linalg.svd(A, full_matrices=False)
    signs = _signs(U)
    return U * signs, values, Vh * signs.mT


@torch.no_grad()
def eigh_fixed_signs(
    A: Float[Tensor, "*batch n n"],
) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch n n"]]:
    """Eigenvalues, descending, and eigenvectors (columns) of a symmetric matrix, signs as in `svd_fixed_signs`."""
    values, V = torch.linalg.eigh(A)
    V = V.flip(-1)
    return values.flip(-1), V * _signs(V)


@torch.no_grad()
def principal_angles(A: Float[Tensor, "n a"], B: Float[Tensor, "n b"]) -> Float64[Tensor, " angle"]:
    """Angles (radians, descending) between the column spaces of A and B; all zero when one contains the other."""
    angles = subspace_angles(as_float64(A).cpu().numpy(), as_float64(B).cpu().numpy())
    return torch.from_numpy(np.ascontiguousarray(angles))


def _signs(V: Float[Tensor, "*batch n k"]) -> Float[Tensor, "*batch 1 k"]:
    """Sign of the largest entry, by magnitude, of every column."""
    return V.gather(-2, V.abs().argmax(-2, keepdim=True)).sign()
