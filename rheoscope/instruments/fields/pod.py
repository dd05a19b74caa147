"""Proper orthogonal decomposition of an ensemble of fields by the method of snapshots, for all windows on lag at once.

Rows X [snapshot, entry] are fluctuations: their mean over snapshots is taken out. A window depends on the lag alone, so
the Gram matrix of the windowed field is Σ_τ w(τ)² X_τ X_τᵀ: one product per lag serves every window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from scipy import stats
from torch import Tensor

WINDOWS = ("band", "low_pass", "none")
LEVELS = (0.10, 0.05, 0.01)  # shares of energy left out
USABLE = 1e-10  # of the first eigenvalue; below, rounding of float32 snapshots may be all there is
CONSTANT = 1e-12  # of the energy of the mean field: what float32 makes of snapshots that are all equal
FEWEST_USABLE = 5
MOST_FITTED = 30
RANK_ROUNDING = 1e-12  # a share computed in float64 may exceed ε by this much


def lag_window(kind: str, scale: float, lags: Int64[np.ndarray, " lag"]) -> Float64[np.ndarray, " lag"]:
    """Weight of every lag: `band` exp(-(|τ| - a)²/(2 (a/2)²)), `low_pass` exp(-τ²/(2 a²)); 1 for a = ∞ or `none`."""
    distance = np.abs(lags).astype(np.float64)
    if kind == "none" or math.isinf(scale):
        return np.ones_like(distance)
    if kind == "band":
        return np.exp(-((distance - scale) ** 2) / (2 * (scale / 2) ** 2))
    return np.exp(-(distance**2) / (2 * scale**2))


class LagGrams(NamedTuple):
    """Gram matrices of the windowed field, Σ_τ w(τ)² X_τ X_τᵀ, and the energy ‖X_τ‖² of every snapshot at every lag."""

    windowed: Float64[Tensor, "window snapshot snapshot"]
    energies: Float64[Tensor, "lag snapshot"]


def lag_grams(
    X: Float64[Tensor, "snapshot entry"], bounds: Sequence[int], weights: Float64[Tensor, "window lag"]
) -> LagGrams:
    """Grams of a field under every window, where X_τ are the entries bounds[τ]:bounds[τ + 1]."""
    found = LagGrams(X.new_zeros(len(weights), len(X), len(X)), X.new_zeros(weights.shape[1], len(X)))
    for lag, squares in enumerate(weights.T.square()):
        part = X[:, bounds[lag] : bounds[lag + 1]]
        if part.shape[1]:
            gram = part @ part.T
            found.windowed.add_(gram * squares[:, None, None])
            found.energies[lag] = gram.diagonal()
    return found


class Spectrum(NamedTuple):
    """Eigenvalues λ of the covariance, falling, at most N - 1 of them, and the unit vectors over snapshots."""

    eigenvalues: Float64[Tensor, "*batch component"]
    vectors: Float64[Tensor, "*batch snapshot component"]


def spectrum(gram: Float64[Tensor, "*batch snapshot snapshot"], n: int) -> Spectrum:
    """POD spectrum of centred rows from their Gram matrix: λ = eigenvalues / n."""
    values, vectors = torch.linalg.eigh(gram)
    rank = min(gram.shape[-1], n - 1)
    return Spectrum(values.flip(-1)[..., :rank].clamp(min=0) / n, vectors.flip(-1)[..., :rank])


class Modes(NamedTuple):
    """Orthonormal modes, and how much of each is in every snapshot."""

    phi: Float64[Tensor, "*window mode entry"]
    coefficients: Float64[Tensor, "*window snapshot mode"]


def modes(
    X: Float64[Tensor, "snapshot entry"],
    found: Spectrum,
    n: int,
    *,
    window: Float64[Tensor, "*window entry"],
    n_modes: int,
) -> Modes:
    """Modes φ_k = (X w)ᵀ v_k / sqrt(N λ_k) of a windowed field and coefficients sqrt(N λ_k) v_k, for some windows.

    `found` are the spectra of the windowed fields. The largest entry of each mode is positive. NaN without energy.
    """
    norms, vectors = (n * found.eigenvalues[..., :n_modes]).sqrt(), found.vectors[..., :n_modes]
    shares = (vectors / torch.where(norms > 0, norms, torch.nan)[..., None, :]).mT
    phi = (shares.flatten(0, -2) @ X).view(*shares.shape[:-1], -1).mul_(window[..., None, :])
    signs = mode_signs(phi)
    return Modes(phi.mul_(signs[..., None]), vectors * (norms * signs)[..., None, :])


def mode_signs(phi: Float64[Tensor, "*window mode entry"]) -> Float64[Tensor, "*window mode"]:
    """Sign of the entry of each mode that is largest in size."""
    return torch.sign(phi.gather(-1, phi.abs().argmax(-1, keepdim=True)))[..., 0]


def centred_gram(
    gram: Float64[Tensor, "*batch snapshot snapshot"], members: Bool[Tensor, "*batch snapshot"]
) -> Float64[Tensor, "*batch snapshot snapshot"]:
    """Gram matrix of some snapshots less their own mean; 0 for the others."""
    m = members.to(gram.dtype)
    count = m.sum(-1)[..., None, None]
    inside = gram * m[..., :, None] * m[..., None, :]
    row = inside.sum(-1, keepdim=True) / count
    centred = inside - row - row.mT + row.sum(-2, keepdim=True) / count
    return centred * m[..., :, None] * m[..., None, :]


def h_star(
    eigenvalues: Float64[np.ndarray, "*batch component"],
    epsilon: float,
    *,
    discarded: Float64[np.ndarray, "*batch"] | float = 0.0,
    floor: Float64[np.ndarray, "*batch"] | float = 0.0,
) -> Float64[np.ndarray, "*batch"]:
    """H*(ε): the least n with Σ_(k>n) λ_k ≤ ε Σ λ_k. A rank-1 field has 1, a constant one 0.

    discarded: energy that no eigenvalue holds; it counts as left out, so H* is an upper bound. NaN where not even all
    eigenvalues are enough then. floor: energy up to which the field counts as constant.
    """
    eigenvalues, discarded = np.asarray(eigenvalues), np.asarray(discarded, np.float64)
    held = np.cumsum(eigenvalues[..., ::-1], -1)[..., ::-1]
    tails = np.concatenate([held, np.zeros_like(held[..., :1])], -1) + discarded[..., None]
    total = tails[..., :1]
    enough = tails <= (epsilon + RANK_ROUNDING) * total
    least = np.where(enough.any(-1), enough.argmax(-1), np.nan)
    return np.where(total[..., 0] <= floor, 0.0, least)


class PowerLaw(NamedTuple):
    """Exponent of λ_k ~ k^-β: least squares of log λ on log k over k = 1 … last, and its 95 % interval.

    NaN with `last` 0 where fewer than five eigenvalues are usable. `least` and `most`: β over half and twice the range.
    """

    beta: float
    low: float
    high: float
    last: int
    least: float
    most: float


UNDEFINED = PowerLaw(math.nan, math.nan, math.nan, 0, math.nan, math.nan)


def power_law(eigenvalues: Float64[np.ndarray, " component"], n: int) -> PowerLaw:
    """Decay of a spectrum over k = 1 … min(30, N / 4), as far as eigenvalues are above rounding.

    The interval is that of the straight line. It says nothing about the eigenvalues' own error (see the jackknife).
    """
    usable = int((eigenvalues > USABLE * eigenvalues[:1].sum()).sum()) if len(eigenvalues) else 0
    last = min(MOST_FITTED, n // 4, usable)
    if last < FEWEST_USABLE:
        return UNDEFINED
    slope, error = _line(eigenvalues[:last])
    reach = float(stats.t.ppf(0.975, last - 2)) * error
    others = [-_line(eigenvalues[:k])[0] for k in (last // 2, min(2 * last, usable)) if k >= FEWEST_USABLE]
    return PowerLaw(
        -slope, -slope - reach, -slope + reach, last, min(-slope, *others, -slope), max(-slope, *others, -slope)
    )


def _line(eigenvalues: Float64[np.ndarray, " component"]) -> tuple[float, float]:
    """Slope of log λ on log k and its standard error."""
    x, y = np.log(np.arange(1, len(eigenvalues) + 1)), np.log(eigenvalues)
    x, y = x - x.mean(), y - y.mean()
    slope = float(x @ y / (x @ x))
    residual = y - slope * x
    return slope, float(np.sqrt(residual @ residual / (len(x) - 2) / (x @ x)))


class HeldOut(NamedTuple):
    """Energy of held-out snapshots about the mean of the others: all of it, and what n = 0, 1, … modes leave out.

    `trained`: eigenvalues of the snapshots that the modes come from.
    """

    left_out: Float64[np.ndarray, "window rank"]
    total: Float64[np.ndarray, " window"]
    trained: Float64[np.ndarray, "window component"]


def held_out(gram: Float64[Tensor, "window snapshot snapshot"], train: Bool[np.ndarray, " snapshot"]) -> HeldOut:
    """How well modes of the snapshots in `train` hold the others. Everything follows from the Gram matrix."""
    inside, outside = torch.from_numpy(np.flatnonzero(train)), torch.from_numpy(np.flatnonzero(~train))
    within = gram[:, inside][:, :, inside]
    across = gram[:, outside][:, :, inside]
    mean_energy = within.mean((1, 2))
    centred = centred_gram(within, torch.ones(within.shape[:2], dtype=torch.bool))
    energy = gram.diagonal(dim1=1, dim2=2)[:, outside] - 2 * across.mean(2) + mean_energy[:, None]
    inner = across - across.mean(2, keepdim=True) - within.mean(2)[:, None, :] + mean_energy[:, None, None]
    found = spectrum(centred, len(inside))
    values = found.eigenvalues * len(inside)
    usable = values > USABLE * values[:, :1]
    squares = (inner @ found.vectors).square() * (usable / torch.where(usable, values, 1.0))[:, None, :]
    held = torch.nn.functional.pad(squares.sum(1).cumsum(-1), (1, 0))
    total = energy.sum(1)
    return HeldOut((total[:, None] - held).numpy(), total.numpy(), found.eigenvalues.numpy())


def subset_spectrum(
    gram: Float64[Tensor, "window snapshot snapshot"], chosen: Int64[np.ndarray, " subset"]
) -> Float64[np.ndarray, "window component"]:
    """Eigenvalues of some of the snapshots alone, about their own mean."""
    index = torch.from_numpy(chosen)
    part = gram[:, index][:, :, index]
    centred = centred_gram(part, torch.ones(part.shape[:2], dtype=torch.bool))
    values = torch.linalg.eigvalsh(centred).flip(-1)[..., : len(chosen) - 1]
    return (values.clamp(min=0) / len(chosen)).numpy()
