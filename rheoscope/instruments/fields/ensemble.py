"""Readings of one field's ensemble of snapshots: intensity, spectra, ranks, decay, held-out error and modes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from rheoscope.instruments.fields.entries import Entries
from rheoscope.instruments.fields.pod import (
    CONSTANT,
    LEVELS,
    HeldOut,
    Spectrum,
    h_star,
    held_out,
    lag_grams,
    lag_window,
    modes,
    power_law,
    spectrum,
    subset_spectrum,
)
from rheoscope.instruments.fields.snapshots import Ensemble
from rheoscope.stats.estimates import quotient, ratio_of_sums

GROUPS = 8  # of documents at most, left out one at a time for standard errors
MOST_SUBSETS = 4  # of snapshots that share the work of one count in the curve H*(N)
LIMITED = 0.6  # of the number of snapshots: above, H* is bounded by them
Readings = dict[str, np.ndarray]


@dataclass(frozen=True)
class Design:
    """What the ensembles of all layers are read with."""

    bands: tuple[float, ...]  # scales of the windows on lag, ∞ for the whole field last
    window: str
    n_modes: int
    n_bins: int
    counts: tuple[int, ...]  # numbers of snapshots of the curve H*(N)
    ranks: tuple[int, ...]  # numbers of modes at which reconstruction errors are given

    def weights(self, entries: Entries) -> Float64[np.ndarray, "band lag"]:
        return np.stack([lag_window(self.window, band, entries.lags) for band in self.bands])


def ensemble_readings(
    ensemble: Ensemble, entries: Entries, design: Design, units: Int64[np.ndarray, " row"] | None
) -> Readings:
    """All readings of one field. Standard errors and held-out errors are NaN where rows are not snapshots."""
    weights = design.weights(entries)
    readings = intensities(ensemble, entries)
    X, dropped = _kept_and_dropped(ensemble.rows, entries)
    grams, energies = lag_grams(X, entries.bounds.tolist(), torch.from_numpy(weights))
    found = spectrum(grams, ensemble.n)
    kept = entries.kept
    discarded = weights**2 @ entries.by_lag(ensemble.discarded * kept) / ensemble.n
    floor = CONSTANT * (weights**2 @ entries.by_lag(ensemble.mean**2 * kept))
    eigenvalues = found.eigenvalues.numpy()
    readings["eigenvalues"] = eigenvalues
    readings["h_star"] = _ranks(eigenvalues, discarded, floor)
    readings["h_star_limited"] = (readings["h_star"] > LIMITED * ensemble.n).astype(np.float64)
    total = eigenvalues.sum(1) + discarded
    readings["discarded_share"] = quotient(discarded, total)
    readings["reconstruction_error"] = quotient(
        (_tails(eigenvalues) + discarded[:, None])[:, _clipped(design.ranks, found)], total[:, None]
    )
    readings |= _decay(eigenvalues, ensemble.n, total > floor)
    readings |= _everything(grams[-1] + dropped @ dropped.T, ensemble)
    readings |= mode_readings(X, found, ensemble.n, entries, design)
    if units is None:
        del readings["coefficients"]  # its rows are directions, not snapshots
    readings |= intensity_errors(X, energies, ensemble.mean * kept, entries, units)
    readings |= _resampled(grams, ensemble, design, floor, units)
    return readings


def chance_readings(
    ensemble: Ensemble, entries: Entries, design: Design, units: Int64[np.ndarray, " row"] | None
) -> Readings:
    """What is read of a null: intensities with their errors, and the curve H*(N)."""
    readings = intensities(ensemble, entries)
    X, _ = _kept_and_dropped(ensemble.rows, entries)
    weights = design.weights(entries)
    grams, energies = lag_grams(X, entries.bounds.tolist(), torch.from_numpy(weights))
    floor = CONSTANT * (weights**2 @ entries.by_lag(ensemble.mean**2 * entries.kept))
    readings |= intensity_errors(X, energies, ensemble.mean * entries.kept, entries, units)
    return readings | {"h_star_by_count": _by_count(grams, design, floor, 0 if units is None else len(units))}


def intensities(ensemble: Ensemble, entries: Entries) -> Readings:
    """Σ_s ‖u_s‖² / Σ_s ‖A_s‖² of the field, by lag, and of the whole map; shares of what is taken out of the field."""
    squares = torch.zeros(len(ensemble.mean), dtype=torch.float64)
    for row in ensemble.rows:
        squares.addcmul_(row, row)  # no second copy of the rows, nor of a part: memory is slower than arithmetic
    variance = squares.numpy() + ensemble.discarded
    energy = variance + ensemble.n * ensemble.mean**2
    kept = entries.kept
    return {
        "intensity": quotient((variance * kept).sum(), (energy * kept).sum()),
        "intensity_by_lag": quotient(entries.by_lag(variance * kept), entries.by_lag(energy * kept)),
        "intensity_everything": quotient(variance.sum(), energy.sum()),
        "sink_variance_share": quotient(variance[entries.key == 0].sum(), variance.sum()),
        "first_rows_variance_share": quotient(variance[entries.query < entries.first_row].sum(), variance.sum()),
        "lag_profile_everything": quotient(entries.by_lag(ensemble.mean), np.diff(entries.bounds)),
    }


def intensity_errors(
    X: Float64[Tensor, "row entry"],
    energies: Float64[Tensor, "lag row"],
    mean: Float64[np.ndarray, " entry"],
    entries: Entries,
    units: Int64[np.ndarray, " row"] | None,
) -> Readings:
    """Standard errors of both intensities over documents; `energies` are those of X by lag."""
    if units is None:
        return {"intensity_se": np.array(np.nan), "intensity_by_lag_se": np.full(len(entries.lags), np.nan)}
    shared, spans = torch.from_numpy(mean), zip(entries.bounds[:-1], entries.bounds[1:], strict=True)
    across = torch.stack([X[:, begin:end] @ shared[begin:end] for begin, end in spans], 1).numpy()
    variance, rest = energies.T.numpy(), 2 * across + entries.by_lag(mean**2)
    _, place = np.unique(units, return_inverse=True)
    sums = np.zeros((2, place.max() + 1, len(entries.lags)))
    for total, part in zip(sums, (variance, variance + rest), strict=True):
        np.add.at(total, place, part)
    return {
        "intensity_se": ratio_of_sums(*sums.sum(2)).se,
        "intensity_by_lag_se": ratio_of_sums(*sums).se,
    }


def mode_readings(
    X: Float64[Tensor, "row entry"], found: Spectrum, n: int, entries: Entries, design: Design
) -> Readings:
    """Leading modes under every window: coefficients, pictures, profiles over lag, and the lags at which those peak."""
    coefficients, pictures, profiles = [], [], []
    weights = torch.from_numpy(np.repeat(design.weights(entries), np.diff(entries.bounds), 1))
    together = max(1, len(X) // design.n_modes)  # windows whose modes take no more memory than X
    for parts in zip(*(part.split(together) for part in (*found, weights)), strict=True):
        phi, of_snapshots = modes(X, Spectrum(*parts[:2]), n, window=parts[2], n_modes=design.n_modes)
        coefficients.append(of_snapshots.numpy())
        pictures.append(entries.picture(phi.numpy(), design.n_bins))
        profiles.append(quotient(entries.by_lag(phi.numpy()), entries.n_kept))
    profile = np.concatenate(profiles)
    # A lag with a few entries has a large mean by chance: only lags that a quarter of the rows have can be a peak.
    size = np.where(np.isfinite(profile) & (entries.n_kept >= entries.window / 4), np.abs(profile), -1.0)
    peak = np.where(size.max(-1) > 0, entries.lags[size.argmax(-1)], np.nan)
    return {
        "coefficients": np.concatenate(coefficients),
        "mode": np.concatenate(pictures),
        "mode_lag_profile": profile,
        "mode_peak_lag": peak,
    }


def _resampled(
    grams: Float64[Tensor, "band row row"],
    ensemble: Ensemble,
    design: Design,
    floor: Float64[np.ndarray, " band"],
    units: Int64[np.ndarray, " row"] | None,
) -> Readings:
    """Readings that need the snapshots one by one: errors over documents, the curve H*(N), held-out errors."""
    n_bands = len(design.bands)
    readings = {
        "h_star_se": np.full((n_bands, len(LEVELS)), np.nan),
        "beta_se": np.full(n_bands, np.nan),
        "h_star_by_count": _by_count(grams, design, floor, 0 if units is None else len(units)),
        "held_out_error": np.full((n_bands, len(design.ranks)), np.nan),
        "held_out_at_h_star": np.full((n_bands, len(LEVELS)), np.nan),
    }
    if units is None:
        return readings
    _, place = np.unique(units, return_inverse=True)
    readings["h_star_se"], readings["beta_se"] = _jackknife(grams, place, floor)
    halves = [held_out(grams, place % 2 == side) for side in (0, 1)] if _halves(place) else []
    if halves:
        readings["held_out_error"] = quotient(
            sum(half.left_out[:, np.minimum(design.ranks, half.left_out.shape[1] - 1)] for half in halves),
            sum(half.total for half in halves)[:, None],
        )
        readings["held_out_at_h_star"] = _held_out_at_h_star(halves, floor)
    return readings


def _by_count(
    grams: Float64[Tensor, "band row row"], design: Design, floor: Float64[np.ndarray, " band"], n: int
) -> Float64[np.ndarray, "band count level"]:
    """H* of fewer snapshots, out of n; NaN for more than there are."""
    curve = np.full((len(design.bands), len(design.counts), len(LEVELS)), np.nan)
    for index, count in enumerate(design.counts):
        parts = max(1, min(MOST_SUBSETS, n // count))
        chosen = [_spread(n, count, part, parts) for part in range(parts) if count <= n]
        if chosen:
            ranks = [_ranks(subset_spectrum(grams, subset), 0.0, floor) for subset in chosen]
            curve[:, index] = np.mean(ranks, 0)
    return curve


def _halves(place: Int64[np.ndarray, " row"]) -> bool:
    """Whether both halves of the documents have the four snapshots that modes need."""
    return min((place % 2 == 0).sum(), (place % 2 == 1).sum()) >= 4


def _held_out_at_h_star(
    halves: list[HeldOut], floor: Float64[np.ndarray, " band"]
) -> Float64[np.ndarray, "band level"]:
    """Share of the held-out energy that is left out by as many modes as the other half needs for its own level."""
    left = 0
    for half in halves:
        ranks = _ranks(half.trained, 0.0, floor).astype(int)
        left = left + np.take_along_axis(half.left_out, ranks, 1)
    return quotient(left, sum(half.total for half in halves)[:, None])


def _jackknife(
    grams: Float64[Tensor, "band row row"], place: Int64[np.ndarray, " row"], floor: Float64[np.ndarray, " band"]
) -> tuple[Float64[np.ndarray, "band level"], Float64[np.ndarray, " band"]]:
    """Standard errors of H* and β from leaving out a group of documents at a time, as many snapshots each time.

    Both change with the number of snapshots: where groups cannot be equal, the larger remainders are thinned evenly.
    """
    group = balanced_groups(place)
    remainders = [np.flatnonzero(group != left_out) for left_out in range(group.max() + 1)]
    n_groups, fewest = len(remainders), min(map(len, remainders))
    if n_groups < 2 or fewest < 2:
        return np.full((len(grams), len(LEVELS)), np.nan), np.full(len(grams), np.nan)
    ranks, slopes = [], []
    for rows in remainders:
        values = subset_spectrum(grams, rows[_spread(len(rows), fewest, 0, 1)])
        ranks.append(_ranks(values, 0.0, floor))
        slopes.append([power_law(of_band, fewest).beta for of_band in values])
    scale = (n_groups - 1) / np.sqrt(n_groups)
    return tuple(scale * np.std(samples, axis=0, ddof=1) for samples in (ranks, slopes))


def balanced_groups(documents: Int64[np.ndarray, " row"]) -> Int64[np.ndarray, " row"]:
    """The group of every row: whole documents, in GROUPS groups, or up to three fewer if those are more alike."""
    sizes = np.bincount(documents)
    most = min(GROUPS, len(sizes))
    choices = []
    for n in range(most, max(most - 4, 1), -1):
        group, filled = np.zeros(len(sizes), np.int64), np.zeros(n)
        for document in np.argsort(-sizes, kind="stable"):
            group[document] = filled.argmin()
            filled[group[document]] += sizes[document]
        choices.append((np.ptp(filled), group))
    _, best = min(choices, key=lambda choice: choice[0], default=(0, np.zeros(len(sizes), np.int64)))
    return best[documents]


def _decay(eigenvalues: Float64[np.ndarray, "band component"], n: int, varies: Bool[np.ndarray, " band"]) -> Readings:
    """β with its interval and range by band, and T = 1/β."""
    fits = [power_law(values if some else values[:0], n) for values, some in zip(eigenvalues, varies, strict=True)]
    names = ("beta", "beta_low", "beta_high", "beta_last", "beta_least", "beta_most")
    readings = {name: np.array(column, np.float64) for name, column in zip(names, zip(*fits, strict=True), strict=True)}
    return readings | {"spectral_temperature": quotient(1.0, readings["beta"])}


def _everything(gram: Float64[Tensor, "row row"], ensemble: Ensemble) -> Readings:
    """H* of the whole map without a window, first rows and sink included."""
    values = spectrum(gram, ensemble.n).eigenvalues.numpy()
    floor = CONSTANT * (ensemble.mean**2).sum()
    return {"h_star_everything": _ranks(values, ensemble.discarded.sum() / ensemble.n, floor)}


def _kept_and_dropped(rows: Float64[Tensor, "row entry"], entries: Entries) -> tuple[Tensor, Tensor]:
    """Rows with zeros for what is not in the field, in place, and what was there."""
    out = torch.from_numpy(np.flatnonzero(~entries.kept))
    dropped = rows[:, out]
    rows[:, out] = 0
    return rows, dropped


def _ranks(eigenvalues, discarded, floor) -> Float64[np.ndarray, "*band level"]:
    return np.stack([h_star(eigenvalues, level, discarded=discarded, floor=floor) for level in LEVELS], -1)


def _tails(eigenvalues: Float64[np.ndarray, "band component"]) -> Float64[np.ndarray, "band rank"]:
    held = np.cumsum(eigenvalues[:, ::-1], 1)[:, ::-1]
    return np.concatenate([held, np.zeros_like(held[:, :1])], 1)


def _clipped(ranks: tuple[int, ...], found: Spectrum) -> np.ndarray:
    return np.minimum(ranks, found.eigenvalues.shape[-1])


def _spread(n: int, count: int, part: int, parts: int) -> Int64[np.ndarray, " chosen"]:
    """`count` of n snapshots, evenly spread, out of every `parts`-th one beginning with `part`."""
    own = np.arange(part, n, parts)
    return own[np.unique(np.linspace(0, len(own) - 1, count).round().astype(int))]
