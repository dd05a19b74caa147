"""Morlet scalograms of attention rows: how strong a pattern of each scale is, and where.

Coefficients are W(a, τ) = (1/a) Σ_t x(t) ψ̄((t - τ)/a), scaled so that a sinusoid of height 1 and any period gives
|W| = 1 at its own scale. Under the other usual norm, 1/√a, longer periods would stand higher for no other reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Complex, Complex128, Float, Float64, Int64
from scipy import signal
from scipy.fft import next_fast_len
from torch import Tensor

from rheoscope.stats.estimates import quotient

SUPPORT = 5  # a wavelet of scale a is smaller than 4e-6 of its height beyond 5 a
REACH = 5.3  # a wavelet passes less than 1e-6 of frequencies farther from ω0 / a than this over a
MOST_DOMINANT = 4


@dataclass(frozen=True)
class Morlet:
    """The transform at given scales: ψ(t) = π^(-1/4) (exp(i ω0 t) - exp(-ω0²/2)) exp(-t²/2), for the lags of a row.

    scales: in tokens. The period of a sinusoid that peaks at scale a is 2π a / ω0. The second term makes the mean of ψ
    exactly 0; `admissible=False` leaves it out, as published. Frequencies are those between 0 and π: W is analytic, and
    of scales below (ω0 + 3)/π, about 3, the part of the band that whole tokens do not resolve is cut off.
    """

    scales: tuple[float, ...]
    n_lags: int
    omega0: float = 6.0
    admissible: bool = True

    @property
    def periods(self) -> Float64[np.ndarray, " scale"]:
        """Period of the sinusoid that peaks at each scale."""
        return 2 * math.pi * np.array(self.scales) / self.omega0

    @property
    def least_fft(self) -> int:
        """Length with zeros behind the row, so that no wavelet reaches around the end."""
        return self.n_lags + math.ceil(SUPPORT * max(self.scales))

    def gain(self, n_fft: int) -> Float64[Tensor, "scale frequency"]:
        """Gain of every scale at the frequencies 0 … π of a transform: 2 ψ̂(aω) / max ψ̂."""
        frequency = 2 * math.pi * torch.arange(n_fft // 2 + 1, dtype=torch.float64) / n_fft
        s = torch.tensor(self.scales, dtype=torch.float64)[:, None] * frequency
        gain = 2 * torch.exp(-0.5 * (s - self.omega0) ** 2)
        if self.admissible:
            gain = gain - 2 * torch.exp(-0.5 * (s**2 + self.omega0**2))
        gain[:, 0] /= 2
        if n_fft % 2 == 0:
            gain[:, -1] /= 2
        return gain

    def coefficients(self, x: Float[Tensor, "*batch lag"]) -> Complex[Tensor, "*batch scale lag"]:
        """W(a, τ) of rows, which are 0 beyond their ends. complex64 from float32 rows."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        n_fft = next_fast_len(self.least_fft, real=True)
        product = torch.fft.rfft(x, n=n_fft)[..., None, :] * self.gain(n_fft).to(x)
        return torch.fft.ifft(product, n=n_fft)[..., : self.n_lags]

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
    """|W(a, τ)|² inside the cone, summed over the rows of one window by scale and lag, and over lags by scale and row.

    A coefficient of scale a varies slowly with τ, so it is evaluated at every `step(a)`-th lag only, at most 0.3 a
    apart: exactly, by a short inverse transform of the frequencies that the wavelet passes.
    """

    def __init__(self, morlet: Morlet, support: Int64[np.ndarray, "row 2"]):
        self.morlet, self.support = morlet, support
        steps = [step(scale) for scale in morlet.scales]
        inside = ~morlet.outside_cone(support)
        for index, (scale, every) in enumerate(zip(morlet.scales, steps, strict=True)):
            inside[:, index, (np.arange(morlet.n_lags) - first_lag(scale)) % every > 0] = False
        self.count_by_lag = inside.sum(0)
        self.count_by_row = inside.sum(2).T
        self.groups = [
            _Group.of(morlet, [index for index, own in enumerate(steps) if own == every], every, inside)
            for every in sorted(set(steps))
        ]

    def __call__(
        self, rows: Float[Tensor, "window row lag"]
    ) -> tuple[Float64[np.ndarray, "window scale lag"], Float64[np.ndarray, "window scale row"]]:
        """Energies of windows, in units of a squared attention probability; rows are centred here."""
        rows = centred_rows(rows, self.support)
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        n_scales = len(self.morlet.scales)
        by_lag = np.zeros((len(rows), n_scales, self.morlet.n_lags))
        by_row = np.zeros((len(rows), n_scales, rows.shape[1]))
        for number, window in enumerate(rows):
            for group in self.groups:
                energy = group.energies(window)
                by_lag[number, group.scales] = group.at_lags(energy.sum(0).double().cpu().numpy())
                by_row[number, group.scales] = energy.sum(2).T.double().cpu().numpy()
        return by_lag, by_row


