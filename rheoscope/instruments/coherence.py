"""Coherence between positions: whether two rows of attention fluctuate together at one scale."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from .entries import Entries

MOST_POSITIONS = 32


def coherence_positions(entries: Entries) -> Int64[np.ndarray, " position"]:
    """At most 32 queries, evenly spread over the rows of the field."""
    rows = np.flatnonzero(entries.support[:, 1] >= entries.support[:, 0])
    return rows[np.unique(np.linspace(0, len(rows) - 1, min(MOST_POSITIONS, len(rows))).round().astype(int))]


def row_coefficients(
    X: Float64[Tensor, "row entry"],
    entries: Entries,
    positions: Int64[np.ndarray, " position"],
    scale: float,
    omega0: float,
) -> Float64[np.ndarray, "row position"]:
    """Morlet coefficient of the row of each position at one scale, around the first lag inside the cone, √2 a.

    Complex. NaN for positions whose row ends before the cone does.
    """
    centre = math.ceil(math.sqrt(2) * scale)
    first, last = entries.support[positions].T
    lag = np.arange(len(entries.lags))
    t = (entries.lags - centre) / scale
    wavelet = (np.exp(-1j * omega0 * t) - np.exp(-(omega0**2) / 2)) * np.exp(-(t**2) / 2) / scale
    visible = (lag >= first[:, None]) & (lag <= last[:, None])
    weights = np.where(visible, wavelet, 0)
    # Taking the mean out of a row is part of the weights: they sum to 0 over the entries that the row has.
    weights = np.where(visible, weights - weights.sum(1, keepdims=True) / visible.sum(1, keepdims=True), 0)
    coefficients = np.empty((len(X), len(positions)), complex)
    for index, position in enumerate(positions):
        own = np.flatnonzero(entries.query == position)
        row = X[:, torch.from_numpy(own)].numpy()
        coefficients[:, index] = row @ weights[index, entries.lag[own] - entries.lags[0]]
    reach = centre - int(entries.lags[0])
    coefficients[:, (reach - first < math.sqrt(2) * scale) | (last - reach < math.sqrt(2) * scale)] = np.nan
    return coefficients


def coherence(
    W: Float64[np.ndarray, "row position"], n: int
) -> tuple[Float64[np.ndarray, "position position"], Float64[np.ndarray, "position position"]]:
    """γ_ij = |E W_i W̄_j| / sqrt(E|W_i|² E|W_j|²) over N snapshots, and the same less what chance gives.

    Unrelated rows have E γ² = 1/(N - 1) once the mean is out; the second is sqrt(max(0, ((N - 1)γ² - 1)/(N - 2))).
    """
    products = np.abs(W.conj().T @ W) ** 2
    power = products.diagonal() ** 0.5
    with np.errstate(invalid="ignore", divide="ignore"):
        squares = products / np.outer(power, power)
    squares = np.clip(squares, 0, 1)
    return np.sqrt(squares), np.sqrt(np.clip(((n - 1) * squares - 1) / (n - 2), 0, 1))
