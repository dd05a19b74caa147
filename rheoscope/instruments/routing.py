"""Routing and filtering: the skew and the symmetric part of attention scores, on the data.

Shares come from traces on every window. Spectra, ranks and stability come from a stated sample of windows, lag
readings from a smaller one. Scores are taken unmasked and before the soft-cap, as M = scale Q K^T of one window.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float64
from torch import Tensor

from ..corpus import Batch, Corpus
from ..errors import Refused
from ..linalg import score_energies
from ..models.attention import Attention
from ..models.untrained import untrained
from ..models.view import ModelView
from ..stats import Estimate, RatioOfSums, ratio_of_sums
from .instrument import Instrument, LayerSites, Pass
from .kernel import kernel_readings
from .lags import lag_grid, nearest_lag, pair_energies, signed_lag_sums
from .spectra import gaussian_readings, head_spectra

SHARES = {
    "routing_share": ("routing", "score"),
    "diagonal_share": ("diagonal", "score"),
    "gauge_share": ("gauge", "routing"),
}


class Routing(Instrument):
    """What the scores of every head are made of: shares, effective ranks, stability, and shares by lag."""

    name = "routing"
    sites = frozenset({"attention"})

    @dataclass(frozen=True)
    class Options:
        """n_spectra: windows whose full spectra are taken, spread evenly over the text; the others give shares only.

        n_lag: windows that are read by lag. n_null: windows given to the untrained null; 0 for no nulls.
        """

        n_spectra: int = 32
        n_lag: int = 4
        n_null: int = 3

    def __init__(self, view: ModelView, corpus: Corpus, options: Options | None = None):
        super().__init__(view, corpus, options)
        self.spectra_windows = spread(corpus.n_windows, self.options.n_spectra)
        self.lags = lag_grid(corpus.window)
        self.lag_windows = spread(corpus.n_windows, self.options.n_lag)
        layers = range(view.n_layers)
        per_unit = np.bincount(corpus.units)
        self.shares = {
            name: [RatioOfSums((view.n_heads,), windows_per_document=per_unit) for _ in layers] for name in SHARES
        }
        per_unit = np.bincount(corpus.units[self.lag_windows], minlength=len(per_unit))
        self.share_by_lag = [RatioOfSums((len(self.lags),), windows_per_document=per_unit) for _ in layers]
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
        readings, eigenvalues = head_spectra(q, k, scale=attention.scale, valid=valid[rows])
        for name, value in readings.items():
            self.sampled[name][layer].append(value.cpu().numpy())
        if first:
            self.eigenvalues[layer] = eigenvalues[0].cpu().numpy()

    def _observe_lags(self, layer: int, attention: Attention, valid: Tensor, units: np.ndarray) -> None:
        """Where attention goes and how much of the scores is skew, at each lag, over the sampled windows."""
        q = attention.q * valid[:, None, :, None]
        k = (attention.k * valid[:, None, :, None]).repeat_interleave(attention.n_rep, 1)
        routing, score = pair_energies(q, k, self.lags)
        self.share_by_lag[layer].update(units, routing.sum(1), score.sum(1))
        probs = attention.probs * valid[:, None, :, None]
        mass = signed_lag_sums(probs, causal=attention.causal).sum(0, dtype=torch.float64)
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
            "lag": self.lags,
        }
        return xr.Dataset(data, coords=coords, attrs={"n": int(readings["routing_share"][0].n.max())})

    def with_nulls(self, data: xr.Dataset, run_pass: Pass, seed: int) -> xr.Dataset:
        """The weights' own readings, an untrained model of the same shape, and Gaussian queries and keys beside."""
        try:
            data = data.merge(kernel_readings(self.view, self.lags, self._mass_on_grid()))
        except Refused as refusal:
            data.attrs["kernel_refused"] = str(refusal)
        if self.options.n_null:
            few = self.corpus.of_windows(spread(self.corpus.n_windows, self.options.n_null))
            null = Routing(self.view, few, replace(self.options, n_spectra=few.n_windows))
            with untrained(self.view, seed):
                run_pass(few, [null], task="untrained null")
            chance = null.finalize()
            for name in _with_null(data):
                data[f"{name}_null"] = chance[name]
                if f"{name}_se" in chance:
                    data[f"{name}_null_se"] = chance[f"{name}_se"]
            gaussian = gaussian_readings(self.corpus.window, self.view.d_head, seed=seed)
            for name, (value, error) in gaussian.items():
                scale = data["growth_scale"] if name == "stability_max_re" else 1.0
                data[f"{name}_null_gaussian"], data[f"{name}_null_gaussian_se"] = value * scale, error * scale
        return data.drop_vars([name for name in data if name.startswith("growth_scale")])

    def _mass_on_grid(self) -> Float64[np.ndarray, "layer head lag"]:
        """Attention mass by signed lag, gathered at the nearest lag of the grid."""
        n = (self.mass_by_lag.shape[-1] + 1) // 2
        gathered = np.zeros((*self.mass_by_lag.shape[:-1], len(self.lags)))
        np.add.at(gathered, (..., nearest_lag(np.arange(1 - n, n), self.lags)), self.mass_by_lag)
        return gathered


def _with_null(data: xr.Dataset) -> list[str]:
    """Quantities that an untrained model gives a null for: those of the data, not of the weights, without errors."""
    skipped = ("kernel_", "eigenvalues_", "capacity", "growth_scale")
    return [name for name in map(str, data) if not name.startswith(skipped) and not name.endswith("_se")]


def mean_over_units(samples: np.ndarray, units: np.ndarray) -> Estimate:
    """Mean of one sampled reading over windows, with its error over the units they belong to; NaN readings left out."""
    totals, counts = (np.zeros((units.max() + 1, *samples.shape[1:])) for _ in range(2))
    np.add.at(totals, units, np.nan_to_num(samples))
    np.add.at(counts, units, ~np.isnan(samples))
    return ratio_of_sums(totals, counts)


def spread(n_windows: int, n_sampled: int) -> np.ndarray:
    """Numbers of `n_sampled` windows, evenly spread over all of them: [sample]."""
    return np.unique(np.linspace(0, n_windows - 1, min(n_sampled, n_windows)).round().astype(int))
