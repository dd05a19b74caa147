"""Readings of a few sampled windows: full maps, cosines after an attention step, geometry, and bounds on outputs."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rheoscope.corpus import Corpus
from rheoscope.instruments.instrument import LayerSites
from rheoscope.instruments.sampling import mean_over_units, spread
from rheoscope.instruments.sinks.geometry import sink_geometry
from rheoscope.instruments.sinks.mixing import density_correlation, linear_step, mixing_cosines
from rheoscope.instruments.sinks.outputs import output_bounds
from rheoscope.instruments.sinks.pattern_costs import least_pattern_costs
from rheoscope.instruments.sinks.patterns import Sinks, counted_queries, eligible_keys, queries_per_key
from rheoscope.instruments.sinks.value_norms import ValueNorms
from rheoscope.models.attention import Attention
from rheoscope.models.view import ModelView
from rheoscope.stats import filled

if TYPE_CHECKING:
    from rheoscope.instruments.sinks.sinks import SinkReadings

DIMS = {  # of one window and layer
    "sink_count": ("head",),
    "value_margin": ("head",),
    "bound_assumption_share": ("head",),
    "bound_violations": ("head",),
    "cosine_measured": ("mixing",),
    "cosine_predicted": ("mixing",),
    "sink_cosine_mean": ("stream",),
    "sink_cosine_max": ("stream",),
    "sink_cosine_nonpositive": ("stream",),
    "half_space_margin": ("stream",),
    "sink_hull_distance": ("stream",),
    "sink_outside_hull": ("stream",),
    "pattern_cost": ("pattern", "size"),
}


class SinkSamples:
    """Readings per sampled window, layer and whatever else; means over windows and examples come out."""

    kept: ClassVar = {"read": filled, "points": filled, "unsolved": np.add}

    def __init__(self, view: ModelView, corpus: Corpus, options: SinkReadings.Options, values: ValueNorms):
        self.view, self.corpus, self.options, self.values = view, corpus, options, values
        self.read: dict[str, dict[int, dict[int, np.ndarray]]] = defaultdict(lambda: defaultdict(dict))
        self.points: dict[int, dict[str, np.ndarray]] = defaultdict(dict)
        self.unsolved = 0
        self.cost_layers = spread(view.n_layers, options.n_cost_layers) if options.n_cost_layers else ()

    def observe(
        self, layer: int, sites: LayerSites, row: int, window: int, sinks: Sinks, *, solve: bool, index: int
    ) -> None:
        """One sampled window at one layer, in a row of the batch; `solve`: with margins, hulls and bounds."""
        length = int(self.corpus.lengths[window])
        attention = sites.attention.of_rows(np.array([row]))
        found = {"sink_count": self._sink_count(attention, length)}
        if sites.resid_pre is not None and sites.attn_out is not None and length > 2:
            x, step = (site[row, :length] for site in (sites.resid_pre, sites.attn_out))
            found |= mixing_cosines(self.view, layer, x, step, attention.v[0, :, :length])
            found["density_correlation"] = density_correlation(attention, x, step)
        if solve and length > 2:
            key = int(torch.bincount(sinks.key[row], sinks.mass[row].nan_to_num()).argmax())
            streams = (sites.resid_pre, sites.attn_in)
            found |= sink_geometry([None if site is None else site[row, :length] for site in streams], key)
            if index == 0 and layer in self.cost_layers and sites.attn_in is not None:
                x = sites.attn_in[row, :length].double().cpu().numpy()
                found |= least_pattern_costs(x, self.corpus.tokens[window, :length], key)
            found |= self._bounds(layer, attention, sites.attention.z[row, :, :length], sinks, row, first=index == 0)
            self.unsolved += _unsolved(found, present=[stream is not None for stream in streams])
        for name, value in found.items():
            self.read[name][index][layer] = np.asarray(value, np.float64)

    def _sink_count(self, attention: Attention, length: int) -> Float[np.ndarray, " head"]:
        """Number of keys, wherever they stand, whose mean mass exceeds the threshold."""
        valid = (torch.arange(attention.q.shape[2], device=attention.q.device) < length)[None]
        counted = counted_queries(attention, valid)
        sums = attention.q.new_zeros(*attention.q.shape[:2], attention.k.shape[2], dtype=torch.float64)
        for queries, block in attention.blocks():
            sums[..., : block.k.shape[2]] += (block.probs * counted[:, None, queries, None]).sum(2)
        mass = sums / queries_per_key(attention, counted)[:, None]
        sinks = (mass > self.options.threshold) & eligible_keys(attention, valid)[:, None]
        return sinks.sum(-1)[0].cpu().numpy()

    def _bounds(
        self, layer: int, attention: Attention, z: Float[Tensor, "head query d"], sinks: Sinks, row: int, *, first: bool
    ) -> dict[str, np.ndarray]:
        """Bounds of outputs by the mass that is not on the sink; points of the first window are kept to be drawn."""
        length = z.shape[1]
        repeated = attention.v[0, :, :length].repeat_interleave(attention.n_rep, 0)
        values, outputs = self.values.reduced(layer, repeated), self.values.reduced(layer, z)
        if values is None or outputs is None:
            return {}
        found = output_bounds(values, outputs, sinks.attended[row, :, :length], sinks.key[row])
        if first:
            self.points[layer] = found.points
        return found.readings

    def readings(self, sampled: np.ndarray) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
        """Means over the sampled windows with their errors, and the points of one window."""
        data: dict[str, tuple[tuple[str, ...], np.ndarray]] = {}
        for name, by_window in self.read.items():
            windows = sorted(by_window)
            nothing = np.full_like(next(iter(by_window[windows[0]].values())), np.nan)
            layers = range(self.view.n_layers)
            samples = np.stack([[by_window[w].get(layer, nothing) for layer in layers] for w in windows])
            units = np.unique(self.corpus.units[sampled[windows]], return_inverse=True)[1]
            estimate = mean_over_units(samples, units)
            dims = ("layer", *DIMS.get(name, ()))
            data[name], data[f"{name}_se"] = (dims, estimate.value), (dims, estimate.se)
        for name in next(iter(self.points.values()), {}):
            stacked = np.stack([self.points[layer][name] for layer in range(self.view.n_layers)])
            data[name] = ("layer", "head", "query"), stacked
        return data

    def attrs(self) -> dict[str, object]:
        """How many margins the solver did not settle, and whether the closed form applies."""
        return {
            "unsolved_margins": self.unsolved,
            "closed_form": "holds" if linear_step(self.view) else "does not apply: a norm acts on what attention adds",
        }


def _unsolved(found: dict[str, np.ndarray], *, present: list[bool]) -> int:
    """How many margins and distances were asked for and not settled, of the streams that the model has."""
    asked = [found[name][present] for name in ("half_space_margin", "sink_hull_distance") if name in found]
    return sum(int(np.isnan(values).sum()) for values in (*asked, found.get("value_margin", np.zeros(0))))
