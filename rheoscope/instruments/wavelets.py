"""Morlet scalograms of attention rows: how strong a pattern of each scale is, and where.

Coefficients are W(a, τ) = (1/a) Σ_t x(t) ψ̄((t - τ)/a), scaled so that a sinusoid of height 1 and any period gives
|W| = 1 at its own scale. Under the other usual norm, 1/√a, longer periods would stand higher for no other reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Complex, Float, Float64, Int64
from scipy.fft import next_fast_len
from torch import Tensor

SUPPORT = 5  # a wavelet of scale a is smaller than 4e-6 of its height beyond 5 a
ROWS_AT_ONCE = 1024
MOST_DOMINANT = 4


@dataclass(frozen=True)
class Morlet:
    """The transform at given scales: ψ(t) = π^(-1/4) (exp(i ω0 t) - exp(-ω0²/2)) exp(-t²/2), for the lags of a row.

    scales: in tokens. The period of a sinusoid that peaks at scale a is 2π a / ω0. The second term makes the mean of ψ
    exactly 0; `admissible=False` leaves it out, as published. Frequencies are non-negative: W is analytic.
    """

    scales: tuple[float, ...]
    n_lags: int
    omega0: float = 6.0
    admissible: bool = True

    @property
    def periods(self) -> Float64[np.ndarray, " scale"]:
        """Period of the sinusoid that peaks at each scale."""
        return 2 * math.pi * np.array(self.scales) / self.omega0

    @cached_property
    def n_fft(self) -> int:
        """Length with zeros behind the row, so that no wavelet reaches around the end."""
        return next_fast_len(self.n_lags + math.ceil(SUPPORT * max(self.scales)), real=True)

    @cached_property
    def response(self) -> Float64[Tensor, "scale frequency"]:
        """Gain of every scale at the frequencies of the transform: 2 ψ̂(aω) / max ψ̂ for ω > 0, and 0 below."""
        frequency = 2 * math.pi * torch.arange(self.n_fft, dtype=torch.float64) / self.n_fft
        s = torch.tensor(self.scales, dtype=torch.float64)[:, None] * frequency
        gain = 2 * torch.exp(-0.5 * (s - self.omega0) ** 2)
        if self.admissible:
            gain = gain - 2 * torch.exp(-0.5 * (s**2 + self.omega0**2))
        gain[:, self.n_fft // 2 + 1 :] = 0
        gain[:, 0] /= 2
        if self.n_fft % 2 == 0:
            gain[:, self.n_fft // 2] /= 2
        return gain

    def coefficients(self, x: Float[Tensor, "*batch lag"]) -> Complex[Tensor, "*batch scale lag"]:
        """W(a, τ) of rows, which are 0 beyond their ends. complex64 from float32 rows."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        spectrum = torch.fft.rfft(x, n=self.n_fft)
        spectrum = torch.nn.functional.pad(spectrum, (0, self.n_fft - spectrum.shape[-1]))
        product = spectrum[..., None, :] * self.response.to(x)
        return torch.fft.ifft(product)[..., : self.n_lags]

    def outside_cone(self, support: Int64[np.ndarray, "row 2"]) -> Bool[np.ndarray, "row scale lag"]:
        """True where W(a, τ) of a row feels an end of that row: nearer to it than √2 a, or no entry at all."""
        lag = np.arange(self.n_lags)
        reach = math.sqrt(2) * np.array(self.scales)[:, None]
        first, last = support[:, :1, None], support[:, 1:, None]
        return (lag < first + reach) | (lag > last - reach)


def centred_rows(
    rows: Float[Tensor, "*batch row lag"], support: Int64[np.ndarray, "row 2"]
) -> Float[Tensor, "*batch row lag"]:
    """Rows less their mean over the entries they have; 0 elsewhere, so that uniform attention becomes exactly 0."""
    lag = np.arange(rows.shape[-1])
    visible = torch.from_numpy((lag >= support[:, :1]) & (lag <= support[:, 1:])).to(rows.device)
    count = visible.sum(-1).clamp(min=1)
    mean = (rows * visible).sum(-1) / count
    return (rows - mean[..., None]) * visible


class RowEnergies:
    """Σ |W(a, τ)|² inside the cone over the rows of one window, by scale and lag, and by scale and row."""

    def __init__(self, morlet: Morlet, support: Int64[np.ndarray, "row 2"]):
        self.morlet, self.support = morlet, support
        inside = ~morlet.outside_cone(support)
        self.count_by_lag = inside.sum(0)
        self.count_by_row = inside.sum(2).T
        self.inside = torch.from_numpy(inside)

    def __call__(
        self, rows: Float[Tensor, "window row lag"]
    ) -> tuple[Float64[np.ndarray, "window scale lag"], Float64[np.ndarray, "window scale row"]]:
        """Energies of windows, in units of a squared attention probability; rows are centred here."""
        rows = centred_rows(rows, self.support)
        by_lag, by_row = [], []
        self.inside = self.inside.to(rows.device)
        for window in rows:
            of_lag, of_row = 0, []
            for part, inside in zip(window.split(ROWS_AT_ONCE), self.inside.split(ROWS_AT_ONCE), strict=True):
                W = self.morlet.coefficients(part)
                energy = (W.real.square() + W.imag.square()) * inside
                of_lag = of_lag + energy.sum(0)
                of_row.append(energy.sum(2).T)
            by_lag.append(of_lag)
            by_row.append(torch.cat(of_row, -1))
        return tuple(torch.stack(parts).double().cpu().numpy() for parts in (by_lag, by_row))


def default_scales(window: int) -> tuple[float, ...]:
    """Scales 2 … L/4 in 19 steps per five octaves: 2^linspace(1, 6, 20) for windows of 256."""
    octaves = math.log2(window / 4) - 1
    return tuple((2 ** np.linspace(1, 1 + octaves, round(19 * octaves / 5) + 1)).tolist())


def least_window(scale: float) -> int:
    """The shortest window whose last row has a coefficient of this scale free of the ends: 2 √2 a lags and the sink."""
    return math.ceil(2 * math.sqrt(2) * scale) + 2


def dominant_scales(
    energy: Float64[np.ndarray, " scale"], null: Float64[np.ndarray, " scale"], scales: Float64[np.ndarray, " scale"]
) -> Float64[np.ndarray, " rank"]:
    """Scales at which energy stands out from a null, the most outstanding first; NaN where there are fewer than four.

    Local maxima of energy / null that exceed 1. An end of the range is no maximum: what rises to it may rise further.
    Where the null has no energy at all, local maxima of the energy itself.
    """
    ratio = (
        energy if not np.any(null > 0) else np.divide(energy, null, out=np.full_like(energy, np.nan), where=null > 0)
    )
    above = energy > null
    middle = ratio[1:-1]
    peak = np.flatnonzero((middle > ratio[:-2]) & (middle >= ratio[2:]) & above[1:-1]) + 1
    return _ranked(scales, peak[np.argsort(-ratio[peak], kind="stable")])


def strongest_scales(
    energy: Float64[np.ndarray, " scale"], scales: Float64[np.ndarray, " scale"]
) -> Float64[np.ndarray, " rank"]:
    """The published choice: the four scales of most energy under the norm 1/√a, whatever a null has."""
    return _ranked(scales, np.argsort(-energy * scales, kind="stable"))


def _ranked(scales: np.ndarray, places: np.ndarray) -> np.ndarray:
    found = np.full(MOST_DOMINANT, np.nan)
    chosen = places[:MOST_DOMINANT]
    found[: len(chosen)] = scales[chosen]
    return found
