"""Sinks and diagonals: where attention goes when it has nothing to do, and what that does to the tokens.

Masses, switches and value norms come from every window, from a few columns of each map. Full maps, cosines, margins
and bounds come from a stated sample of windows (sink_samples.py), spread evenly over the text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from rheoscope.corpus import Batch, Corpus
from rheoscope.errors import Refused, RheoscopeError
from rheoscope.instruments.instrument import Instrument, LayerSites, Pass
from rheoscope.instruments.sampling import spread
from rheoscope.instruments.sinks.map_entries import map_entries
from rheoscope.instruments.sinks.pattern_costs import PATTERNS, SIZES, head_costs, pattern_slopes
from rheoscope.instruments.sinks.patterns import FEWEST_QUERIES, SKIPPED, Sinks, found_sinks, query_sums
from rheoscope.instruments.sinks.samples import SinkSamples
from rheoscope.instruments.sinks.switches import Switches
from rheoscope.instruments.sinks.value_norms import ValueNorms
from rheoscope.models.taps import refusal
from rheoscope.models.view import ModelView
from rheoscope.stats import OWN, RatioOfSums, windows_of_documents
from rheoscope.stats.estimates import quotient
from rheoscope.theory.smoothing import MIXING
from rheoscope.theory.visible import visible_keys

FEWEST_TOKENS = 2  # of a window in which some query has a choice
RATIOS = (
    "sink_mass",
    "diagonal_mass",
    "previous_mass",
    "hard_switch_share",
    "soft_switch_share",
    "sink_at_first_share",
    "sink_position",
    "value_ratio",
    "learned_sink_mass",
)
WITH_NULL = ("sink_mass", "diagonal_mass", "previous_mass", "hard_switch_share", "soft_switch_share", "value_ratio")


class SinkReadings(Instrument):
    """What every head does when it is off, which heads switch, and how attention smooths the tokens."""

    name = "sinks"
    kept: ClassVar = dict.fromkeys(("ratios", "first", "samples", "switches"), OWN)

    @dataclass(frozen=True)
    class Options:
        """threshold: mean mass from which a head counts as sink or diagonal. off: mass from which a query is off.

        n_first: keys at the start whose masses are all shown. n_probes: rows of each map in which a sink elsewhere is
        looked for. n_sampled: windows read with full maps, spread evenly over the text; 0 for none. n_geometry: those
        among them with solver-based margins. n_cost_layers: layers, evenly spread, whose tokens are asked what patterns
        cost, on one window. n_null: windows given to the untrained null, at least; 0 for no nulls.
        """

        threshold: float = 0.3
        off: float = 0.9
        n_first: int = 4
        n_probes: int = 16
        n_sampled: int = 4
        n_geometry: int = 2
        n_cost_layers: int = 6
        n_null: int = 3

    def __init__(self, view: ModelView, corpus: Corpus, options: Options | None = None):
        super().__init__(view, corpus, options)
        self.readable = corpus.lengths >= FEWEST_TOKENS
        if not self.readable.any():
            raise RheoscopeError(
                f"sinks asked for on windows of fewer than {FEWEST_TOKENS} tokens, where no query has a choice: "
                "give longer windows"
            )
        self.sites = frozenset({"attention"}) | {
            site for site in ("resid_pre", "attn_in", "attn_out") if refusal(view, site) is None
        }
        self.values = ValueNorms(view)
        sampled = np.flatnonzero(self.readable)
        self.sampled = sampled[spread(len(sampled), self.options.n_sampled)] if self.options.n_sampled else sampled[:0]
        layers = range(view.n_layers)
        per_unit = windows_of_documents(corpus.units)
        self.ratios = [RatioOfSums((len(RATIOS), view.n_heads), windows_per_document=per_unit) for _ in layers]
        n_first = min(self.options.n_first, corpus.window)
        self.first = [RatioOfSums((view.n_heads, n_first), windows_per_document=per_unit) for _ in layers]
        self.samples = SinkSamples(view, corpus, self.options, self.values)
        self.switches = Switches(view, corpus, self.sampled)

    def observe(self, layer: int, sites: LayerSites, batch: Batch) -> None:
        attention = sites.attention
        valid = batch.valid.to(attention.q.device)
        entries = map_entries(attention)
        options = self.options
        sinks = found_sinks(attention, entries, valid, n_first=options.n_first, n_probes=options.n_probes)
        norms = self.values.of_values(layer, attention.v)
        sums = query_sums(entries, sinks, valid, off=options.off) | _sink_sums(sinks, norms, valid)
        windows = batch.windows.numpy()
        self._add(layer, sums, sinks, windows)
        for row in np.flatnonzero(np.isin(windows, self.sampled)):
            index = int(np.flatnonzero(self.sampled == windows[row])[0])
            length = int(batch.valid[row].sum())
            late = entries.diagonal(0)[row, :, :length]
            self.switches.add(layer, index, sinks.attended[row, :, :length], late)
            few = index in spread(len(self.sampled), options.n_geometry) if options.n_geometry else False
            self.samples.observe(layer, sites, row, int(windows[row]), sinks, solve=bool(few), index=index)

    def _add(self, layer: int, sums: dict, sinks: Sinks, windows: np.ndarray) -> None:
        """Sums of one layer and batch into the accumulators; windows too short to be read count as 0 / 0."""
        units, kept = self.corpus.units[windows], self.readable[windows]
        nothing = np.zeros((len(windows), self.view.n_heads))
        pairs = [sums.get(name) for name in RATIOS]
        tops, belows = (
            np.stack([nothing if pair is None else pair[part].double().cpu().numpy() for pair in pairs], 1)
            for part in range(2)
        )
        keep = kept[:, None, None]
        undefined = ~np.isfinite(tops) | ~np.isfinite(belows) | ~keep
        self.ratios[layer].update(units, np.where(undefined, 0, tops), np.where(undefined, 0, belows))
        self.first[layer].update(units, *(np.where(keep, part.double().cpu().numpy(), 0) for part in sinks.first))

    def finalize(self) -> xr.Dataset:
        """Values and errors of the shared pass; nulls are added by `with_nulls`."""
        ratios = [layer.finalize() for layer in self.ratios]
        data: dict[str, tuple[tuple[str, ...], np.ndarray]] = {}
        for place, name in enumerate(RATIOS):
            value, se = (np.stack([getattr(e, part)[place] for e in ratios]) for part in ("value", "se"))
            if np.isfinite(value).any():
                data[name], data[f"{name}_se"] = (("layer", "head"), value), (("layer", "head"), se)
        first = [layer.finalize() for layer in self.first]
        data["first_key_mass"] = ("layer", "head", "key"), np.stack([estimate.value for estimate in first])
        data["first_key_mass_se"] = ("layer", "head", "key"), np.stack([estimate.se for estimate in first])
        for kind in ("sink", "diagonal"):
            mass = data[f"{kind}_mass"][1]
            defined = np.isfinite(mass)
            data[f"{kind}_rate"] = ("layer",), quotient((mass > self.options.threshold).sum(1), defined.sum(1))
        if len(self.sampled):
            data |= self.samples.readings(self.sampled) | self.switches.readings()
        coords = {
            "layer": np.arange(self.view.n_layers),
            "head": np.arange(self.view.n_heads),
            "key": np.arange(data["first_key_mass"][1].shape[2]),
        }
        if any("mixing" in dims for dims, _ in data.values()):
            coords["mixing"] = np.array(MIXING)
        if any("stream" in dims for dims, _ in data.values()):
            coords["stream"] = np.array(["raw", "normed"])
        if "pattern_cost" in data:
            coords |= {"pattern": np.array(PATTERNS), "size": np.array(SIZES)}
        dataset = xr.Dataset(data, coords=coords, attrs=self._attrs(ratios))
        return dataset.merge(pattern_slopes(dataset.pattern_cost)) if "pattern_cost" in data else dataset

    def _attrs(self, ratios: list) -> dict[str, object]:
        """What a reader must know of how the readings came about."""
        first = np.unique(self.corpus.tokens[self.readable, 0])
        attrs = {
            "n": int(ratios[0].n.max()),
            "first_token": "the same in all windows" if len(first) == 1 else f"one of {len(first)}, by window",
            "windows_left_out": int((~self.readable).sum()),
            "sampled_windows": len(self.sampled),
            "fewest_queries": FEWEST_QUERIES,
        }
        missing = sorted({"resid_pre", "attn_in", "attn_out"} - self.sites)
        if missing:
            attrs["cosines_refused"] = refusal(self.view, missing[0])
        if self.values.refused:
            attrs["values_refused"] = self.values.refused
        return attrs | (self.samples.attrs() if len(self.sampled) else {})

    def null(self, few: Corpus) -> SinkReadings | None:
        if not (few.lengths >= FEWEST_TOKENS).any():
            return None
        return SinkReadings(self.view, few, replace(self.options, n_sampled=0))

    def with_nulls(self, data: xr.Dataset, null: SinkReadings | None, run_pass: Pass, seed: int) -> xr.Dataset:
        """Norms of the weights; an untrained model of the same shape, and uniform attention, beside the masses."""
        try:
            data = data.merge(head_costs(self.view))
        except Refused as refused:
            data = data.assign_attrs(head_costs_refused=str(refused))
        if null is None:
            return data
        chance = null.finalize()
        for name in (name for name in WITH_NULL if name in data and name in chance):
            data[f"{name}_null"], data[f"{name}_null_se"] = chance[name], chance[f"{name}_se"]
        lengths = self.corpus.lengths[self.readable]
        by_width = {w: uniform_masses(lengths, causal=self.view.causal, width=w) for w in set(self.view.windows)}
        even = [by_width[width] for width in self.view.windows]
        for name in even[0]:
            data[f"{name}_null_uniform"] = ("layer",), np.array([of_layer[name] for of_layer in even])
        return data


def _sink_sums(
    sinks: Sinks, norms: Float[Tensor, "batch head key"] | None, valid: Bool[Tensor, "batch key"]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Where the sink stands and how long its value is beside those of the other keys."""
    one = torch.ones_like(sinks.mass)
    sums = {"sink_at_first_share": ((sinks.key == 0).to(one), one), "sink_position": (sinks.key.to(one), one)}
    if norms is not None:
        others = valid[:, None].expand_as(norms).scatter(2, sinks.key[..., None], value=False)
        mean = (norms * others).sum(-1) / others.sum(-1)
        sums["value_ratio"] = norms.gather(2, sinks.key[..., None])[..., 0], mean
    return sums


def uniform_masses(lengths: np.ndarray, *, causal: bool, width: int | None = None) -> dict[str, float]:
    """Masses of the first key, of the diagonal and of the previous token if attention were spread evenly.

    Over the keys that a query may see, `width` being that of a sliding window.
    """
    totals = np.zeros((2, 2))
    for length in lengths:
        first, stop = visible_keys(int(length), causal=causal, width=width)
        share, query = 1 / (stop - first), np.arange(length)
        for row, counted in enumerate(((first == 0) & (query >= causal), query >= SKIPPED)):
            totals[row] += share[counted].sum(), counted.sum()
    sink, late = (top / below if below else np.nan for top, below in totals)
    return {"sink_mass": sink, "diagonal_mass": late, "previous_mass": 0.0 if width == 1 else late}
