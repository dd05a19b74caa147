"""The state of one layer's field: its snapshots, its lag profile, and the energies of its rows by scale."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from rheoscope.corpus import Corpus
from rheoscope.instruments.fields.coherence import coherence, row_coefficients
from rheoscope.instruments.fields.ensemble import Design, Readings, ensemble_readings
from rheoscope.instruments.fields.entries import Entries
from rheoscope.instruments.fields.snapshots import AllSnapshots, Ensemble, LeadingSubspace, Snapshots
from rheoscope.instruments.fields.wavelets import Morlet, RowEnergies, between_steps
from rheoscope.stats import OWN, RatioOfSums
from rheoscope.stats.estimates import quotient

HEAD_READINGS = ("h_star", "beta", "intensity")


class Layer:
    """What is kept of one layer between batches: mergeable, and bounded by the budget."""

    kept: ClassVar = dict.fromkeys(("snapshots", "profiles", "scale_energy"), OWN) | dict.fromkeys(
        ("by_lag", "by_row", "n_transformed"), np.add
    )

    def __init__(
        self,
        corpus: Corpus,
        entries: Entries,
        morlet: Morlet,
        sampled: Int64[np.ndarray, " sample"],
        n_heads: int,
        rank: int | None,
    ):
        self.corpus, self.entries, self.morlet, self.sampled = corpus, entries, morlet, sampled
        self.rank = rank
        self.snapshots = [_snapshots(corpus.n_windows, len(entries), rank) for _ in range(1 + n_heads)]
        n_lags = len(entries.lags)
        units = corpus.units
        per_unit = np.bincount(units)
        self.profiles = [RatioOfSums((n_lags,), windows_per_document=per_unit) for _ in range(1 + n_heads)]
        self.row_energies = RowEnergies(morlet, entries.support)
        per_unit = np.bincount(units[sampled], minlength=len(per_unit))
        self.scale_energy = RatioOfSums((len(morlet.scales),), windows_per_document=per_unit)
        self.by_lag = np.zeros((len(morlet.scales), n_lags))
        self.by_row = np.zeros((len(morlet.scales), entries.window))
        self.n_transformed = 0

    def observe(self, probs: Float[Tensor, "window head query key"], windows: Int64[np.ndarray, " window"]) -> None:
        mean = probs.mean(1, dtype=torch.promote_types(probs.dtype, torch.float32))
        fields = [mean, *(probs[:, head] for head in range(len(self.snapshots) - 1))]
        units = self.corpus.units[windows]
        count = np.broadcast_to(self.entries.n_kept, (len(windows), len(self.entries.lags)))
        for field, snapshots, profile in zip(fields, self.snapshots, self.profiles, strict=True):
            packed = self.entries.packed(field)
            snapshots.update(windows, packed)
            profile.update(units, self.entries.by_lag(packed.cpu().double().numpy() * self.entries.kept), count)
            if field is mean:
                self._transform(packed, windows, units)

    def _transform(
        self,
        packed: Float[Tensor, "window entry"],
        windows: Int64[np.ndarray, " window"],
        units: Int64[np.ndarray, " window"],
    ) -> None:
        """Energies by scale of the rows of those windows that are sampled."""
        rows = np.flatnonzero(np.isin(windows, self.sampled))
        if not len(rows):
            return
        by_lag, by_row = self.row_energies(self.entries.rows(packed[torch.from_numpy(rows)].cpu()))
        count = np.broadcast_to(self.row_energies.count_by_lag.sum(1), by_lag.shape[:2])
        self.scale_energy.update(units[rows], by_lag.sum(2), count)
        self.by_lag += by_lag.sum(0)
        self.by_row += by_row.sum(0)
        self.n_transformed += len(rows)

    def readings(self, design: Design, positions: Int64[np.ndarray, " position"]) -> Readings:
        """Everything about the layer as arrays; names with `head_` have one more axis in front."""
        ensemble = self.snapshots[0].ensemble()
        readings = (
            self._coherences(ensemble, design, positions) | self._scalograms() | self._of_field(0, ensemble, design)
        )
        n_heads = len(self.snapshots) - 1
        if n_heads:
            heads = [self._of_field(1 + head, self.snapshots[1 + head].ensemble(), design) for head in range(n_heads)]
            for name in (*HEAD_READINGS, "lag_profile"):
                readings[f"head_{name}"] = np.stack([head[name] for head in heads])
        return readings

    def _of_field(self, field: int, ensemble: Ensemble, design: Design) -> Readings:
        units = None if ensemble.windows is None else self.corpus.units[ensemble.windows]
        readings = ensemble_readings(ensemble, self.entries, design, units)
        profile = self.profiles[field].finalize()
        return readings | {"lag_profile": profile.value, "lag_profile_se": profile.se}

    def _scalograms(self) -> Readings:
        energy = self.scale_energy.finalize()
        uniform = self._uniform()
        return {
            "scalogram": between_steps(quotient(self.by_lag, self.n_transformed * self.row_energies.count_by_lag)),
            "scalogram_by_position": quotient(self.by_row, self.n_transformed * self.row_energies.count_by_row),
            "scale_energy": energy.value,
            "scale_energy_se": energy.se,
            "scale_energy_null_uniform": uniform,
        }

    def _uniform(self) -> Float[np.ndarray, " scale"]:
        """The energy by scale of attention that is even over all keys it may see."""
        n, entries = self.entries.window, self.entries
        visible = np.minimum(np.arange(n) + 1, entries.width) if entries.causal else np.full(n, n)
        packed = torch.from_numpy(1.0 / visible[entries.query])
        by_lag, _ = self.row_energies(entries.rows(packed[None]))
        return quotient(by_lag[0].sum(1), self.row_energies.count_by_lag.sum(1))

    def _coherences(self, ensemble: Ensemble, design: Design, positions: Int64[np.ndarray, " position"]) -> Readings:
        """Coherence between positions under the scale of every window on lag that has one."""
        scales = [band for band in design.bands if np.isfinite(band)]
        if not scales:
            return {}
        W = row_coefficients(ensemble.rows, self.entries, positions, scales, omega0=self.morlet.omega0)
        found = [coherence(of_scale, ensemble.n) for of_scale in W]
        raw, corrected = (np.stack(parts) for parts in zip(*found, strict=True))
        return {"coherence_raw": raw, "coherence": corrected}


def _snapshots(n_windows: int, n_entries: int, rank: int | None) -> Snapshots:
    if rank is None:
        return AllSnapshots(n_windows, n_entries)
    return LeadingSubspace(n_windows, n_entries, rank=rank)
