"""Steering: how attention and the feed-forward network turn the directions of the stream, layer by layer.

Every token is a direction u = x/‖x‖ on the sphere and a length. A layer moves x to x + A + F. All readings but two are
made of x, A and F as they come by: the defect evaluates the feed-forward network once more, at x, on every
`defect_stride`-th position, and its first-order form on a few windows. Means leave the first token of each window out,
whose length dwarfs all others; the siblings `_all` count it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from rheoscope.corpus import Batch, Corpus
from rheoscope.errors import RheoscopeError
from rheoscope.instruments.instrument import Instrument, LayerSites, Pass
from rheoscope.instruments.sampling import spread
from rheoscope.instruments.steering.steps import exact, spherical_diversity, step_readings, sums_over
from rheoscope.instruments.steering.strongest import strongest_cosine
from rheoscope.models.attention import Attention
from rheoscope.models.field import ffn_derivative, ffn_field, layer_is_parallel, refuse_field
from rheoscope.models.placement import has_numbers
from rheoscope.models.view import ModelView
from rheoscope.stats import OWN, Counts, RatioOfSums, windows_of_documents

EPSILON = 1e-6  # added to ‖Φ(x)‖ in the defect, so that a field of 0 has the defect 0
FEWEST_POSITIONS = 8  # of a window, at which the defect is read where windows are short
TOP_POSITIONS = 512  # of a window, about, at which the largest weights are looked for: longer ones are read in steps
TOKEN_READINGS = (
    "angular_deficit",
    "angular_deficit_chord",
    "angular_deficit_null_orthogonal",
    "ffn_deficit",
    "ffn_deficit_chord",
    "attention_radial_share",
    "ffn_radial_share",
    "resid_norm",
    "attention_norm",
    "ffn_norm",
    "turning",
    "turning_attention",
    "turning_ffn",
)
DIVERSITIES = ("diversity_pre", "diversity_mid", "diversity_post")
CHANGES = {"diversity_change_attention": (0, 1), "diversity_change_ffn": (1, 2)}


class Steering(Instrument):
    """Deficits, radial shares, norms, turning, diversity and defect of every layer, and what the top weights carry."""

    name = "steering"
    kept: ClassVar = dict.fromkeys(("tokens", "diversity", "defects", "first_order", "top", "depth"), OWN) | {
        "sum_errors": np.maximum,
        "n_tokens": np.add,
    }

    @dataclass(frozen=True)
    class Options:
        """defect_stride: the defect is read on every so-manieth position, on 8 of a whole window at least; 0: not at
        all, as inside an edit of the FFN.

        n_first_order: windows for the derivative of the FFN, on the same positions. n_top_k: windows for the mixture
        of the `top_k` largest attention weights. n_null: windows given to the untrained null, at least. 0: not at all.
        """

        defect_stride: int = 16
        n_first_order: int = 2
        n_top_k: int = 2
        top_k: int = 16
        n_null: int = 3

    def __init__(self, view: ModelView, corpus: Corpus, options: Options | None = None):
        super().__init__(view, corpus, options)
        refuse_field(view, "steering")
        if min(self.options.defect_stride, self.options.n_first_order, self.options.n_top_k) < 0:
            raise RheoscopeError(f"{self.options} asked for; numbers of windows and strides are 0 or more")
        if self.options.top_k < 1:
            raise RheoscopeError(f"the top {self.options.top_k} attention weights asked for; ask for at least 1")
        self.sites = frozenset(
            {"resid_pre", "attn_out", "ffn_out"} | ({"attention"} if self.options.n_top_k else set())
        )
        self.parallel = [layer_is_parallel(view, layer) for layer in range(view.n_layers)]
        n = corpus.n_windows
        derived = self.options.defect_stride and has_numbers(view.model)  # packed weights have no derivative to take
        self.first_order_windows = spread(n, self.options.n_first_order if derived else 0)
        self.top_k_windows = spread(n, self.options.n_top_k)
        everywhere = np.arange(n)
        self.tokens = self._means(TOKEN_READINGS, everywhere)
        self.diversity = self._means((*DIVERSITIES, *CHANGES), everywhere)
        self.defects = self._means(("defect", "defect_ratio", "defect_displacement"), everywhere)
        self.first_order = self._means(("defect_first_order", "defect_same_tokens"), self.first_order_windows)
        self.top = self._means(("top_k_cosine",), self.top_k_windows)
        self.depth = DepthTrend(view.n_layers, windows_of_documents(corpus.units))
        self.sum_errors = np.zeros(view.n_layers)
        self.n_tokens = {"tokens": 0, "defects": 0}

    def _means(self, names: Sequence[str], windows: Int[np.ndarray, " window"]) -> Means:
        units = self.corpus.units
        per_unit = windows_of_documents(units[windows], int(units.max()) + 1)
        return Means(names, self.view.n_layers, per_unit)

    def observe(self, layer: int, sites: LayerSites, batch: Batch) -> None:
        x, A, F = (exact(site) for site in (sites.resid_pre, sites.attn_out, sites.ffn_out))
        counted = scopes(batch.valid.to(x.device))
        windows = batch.windows.numpy()
        units = self.corpus.units[windows]
        between = x + A
        places = (x, between, between + F)
        self._check_sum(layer, places[-1], exact(sites.resid_post), counted[1])
        readings = step_readings(x, A, F, parallel=self.parallel[layer])
        stacked = torch.stack([readings[name] for name in TOKEN_READINGS], -1)
        sums = [sums_over(stacked, scope) for scope in counted]
        self.tokens.update(layer, units, sums)
        self.depth.update(layer, units, readings["angular_deficit"], counted[0])
        self._observe_diversity(layer, places, counted, units)
        if self.options.defect_stride:
            self._observe_defect(layer, x, A, F, counted, windows)
        rows = np.flatnonzero(np.isin(windows, self.top_k_windows))
        if len(rows):
            self._observe_top(layer, sites.attention.of_rows(rows), [scope[rows] for scope in counted], units[rows])
        if layer == 0:
            self.n_tokens["tokens"] += int(counted[0].sum())

    def _check_sum(self, layer: int, after: Tensor, resid_post: Tensor, valid: Tensor) -> None:
        """Largest error of x + A + F against the stream that the model hands on, relative to its length there."""
        error = (after - resid_post).norm(dim=-1) / resid_post.norm(dim=-1)
        self.sum_errors[layer] = np.maximum(self.sum_errors[layer], float(error[valid].max()))  # NaN stays

    def _observe_diversity(
        self, layer: int, places: tuple[Tensor, ...], counted: list[Tensor], units: Int[np.ndarray, " window"]
    ) -> None:
        values = [spherical_diversity(x, torch.stack(counted)) for x in places]
        values += [values[after] - values[before] for before, after in CHANGES.values()]
        stacked = torch.stack(values, -1)[:, :, None]
        sums = [
            sums_over(of_scope, scope.any(1, keepdim=True)) for of_scope, scope in zip(stacked, counted, strict=True)
        ]
        self.diversity.update(layer, units, sums)

    def _observe_defect(
        self, layer: int, x: Tensor, A: Tensor, F: Tensor, counted: list[Tensor], windows: Int[np.ndarray, " window"]
    ) -> None:
        """How far the FFN's answer to x + A is from its answer to x, on the sampled positions."""
        every = slice(None, None, min(self.options.defect_stride, max(1, self.corpus.window // FEWEST_POSITIONS)))
        x, A, F, counted = x[:, every], A[:, every], F[:, every], [scope[:, every] for scope in counted]
        units = self.corpus.units[windows]
        alone = F if self.parallel[layer] else exact(ffn_field(self.view, layer, x))  # parallel blocks read x as it is
        away, length = (F - alone).norm(dim=-1), alone.norm(dim=-1)
        share = away / (length + EPSILON)
        displaced = away / (x + A + F).norm(dim=-1)
        one = torch.ones_like(length)
        totals = torch.stack([share, away, displaced], -1), torch.stack([one, length, one], -1)
        self.defects.update(layer, units, [tuple(sums_over(total, scope)[0] for total in totals) for scope in counted])
        if layer == 0:
            self.n_tokens["defects"] += int(counted[0].sum())
        rows = np.flatnonzero(np.isin(windows, self.first_order_windows))
        if len(rows):
            lost = away[rows] if self.parallel[layer] else self._first_order(layer, x[rows], A[rows])
            both = torch.stack([lost / (length[rows] + EPSILON), share[rows]], -1)
            self.first_order.update(layer, units[rows], [sums_over(both, scope[rows]) for scope in counted])

    def _first_order(self, layer: int, x: Tensor, A: Tensor) -> Float[Tensor, "window position"]:
        return exact(ffn_derivative(self.view, layer, x, A)[1]).norm(dim=-1)

    def _observe_top(
        self, layer: int, attention: Attention, counted: list[Tensor], units: Int[np.ndarray, " window"]
    ) -> None:
        every = max(1, self.corpus.window // TOP_POSITIONS)
        cosine = exact(strongest_cosine(self.view, layer, attention, k=self.options.top_k, every=every))
        self.top.update(layer, units, [sums_over(cosine[..., None], scope[:, ::every]) for scope in counted])

    def finalize(self) -> xr.Dataset:
        parts = [self.tokens, self.diversity]
        parts += [self.defects] if self.options.defect_stride else []
        parts += [self.first_order] if len(self.first_order_windows) else []
        parts += [self.top] if len(self.top_k_windows) else []
        data = {name: (("layer",), value) for part in parts for name, value in part.readings().items()}
        data |= self.depth.readings()
        data["resid_sum_error"] = ("layer",), self.sum_errors
        dataset = xr.Dataset(data, coords={"layer": np.arange(self.view.n_layers)}, attrs={"n": self.tokens.n})
        dataset.attrs |= {f"n_{name}": count for name, count in self.n_tokens.items()}
        return dataset.drop_vars([name for name in dataset if "null_orthogonal_all" in str(name)])

    def null(self, few: Corpus) -> Steering:
        return Steering(self.view, few, replace(self.options, n_first_order=0, n_top_k=0))

    def with_nulls(self, data: xr.Dataset, null: Steering | None, run_pass: Pass, seed: int) -> xr.Dataset:
        """An untrained model of the same shape beside the readings of the data."""
        if null is None:
            return data
        chance = null.finalize()
        for name in map(str, chance):
            if "null" in name or name == "resid_sum_error" or name.endswith("_se"):
                continue
            data[f"{name}_null"] = chance[name]
            if f"{name}_se" in chance:
                data[f"{name}_null_se"] = chance[f"{name}_se"]
        return data


class Means:
    """Named means of every layer over all tokens but the first of each window, and (`_all`) with it."""

    kept: ClassVar = {"layers": OWN}

    def __init__(self, names: Sequence[str], n_layers: int, per_unit: Counts):
        self.names = tuple(names)
        self.layers = [RatioOfSums((2, len(self.names)), windows_per_document=per_unit) for _ in range(n_layers)]

    def update(self, layer: int, units: Int[np.ndarray, " window"], sums: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Add windows: numerators and denominators [window quantity] without and with the first token."""
        numerators, denominators = (torch.stack(part, 1).cpu().numpy() for part in zip(*sums, strict=True))
        self.layers[layer].update(units, numerators, denominators)

    @property
    def n(self) -> int:
        """Units (documents or windows) that the means rest on."""
        return int(self.layers[0].finalize().n.max())

    def readings(self) -> dict[str, Float64[np.ndarray, " layer"]]:
        """Values and standard errors by name."""
        estimates = [layer.finalize() for layer in self.layers]
        found = {}
        for scope, suffix in enumerate(("", "_all")):
            for index, name in enumerate(self.names):
                found[f"{name}{suffix}"] = np.array([estimate.value[scope, index] for estimate in estimates])
                found[f"{name}{suffix}_se"] = np.array([estimate.se[scope, index] for estimate in estimates])
        return found


class DepthTrend:
    """Mean angular deficit over all layers and its slope from the first to the last, with errors over units.

    Of the tokens that have a deficit in every layer.
    """

    kept: ClassVar = {"ratio": OWN}

    def __init__(self, n_layers: int, per_unit: Counts):
        depth = np.linspace(0, 1, n_layers) - 0.5
        spread_of_depth = (depth**2).sum()
        slope = depth / spread_of_depth if spread_of_depth else np.full(n_layers, np.nan)
        self.weights = np.stack([np.full(n_layers, 1 / n_layers), slope])
        self.ratio = RatioOfSums((2,), windows_per_document=per_unit)

    def update(
        self,
        layer: int,
        units: Int[np.ndarray, " window"],
        deficit: Float64[Tensor, "window position"],
        counted: Bool[Tensor, "window position"],
    ) -> None:
        """Add one layer; a batch counts when its last layer has come."""
        weighted = deficit.cpu().numpy()[..., None] * self.weights[:, layer]
        self.both = weighted if layer == 0 else self.both + weighted
        if layer == self.weights.shape[1] - 1:
            self.ratio.update(units, *sums_over(torch.from_numpy(self.both), counted.cpu()))

    def readings(self) -> dict[str, tuple[tuple[str, ...], float]]:
        estimate = self.ratio.finalize()
        names = ("angular_deficit_mean", "angular_deficit_slope")
        values = {name: ((), estimate.value[index]) for index, name in enumerate(names)}
        return values | {f"{name}_se": ((), estimate.se[index]) for index, name in enumerate(names)}


def scopes(valid: Bool[Tensor, "window position"]) -> list[Bool[Tensor, "window position"]]:
    """Tokens that count: all but the first of each window, and all."""
    first = valid & (valid.cumsum(1) == 1)
    return [valid & ~first, valid]
