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


class RowCoefficients:
    """Morlet coefficients of the rows of some queries at every scale a, around the first lag inside the cone, √2 a.

    NaN for a query whose row ends before the cone does. Made once, then asked field by field.
    """

    def __init__(
        self, entries: Entries, positions: Int64[np.ndarray, " position"], scales: Sequence[float], *, omega0: float
    ):
        self.own = [entries.of_row(position) for position in positions.tolist()]
        self.weights = [
            torch.from_numpy(np.stack([_weights(entries.lag[own], scale, omega0) for scale in scales], 1))
            for own in self.own
        ]

    def __call__(self, X: Float64[Tensor, "row entry"]) -> Complex128[np.ndarray, "scale row position"]:
        values = X[:, torch.from_numpy(np.concatenate(self.own))].split([len(own) for own in self.own], 1)
        found = [
            torch.complex(x @ weights.real, x @ weights.imag) for x, weights in zip(values, self.weights, strict=True)
        ]
        return torch.stack(found, -1).transpose(0, 1).numpy()


def _weights(lag: Int64[np.ndarray, " lag"], scale: float, omega0: float) -> Complex128[np.ndarray, " lag"]:
    """What the coefficient of a row is the sum of, times its entries; NaN where the cone does not fit.

    The wavelet less its mean over the row: taking the mean out of the row comes to the same.
    """
    reach = math.sqrt(2) * scale
    centre = math.ceil(reach)
    t = (lag - centre) / scale
    wavelet = (np.exp(-1j * omega0 * t) - np.exp(-(omega0**2) / 2)) * np.exp(-(t**2) / 2) / scale
    fits = lag.min() <= centre - reach and centre + reach <= lag.max()
    return wavelet - wavelet.mean() if fits else np.full(len(lag), np.nan, complex)


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
