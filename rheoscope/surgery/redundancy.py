"""What of each key group's output the other heads of its layer cannot stand in for: the error that a refit would leave.

One pass gives it for every group at once. It ranks candidates before any is measured; it does not choose.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float64
from torch import Tensor

from rheoscope.corpus import Batch, Corpus, batches
from rheoscope.instruments.engine import Progress, batch_size_for, run_pass, silent
from rheoscope.instruments.instrument import Instrument, LayerSites
from rheoscope.models.view import ModelView

RIDGE = 1e-3  # times the mean square of a coordinate


class HeadMoments(Instrument):
    """Second moments of [z, 1] of all heads of a layer, every token divided by the length of its stream."""

    name = "head_moments"
    sites = frozenset({"attention", "resid_post"})

    @dataclass(frozen=True)
    class Options:
        """Nothing to choose."""

    def __init__(self, view: ModelView, corpus: Corpus, options: Options | None = None):
        super().__init__(view, corpus, options)
        size = view.n_heads * view.d_value + 1
        self.gram = torch.zeros(view.n_layers, size, size, dtype=torch.float64)
        self.tokens = np.zeros(view.n_layers, np.int64)

    def observe(self, layer: int, sites: LayerSites, batch: Batch) -> None:
        z = sites.attention.z.transpose(1, 2).flatten(2)
        valid = batch.valid.to(z.device)
        length = sites.resid_post.float().norm(dim=-1)[valid].double()
        rows = torch.cat([z[valid].double(), torch.ones_like(length)[:, None]], 1) / length[:, None]
        self.gram[layer] += (rows.T @ rows).cpu()
        self.tokens[layer] += len(rows)

    def finalize(self) -> xr.Dataset:
        """Share of the stream that is lost with each key group once the others are refitted, by layer and group."""
        view = self.view
        lost = [self._lost(layer) for layer in range(view.n_layers)]
        return xr.Dataset({"lost": (("layer", "group"), np.array(lost))})

    def _lost(self, layer: int) -> list[float]:
        view = self.view
        gram = self.gram[layer] / self.tokens[layer]
        W_O = view.weights.W_O(layer).flatten(0, 1).cpu().double()
        width = view.n_heads // view.n_kv_heads * view.d_value
        return [_unpredicted(gram, W_O, slice(i * width, (i + 1) * width)) for i in range(view.n_kv_heads)]


def _unpredicted(gram: Float64[Tensor, "size size"], W_O: Float64[Tensor, "inputs d_model"], group: slice) -> float:
    """Root mean square of a group's output less its best prediction from the other coordinates."""
    inside = torch.zeros(len(gram), dtype=torch.bool)
    inside[group] = True
    others = gram[~inside][:, ~inside]
    between = gram[~inside][:, inside]
    ridge = RIDGE * others.diagonal().mean() * torch.eye(len(others), dtype=torch.float64)
    left = gram[inside][:, inside] - between.T @ torch.linalg.solve(others + ridge, between)
    weights = W_O[group]
    return float((weights * (left @ weights)).sum().clamp(min=0).sqrt())


def lost_with_groups(
    view: ModelView, corpus: Corpus, *, progress: Progress = silent
) -> Float64[np.ndarray, "layer group"]:
    """How far the stream moves, relative to its length, when a key group goes and its layer is refitted; one pass."""
    reader = HeadMoments(view, corpus)
    size = batch_size_for(view, corpus.window)
    run_pass(view, batches(corpus, size), [reader], task="redundancy", total=corpus.n_windows, progress=progress)
    return reader.finalize()["lost"].values
