"""Routing and filtering: the skew and the symmetric part of attention scores, on the data.

Shares come from traces on every window. Spectra, ranks and stability come from a stated sample of windows, lag
readings from a smaller one. Scores are taken unmasked and before the soft-cap, as M = scale Q K^T of one window.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from rheoscope.corpus import Batch, Corpus
from rheoscope.errors import Refused, RheoscopeError
from rheoscope.instruments.instrument import Instrument, LayerSites, Pass
from rheoscope.instruments.routing.kernel import kernel_readings
from rheoscope.instruments.routing.lags import lag_grid, pair_energies, signed_lag_sums
from rheoscope.instruments.routing.spectra import gaussian_readings, head_spectra, void_share
from rheoscope.instruments.sampling import mean_over_units, spread
from rheoscope.linalg import ScoreEnergies, score_energies
from rheoscope.models.attention import Attention
from rheoscope.models.view import ModelView
from rheoscope.stats import OWN, RatioOfSums, filled, windows_of_documents

SHARES = ("routing_share", "diagonal_share", "gauge_share")


class Routing(Instrument):
    """What the scores of every head are made of: shares, effective ranks, stability, and shares by lag."""

    name = "routing"
    sites = frozenset({"attention"})
    kept: ClassVar = {
        "shares": OWN,
        "share_by_lag": OWN,
        "mass_by_lag": np.add,
        "sampled": filled,
        "eigenvalues": filled,
    }

    @dataclass(frozen=True)
    class Options:
        """n_spectra: windows whose full spectra are taken, spread evenly over the text; the others give shares only.

        n_lag: windows that are read by lag. n_null: windows given to the untrained null, or more where another
        instrument of the run asks for them; 0 for no nulls.
        """

        n_spectra: int = 8
        n_lag: int = 4
        n_null: int = 2

    def __init__(self, view: ModelView, corpus: Corpus, options: Options | None = None):
        super().__init__(view, corpus, options)
        if self.options.n_spectra < 1 or self.options.n_lag < 1 or self.options.n_null < 0:
            raise RheoscopeError(
                f"{self.options} asked for; spectra and lags are read on at least one window, nulls on none or more"
            )
        self.spectra_windows = spread(corpus.n_windows, self.options.n_spectra)
        self.lags = lag_grid(corpus.window)
        self.lag_windows = spread(corpus.n_windows, self.options.n_lag)
        layers = range(view.n_layers)
        per_unit = windows_of_documents(corpus.units)
        self.shares = {
            name: [RatioOfSums((view.n_heads,), windows_per_document=per_unit) for _ in layers] for name in SHARES
        }
        per_unit = windows_of_documents(corpus.units[self.lag_windows], len(per_unit))
        self.share_by_lag = [RatioOfSums((len(self.lags),), windows_per_document=per_unit) for _ in layers]
        self.mass_by_lag = np.zeros((view.n_layers, view.n_heads, 2 * corpus.window - 1))
        sampled = (len(self.spectra_windows), view.n_layers, view.n_heads)
        self.sampled: dict[str, np.ndarray] = defaultdict(lambda: np.full(sampled, np.nan))
        self.eigenvalues = np.full((view.n_layers, view.n_heads, view.d_head), np.nan, np.complex128)

    def observe(self, layer: int, sites: LayerSites, batch: Batch) -> None:
        attention, valid = sites.attention, batch.valid.to(sites.attention.q.device)
        if attention.scores_replaced:
            raise Refused(
                f"routing asked for; the scores of layer {layer} were replaced by an edit, and routing is read off the "
                "queries and keys that it left unused: measure without routing, or without the edit"
            )
        padding = None if batch.valid.all() else valid[:, None]
        energies = score_energies(attention.q, attention.k, scale=attention.scale, valid=padding)
        windows = batch.windows.numpy()
        units = self.corpus.units[windows]
        for name, (numerator, denominator) in share_sums(energies, attention.q.dtype).items():
            self.shares[name][layer].update(units, numerator, denominator)
        rows = np.flatnonzero(np.isin(windows, self.spectra_windows))
        if len(rows):
            self._observe_spectra(layer, attention, valid, rows, np.searchsorted(self.spectra_windows, windows[rows]))
        rows = np.flatnonzero(np.isin(windows, self.lag_windows))
        if len(rows):
            self._observe_lags(layer, attention.of_rows(rows), valid[rows], units[rows])

    def _observe_spectra(
        self, layer: int, attention: Attention, valid: Tensor, rows: np.ndarray, samples: np.ndarray
    ) -> None:
        """Ranks and stability of the sampled windows; the eigenvalues of the first one are kept to be drawn."""
        q, k = attention.q[rows], attention.k[rows]
        readings, eigenvalues = head_spectra(q, k, scale=attention.scale, valid=valid[rows])
        reached = valid[rows].sum(1, keepdim=True).clamp(max=self.view.routing_capacity(layer))
        readings["utilisation"] = readings["routing_k90"] / reached
        for name, value in readings.items():
            self.sampled[name][samples, layer] = value.cpu().numpy()
        for row in np.flatnonzero(samples == 0):
            self.eigenvalues[layer] = eigenvalues[row].cpu().numpy()

    def _observe_lags(self, layer: int, attention: Attention, valid: Tensor, units: np.ndarray) -> None:
        """Where attention goes and how much of the scores is skew, at each lag, over the sampled windows."""
        q = attention.q * valid[:, None, :, None]
        k = (attention.k * valid[:, None, :, None]).repeat_interleave(attention.n_rep, 1)
        routing, score = pair_energies(q, k, self.lags)
        self.share_by_lag[layer].update(units, routing.sum(1), score.sum(1))
        for queries, block in attention.blocks():
            probs = block.probs * valid[:, None, queries, None]
            mass = signed_lag_sums(probs, n=self.corpus.window, first=queries.start).sum(0, dtype=torch.float64)
            self.mass_by_lag[layer] += mass.cpu().numpy()

    def finalize(self) -> xr.Dataset:
        """Values and standard errors on the data, and the readings of the weights beside them."""
        data = self._on_data().drop_vars(["growth_scale", "growth_scale_se"], errors="ignore")
        try:
            return data.merge(kernel_readings(self.view, self.lags, self.mass_by_lag))
        except Refused as refusal:
            return data.assign_attrs(kernel_refused=str(refusal))

    def _on_data(self) -> xr.Dataset:
        """What the forward passes gave; `growth_scale` among it, which the Gaussian null is matched by."""
        readings = {name: [layer.finalize() for layer in layers] for name, layers in self.shares.items()}
        units = self.corpus.units[self.spectra_windows]
        for name, samples in self.sampled.items():
            readings[name] = [mean_over_units(samples[:, layer], units) for layer in range(self.view.n_layers)]
        readings["routing_share_by_lag"] = [layer.finalize() for layer in self.share_by_lag]
        data: dict[str, tuple] = {}
        for name, layers in readings.items():
            dims = ("layer", "lag" if name.endswith("by_lag") else "head")
            n = {"n": int(max(estimate.n.max() for estimate in layers))}
            data[name] = dims, np.stack([estimate.value for estimate in layers]), n
            data[f"{name}_se"] = dims, np.stack([estimate.se for estimate in layers]), n
        medians = np.array([median(layer) for layer in self.sampled["routing_k90"].swapaxes(0, 1)])
        data["routing_k90_median"] = ("layer",), medians
        data["minimal_rank_share"] = (), minimal_share(medians)
        data["capacity"] = ("layer",), np.array([self._capacity(layer) for layer in range(self.view.n_layers)])
        data["eigenvalues_re"] = ("layer", "head", "component"), self.eigenvalues.real
        data["eigenvalues_im"] = ("layer", "head", "component"), self.eigenvalues.imag
        coords = {
            "layer": np.arange(self.view.n_layers),
            "head": np.arange(self.view.n_heads),
            "lag": self.lags,
        }
        return xr.Dataset(data, coords=coords, attrs={"n": data["routing_share"][2]["n"]})

    def _capacity(self, layer: int) -> int:
        return min(self.view.routing_capacity(layer), self.corpus.window)

    def null(self, few: Corpus) -> Routing:
        """Spectra and lags are read on `n_null` of the windows."""
        n_lag = min(self.options.n_lag, self.options.n_null)
        return Routing(self.view, few, replace(self.options, n_spectra=self.options.n_null, n_lag=n_lag))

    def with_nulls(self, data: xr.Dataset, null: Routing | None, run_pass: Pass, seed: int) -> xr.Dataset:
        """An untrained model of the same shape beside what was read on the data, and Gaussian queries and keys."""
        if not self.options.n_null:
            return data
        if null is not None:
            data = _beside(data, null._on_data())
        gaussian = gaussian_readings(self.corpus.window, self.view.d_head, seed=seed)
        growth = self._on_data()["growth_scale"]
        for name, (value, error) in gaussian.items():
            scale = growth if name == "stability_max_re" else 1.0
            data[f"{name}_null_gaussian"], data[f"{name}_null_gaussian_se"] = value * scale, error * scale
        return data


def _beside(data: xr.Dataset, chance: xr.Dataset) -> xr.Dataset:
    """The readings on the data with those of an untrained model beside them, under `_null` and `_null_se`."""
    found = {str(name): chance[name] for name in data if name in chance and not str(name).endswith("_se")}
    for name in ("capacity", "eigenvalues_re", "eigenvalues_im"):
        del found[name]
    nulls = {f"{name}_null": value for name, value in found.items()}
    errors = {f"{name}_null_se": chance[f"{name}_se"] for name in found if f"{name}_se" in chance}
    return data.assign(nulls | errors)


def share_sums(energies: ScoreEnergies, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Numerator and denominator of every share; both 0 for the gauge share of a routing part that is only rounding."""
    precision = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    certain = energies.routing > max(16 * precision, void_share(dtype)) * energies.score
    return {
        "routing_share": (energies.routing, energies.score),
        "diagonal_share": (energies.diagonal, energies.score),
        "gauge_share": (torch.minimum(energies.gauge, energies.routing) * certain, energies.routing * certain),
    }


def median(samples: np.ndarray) -> float:
    """Median of the samples that are defined; NaN where none is."""
    defined = samples[~np.isnan(samples)]
    return float(np.median(defined)) if defined.size else float("nan")


def minimal_share(medians: np.ndarray) -> float:
    """Fraction of layers whose median rank is 2, of those that have one; NaN where none has."""
    defined = medians[~np.isnan(medians)]
    return float(np.mean(defined == 2)) if defined.size else float("nan")