@dataclass(frozen=True)
class _Group:
    """Scales that are evaluated equally far apart, and the frequencies of each: `first` and so many more as lags.

    The lags of a scale begin half a step inside its cone: as many before each as behind it stand for their energy.
    """

    scales: list[int]
    step: int
    n_fft: int
    first: list[int]
    gain: Complex128[Tensor, "scale frequency"]
    lags: Int64[np.ndarray, "scale point"]
    inside: Bool[Tensor, "row scale point"]
    n_lags: int

    @classmethod
    def of(cls, morlet: Morlet, scales: list[int], every: int, inside: Bool[np.ndarray, "row scale lag"]) -> _Group:
        own = Morlet(tuple(morlet.scales[i] for i in scales), morlet.n_lags, morlet.omega0, morlet.admissible)
        n_fft = -(-own.least_fft // (8 * every)) * 8 * every
        n_bins = min(n_fft // every, n_fft // 2 + 1)
        centre = np.round(morlet.omega0 / np.array(own.scales) * n_fft / (2 * math.pi)).astype(int)
        first = np.clip(centre - n_bins // 2, 0, n_fft // 2 + 1 - n_bins)
        bins = torch.from_numpy(first)[:, None] + torch.arange(n_bins)
        start = np.array([first_lag(scale) % every for scale in own.scales])[:, None]
        shift = torch.exp(2j * math.pi / n_fft * bins * torch.from_numpy(start))
        lags = start + np.arange(0, morlet.n_lags, every)
        beyond = np.zeros((len(inside), len(scales), every), bool)
        padded = np.concatenate([inside[:, scales], beyond], 2)
        points = torch.from_numpy(np.take_along_axis(padded, lags[None], 2))
        return cls(
            scales, every, n_fft, first.tolist(), own.gain(n_fft).gather(1, bins) * shift, lags, points, morlet.n_lags
        )

    def at_lags(self, values: Float64[np.ndarray, "scale point"]) -> Float64[np.ndarray, "scale lag"]:
        """Values of the group at their lags; 0 between them."""
        out = np.zeros((len(values), self.lags.max() + self.step))
        np.put_along_axis(out, self.lags, values, 1)
        return out[:, : self.n_lags]

    def energies(self, rows: Float[Tensor, "row lag"]) -> Float[Tensor, "row scale point"]:
        """|W|² inside the cone at the group's lags; 0 outside."""
        spectrum = torch.fft.rfft(rows, n=self.n_fft)
        gain = self.gain.to(spectrum) / self.step
        passed = spectrum.new_empty(len(rows), *gain.shape)
        for index, first in enumerate(self.first):
            torch.mul(spectrum[:, first : first + gain.shape[1]], gain[index], out=passed[:, index])
        W = torch.fft.ifft(passed, n=self.n_fft // self.step)[..., : self.inside.shape[2]]
        parts = torch.view_as_real(W).square_()
        return (parts[..., 0] + parts[..., 1]).mul_(self.inside.to(rows.device))


def first_lag(scale: float) -> int:
    """The first lag that is evaluated: half a step inside the cone, which begins at √2 a."""
    return math.ceil(math.sqrt(2) * scale) + step(scale) // 2


def step(scale: float) -> int:
    """Distance of the lags at which a scale is evaluated: a power of 2, so short that |W|² has no detail in between."""
    return 2 ** max(0, math.floor(math.log2(math.pi / (2 * REACH) * scale)))


def between_steps(values: Float64[np.ndarray, "scale lag"]) -> Float64[np.ndarray, "scale lag"]:
    """A scalogram with the lags between those evaluated filled in by straight lines; NaN outside stays."""
    filled = values.copy()
    for row in filled:
        known = np.flatnonzero(np.isfinite(row))
        if len(known) > 1:
            within = np.arange(known[0], known[-1] + 1)
            row[within] = np.interp(within, known, row[known])
    return filled


def default_scales(window: int) -> tuple[float, ...]:
    """Scales 2 … L/4 in 19 steps per five octaves: 2^linspace(1, 6, 20) for windows of 256."""
    octaves = math.log2(window / 4) - 1
    return tuple((2 ** np.linspace(1, 1 + octaves, round(19 * octaves / 5) + 1)).tolist())


def least_window(scale: float) -> int:
    """The shortest window whose last row has a coefficient of this scale free of the ends: 2 √2 a lags and the sink."""
    return math.ceil(2 * math.sqrt(2) * scale) + 2


def dominant_scales(
    energy: Float64[np.ndarray, " scale"],
    null: Float64[np.ndarray, " scale"],
    scales: Float64[np.ndarray, " scale"],
    *,
    relative_error: Float64[np.ndarray, " scale"] | float = 0.0,
) -> Float64[np.ndarray, " rank"]:
    """Scales at which energy stands out from a null, the most outstanding first; NaN where there are fewer than four.

    Local maxima of energy / null that exceed 1 and rise above the dips on both sides by two standard errors of that
    ratio. An end of the range is no maximum: what rises to it may rise further. Where the null has no energy at all
    (uniform attention), local maxima of the energy itself.
    """
    ratio = quotient(energy, null) if np.any(null > 0) else energy
    with np.errstate(divide="ignore", invalid="ignore"):
        height = np.log(ratio)
    if not np.isfinite(height).all():
        return _ranked(scales, np.zeros(0, int))
    peaks, found = signal.find_peaks(height, prominence=0)
    error = np.broadcast_to(relative_error, height.shape)[peaks]
    clear = (found["prominences"] > 2 * error) & (energy > null)[peaks]
    return _ranked(scales, peaks[clear][np.argsort(-height[peaks[clear]], kind="stable")])


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
