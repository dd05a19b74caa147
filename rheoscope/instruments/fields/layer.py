"""The state of one layer's field: its snapshots, its lag profile, and the energies of its rows by scale."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Complex128, Float, Int64, UInt
from torch import Tensor

from rheoscope.corpus import Corpus
from rheoscope.instruments.fields.coherence import RowCoefficients, coherence
from rheoscope.instruments.fields.ensemble import Design, Readings, chance_readings, ensemble_readings
from rheoscope.instruments.fields.entries import Entries
from rheoscope.instruments.fields.snapshots import AllSnapshots, Ensemble, LeadingSubspace, Snapshots
from rheoscope.instruments.fields.wavelets import Morlet, RowEnergies, between_steps
from rheoscope.instruments.heap import hand_back
from rheoscope.stats import OWN, RatioOfSums, windows_of_documents
from rheoscope.stats.estimates import quotient
from rheoscope.theory.visible import visible_keys

HEAD_READINGS = ("h_star", "beta", "intensity")


@dataclass(frozen=True)
class Plan:
    """What is read of every layer that sees the same lags.

    snapshots: windows that are snapshots; sampled: those of them whose rows are transformed; rows: which rows.
    n_heads: heads read beside their mean. storage: "memory", "disk", or the number of directions kept.
    """

    corpus: Corpus
    entries: Entries
    morlet: Morlet
    snapshots: Int64[np.ndarray, " snapshot"]
    sampled: Int64[np.ndarray, " sample"]
    rows: Int64[np.ndarray, " row"]
    n_heads: int = 0
    storage: int | str = "memory"

    @property
    def units(self) -> Int64[np.ndarray, " snapshot"]:
        """The unit of every snapshot."""
        return self.corpus.units[self.snapshots]

    def windows_of_units(self, windows: Int64[np.ndarray, " window"]) -> UInt[np.ndarray, " unit"]:
        """How many of some windows each unit has."""
        return windows_of_documents(self.corpus.units[windows], int(self.units.max()) + 1)

    @cached_property
    def row_energies(self) -> RowEnergies:
        return RowEnergies(self.morlet, self.entries.support[self.rows])

    @cached_property
    def uniform_energy(self) -> Float[np.ndarray, " scale"]:
        """The energy by scale of attention that is even over all keys it may see."""
        entries = self.entries
        first, stop = visible_keys(entries.window, causal=entries.causal, width=entries.width)
        packed = torch.from_numpy(1.0 / (stop - first)[entries.query])
        by_lag, _ = self.row_energies(entries.rows(packed[None], self.rows))
        return quotient(by_lag[0].sum(1), self.row_energies.count_by_lag.sum(1))

    def empty(self) -> Snapshots:
        """Nothing of a field yet."""
        n, n_entries = len(self.snapshots), len(self.entries)
        if isinstance(self.storage, int):
            return LeadingSubspace(n, n_entries, rank=self.storage)
        return AllSnapshots(n, n_entries, on_disk=self.storage == "disk")


class Layer:
    """What is kept of one layer between batches: mergeable, and bounded by the budget."""

    kept: ClassVar = dict.fromkeys(("snapshots", "profiles", "scale_energy"), OWN) | dict.fromkeys(
        ("by_lag", "by_row", "n_transformed"), np.add
    )

    def __init__(self, plan: Plan):
        self.plan, self.entries = plan, plan.entries
        self.snapshots = [plan.empty() for _ in range(1 + plan.n_heads)]
        n_lags = len(self.entries.lags)
        per_unit = plan.windows_of_units(plan.snapshots)
        self.profiles = [RatioOfSums((n_lags,), windows_per_document=per_unit) for _ in self.snapshots]
        n_scales = len(plan.morlet.scales)
        per_unit = plan.windows_of_units(plan.sampled)
        self.scale_energy = RatioOfSums((n_scales,), windows_per_document=per_unit)
        self.by_lag = np.zeros((n_scales, n_lags))
        self.by_row = np.zeros((n_scales, len(plan.rows)))
        self.n_transformed = 0

    def observe(self, maps: Float[Tensor, "field window query key"], windows: Int64[np.ndarray, " window"]) -> None:
        """Some snapshots: the mean over heads, then every head that is read; `windows` are their numbers."""
        units = self.plan.corpus.units[windows]
        places = np.searchsorted(self.plan.snapshots, windows)
        count = np.broadcast_to(self.entries.n_kept, (len(windows), len(self.entries.lags)))
        for number, (field, snapshots) in enumerate(zip(maps, self.snapshots, strict=True)):
            packed = self.entries.packed(field)
            snapshots.update(places, packed)
            self.profiles[number].update(
                units, self.entries.by_lag(packed.cpu().double().numpy() * self.entries.kept), count
            )
            if number == 0:
                self._transform(packed, windows, units)

    def _transform(
        self,
        packed: Float[Tensor, "window entry"],
        windows: Int64[np.ndarray, " window"],
        units: Int64[np.ndarray, " window"],
    ) -> None:
        """Energies by scale of the rows of those windows that are sampled."""
        chosen = np.flatnonzero(np.isin(windows, self.plan.sampled))
        if not len(chosen):
            return
        energies = self.plan.row_energies
        by_lag, by_row = energies(self.entries.rows(packed[torch.from_numpy(chosen)].cpu(), self.plan.rows))
        count = np.broadcast_to(energies.count_by_lag.sum(1), by_lag.shape[:2])
        self.scale_energy.update(units[chosen], by_lag.sum(2), count)
        self.by_lag += by_lag.sum(0)
        self.by_row += by_row.sum(0)
        self.n_transformed += len(chosen)

    def chance(self, design: Design) -> Readings:
        """What a null is compared by."""
        ensemble, energy = self.snapshots[0].ensemble(), self.scale_energy.finalize()
        readings = {"scale_energy": energy.value, "scale_energy_se": energy.se} | self._profile(0)
        return readings | chance_readings(ensemble, self.entries, design, self._units(ensemble))

    def readings(self, design: Design, of_rows: RowCoefficients | None) -> Readings:
        """Everything about the layer as arrays; names with `head_` have one more axis in front.

        of_rows: what the coherence between positions is read from, at the scale of every window on lag that has one.
        """
        hand_back()  # what the layer before this one took: its copy in float64 is the largest thing there is
        ensemble = self.snapshots[0].ensemble()
        readings = {} if of_rows is None else _coherences(of_rows(ensemble.rows), ensemble.n)
        readings |= self._scalograms() | self._of_field(0, ensemble, design)
        n_heads = len(self.snapshots) - 1
        if n_heads:
            heads = [self._of_field(1 + head, self.snapshots[1 + head].ensemble(), design) for head in range(n_heads)]
            for name in (*HEAD_READINGS, "lag_profile"):
                readings[f"head_{name}"] = np.stack([head[name] for head in heads])
        return readings

    def _of_field(self, field: int, ensemble: Ensemble, design: Design) -> Readings:
        return ensemble_readings(ensemble, self.entries, design, self._units(ensemble)) | self._profile(field)

    def _units(self, ensemble: Ensemble) -> Int64[np.ndarray, " row"] | None:
        return None if ensemble.windows is None else self.plan.units[ensemble.windows]

    def _profile(self, field: int) -> Readings:
        profile = self.profiles[field].finalize()
        return {"lag_profile": profile.value, "lag_profile_se": profile.se}

    def _scalograms(self) -> Readings:
        energy, energies = self.scale_energy.finalize(), self.plan.row_energies
        by_position = np.full((len(self.by_row), self.entries.window), np.nan)
        by_position[:, self.plan.rows] = quotient(self.by_row, self.n_transformed * energies.count_by_row)
        return {
            "scalogram": between_steps(quotient(self.by_lag, self.n_transformed * energies.count_by_lag)),
            "scalogram_by_position": between_steps(by_position),
            "scale_energy": energy.value,
            "scale_energy_se": energy.se,
            "scale_energy_null_uniform": self.plan.uniform_energy,
        }


def _coherences(W: Complex128[np.ndarray, "scale row position"], n: int) -> Readings:
    """Coherence between positions at every scale, over n snapshots."""
    raw, corrected = (np.stack(parts) for parts in zip(*(coherence(of_scale, n) for of_scale in W), strict=True))
    return {"coherence_raw": raw, "coherence": corrected}
