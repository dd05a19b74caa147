"""Coherence between positions: whether two rows of attention fluctuate together at one scale."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Complex128, Float64, Int64
from torch import Tensor

from rheoscope.instruments.fields.entries import Entries

MOST_POSITIONS = 32


def coherence_positions(entries: Entries) -> Int64[np.ndarray, " position"]:
    """At most 32 queries, evenly spread over the rows of the field."""
    rows = np.flatnonzero(entries.support[:, 1] >= entries.support[:, 0])
    return rows[np.unique(np.linspace(0, len(rows) - 1, min(MOST_POSITIONS, len(rows))).round().astype(int))]


def row_coefficients(
    X: Float64[Tensor, "row entry"],
    entries: Entries,
    positions: Int64[np.ndarray, " position"],
    scales: Sequence[float],
    *,
    omega0: float,
) -> Complex128[np.ndarray, "scale row position"]:
    """Morlet coefficient of the row of each position at every scale a, around the first lag inside the cone, √2 a.

    NaN for positions whose row ends before the cone does.
    """
    coefficients = np.empty((len(scales), len(X), len(positions)), complex)
    for index, position in enumerate(positions):
        own = np.flatnonzero((entries.query == position) & entries.kept)
        lag = entries.lag[own]
        weights = np.stack([_weights(lag, scale, omega0) for scale in scales], 1)
        coefficients[:, :, index] = (X[:, torch.from_numpy(own)].numpy() @ weights).T
    return coefficients


def _weights(lag: Int64[np.ndarray, " lag"], scale: float, omega0: float) -> Complex128[np.ndarray, " lag"]:
    """What the coefficient of a row is the sum of, times its entries; NaN where the cone does not fit.

    The wavelet less its mean over the row: taking the mean out of the row comes to the same.
    """
    reach = math.sqrt(2) * scale
    centre = math.ceil(reach)
    t = (lag - centre) / scale
    wavelet = (np.exp(-1j * omega0 * t) - np.exp(-(omega0**2) / 2)) * np.exp(-(t**2) / 2) / scale
    fits = lag.min() <= centre - reach and centre + reach <= lag.max()
    return wavelet - wavelet.mean() if fits else np.full(len(lag), np.nan)


def coherence(
    W: Complex128[np.ndarray, "row position"], n: int
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
