"""Routing and filtering: the skew and the symmetric part of attention scores, on the data.

Shares come from traces on every window. Spectra, ranks and stability come from a stated sample of windows, lag
readings from a smaller one. Scores are taken unmasked and before the soft-cap, as M = scale Q K^T of one window.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from ..corpus import Batch, Corpus
from ..linalg import (
    centred_factors,
    effective_ranks,
    filtering_singular_values,
    routing_singular_values,
    score_eigenvalues,
    score_energies,
    score_factors,
    score_singular_values,
    split_factors,
    stability,
)
from ..models.attention import Attention
from ..models.view import ModelView
from ..stats import Estimate, RatioOfSums, ratio_of_sums
from .instrument import Instrument, LayerSites
from .lags import pair_sums, signed_lag_sums

SHARES = {
    "routing_share": ("routing", "score"),
    "diagonal_share": ("diagonal", "score"),
    "gauge_share": ("gauge", "routing"),
}
LAG_WINDOWS = 8  # windows whose full maps are read by lag


class Routing(Instrument):
    """What the scores of every head are made of: shares, effective ranks, stability, and shares by lag.

    n_spectra: windows whose full spectra are taken, spread evenly over the text; all others give shares only.
    """

    name = "routing"
    sites = frozenset({"attention"})

    def __init__(self, view: ModelView, corpus: Corpus, *, n_spectra: int = 32, n_lag_windows: int = LAG_WINDOWS):
        self.view, self.corpus = view, corpus
        self.spectra_windows = spread(corpus.n_windows, n_spectra)
        self.lag_windows = spread(corpus.n_windows, n_lag_windows)
        layers = range(view.n_layers)
        per_unit = np.bincount(corpus.units)
        self.shares = {
            name: [RatioOfSums((view.n_heads,), windows_per_document=per_unit) for _ in layers] for name in SHARES
        }
        per_unit = np.bincount(corpus.units[self.lag_windows], minlength=len(per_unit))
        self.share_by_lag = [RatioOfSums((corpus.window,), windows_per_document=per_unit) for _ in layers]
        self.mass_by_lag = np.zeros((view.n_layers, view.n_heads, 2 * corpus.window - 1))
        self.sampled: dict[str, list[list[np.ndarray]]] = defaultdict(lambda: [[] for _ in layers])
        self.eigenvalues: list[np.ndarray | None] = [None for _ in layers]

    def observe(self, layer: int, sites: LayerSites, batch: Batch) -> None:
        attention, valid = sites.attention, batch.valid.to(sites.attention.q.device)
        energies = score_energies(attention.q, attention.k, scale=attention.scale, valid=valid[:, None])
        windows = batch.windows.numpy()
        units = self.corpus.units[windows]
        for name, (part, whole) in SHARES.items():
            numerator, denominator = (getattr(energies, e).cpu().numpy() for e in (part, whole))
            self.shares[name][layer].update(units, numerator, denominator)
        rows = np.flatnonzero(np.isin(windows, self.spectra_windows))
        if len(rows):
            self._observe_spectra(layer, attention, valid, rows, first=windows[rows[0]] == self.spectra_windows[0])
        rows = np.flatnonzero(np.isin(windows, self.lag_windows))
        if len(rows):
            self._observe_lags(layer, attention.of_rows(rows), valid[rows], units[rows])

    def _observe_spectra(self, layer: int, attention: Attention, valid: Tensor, rows: np.ndarray, first: bool) -> None:
        """Ranks and stability of the sampled windows; the eigenvalues of the first one are kept to be drawn."""
        q, k = attention.q[rows], attention.k[rows]
        T = score_factors(q, k, scale=attention.scale, valid=valid[rows][:, None])
        eigenvalues = score_eigenvalues(T)
        for name, value in spectral_readings(T, eigenvalues).items():
            self.sampled[name][layer].append(value.cpu().numpy())
        if first:
            self.eigenvalues[layer] = eigenvalues[0].cpu().numpy()

    def _observe_lags(self, layer: int, attention: Attention, valid: Tensor, units: np.ndarray) -> None:
        """Where attention goes and how much of the scores is skew, at each lag, over the sampled windows."""
        pairs = (valid[:, :, None] & valid[:, None, :]).to(attention.q.dtype)
        skew, whole = 0.0, 0.0
        for head in range(self.view.n_heads):  # one map at a time: no copy of a layer's maps is made
            scores = attention.scores_of_head(head) * pairs
            whole += pair_sums(scores.square()).double()
            skew += pair_sums(((scores - scores.mT) / 2).square()).double()
        self.share_by_lag[layer].update(units, skew, whole)
        mass = signed_lag_sums(attention.probs * pairs[:, None]).double().sum(0)
        self.mass_by_lag[layer] += mass.cpu().numpy()

    def samples(self, name: str) -> np.ndarray:
        """A sampled reading of every window, layer and head: [window layer head]."""
        return np.stack([np.concatenate(parts) for parts in self.sampled[name]], 1)

    def finalize(self) -> xr.Dataset:
        """Values and standard errors of the data part; kernel and nulls are added by `routing_dataset`."""
        readings = {name: [layer.finalize() for layer in layers] for name, layers in self.shares.items()}
        units = self.corpus.units[self.spectra_windows]
        for name in self.sampled:
            samples = self.samples(name)
            readings[name] = [mean_over_units(samples[:, layer], units) for layer in range(self.view.n_layers)]
        readings["routing_share_by_lag"] = [layer.finalize() for layer in self.share_by_lag]
        data: dict[str, tuple[tuple[str, ...], np.ndarray]] = {}
        for name, layers in readings.items():
            dims = ("layer", "lag" if name.endswith("by_lag") else "head")
            data[name] = dims, np.stack([estimate.value for estimate in layers])
            data[f"{name}_se"] = dims, np.stack([estimate.se for estimate in layers])
        ranks = self.samples("routing_k90")
        medians = np.nanmedian(ranks, axis=(0, 2))
        data["routing_k90_median"] = ("layer",), medians
        data["minimal_rank_share"] = (), np.mean(medians == 2)
        data["capacity"] = ("layer",), np.full(self.view.n_layers, min(2 * self.view.d_head, self.corpus.window))
        clouds = np.stack(self.eigenvalues)
        data["eigenvalues_re"] = ("layer", "head", "component"), clouds.real
        data["eigenvalues_im"] = ("layer", "head", "component"), clouds.imag
        coords = {
            "layer": np.arange(self.view.n_layers),
            "head": np.arange(self.view.n_heads),
            "lag": np.arange(self.corpus.window),
        }
        return xr.Dataset(data, coords=coords, attrs={"n": int(readings["routing_share"][0].n.max())})


def spectral_readings(T: Float[Tensor, "*batch row column"], eigenvalues: Tensor) -> dict[str, Float[Tensor, "*batch"]]:
    """Effective ranks of every part, utilisation and stability from factors T and the eigenvalues of the scores."""
    spectra = {
        ("routing", ""): routing_singular_values(T),
        ("routing", "_gauge_removed"): routing_singular_values(centred_factors(T)),
        ("filtering", ""): filtering_singular_values(T),
        ("score", ""): score_singular_values(T),
    }
    readings = {}
    for (part, suffix), values in spectra.items():
        for rank, value in effective_ranks(values)._asdict().items():
            readings[f"{part}_{rank}{suffix}"] = value
    readings["utilisation"] = readings["routing_k90"] / T.shape[-1]
    stable = stability(eigenvalues)
    readings["stability_max_re"], readings["stability_share_positive"] = stable.max_re, stable.share_positive
    T_Q, T_K = split_factors(T)
    readings["growth_scale"] = (T_K.mT @ T_Q).square().sum((-2, -1)).sqrt()
    return readings


def mean_over_units(samples: np.ndarray, units: np.ndarray) -> Estimate:
    """Mean of one sampled reading over windows, with its error over the units they belong to; NaN readings left out."""
    totals, counts = (np.zeros((units.max() + 1, *samples.shape[1:])) for _ in range(2))
    np.add.at(totals, units, np.nan_to_num(samples))
    np.add.at(counts, units, ~np.isnan(samples))
    return ratio_of_sums(totals, counts)


def spread(n_windows: int, n_sampled: int) -> np.ndarray:
    """Numbers of `n_sampled` windows, evenly spread over all of them: [sample]."""
    return np.unique(np.linspace(0, n_windows - 1, min(n_sampled, n_windows)).round().astype(int))
