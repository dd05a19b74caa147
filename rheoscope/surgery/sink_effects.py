"""What edits of attention patterns cost: loss and cosine between tokens, paired; and which heads hardly need attention.

The mean output of a head, for `ConstantHeads`, comes from one pass over a text of its own choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float64

from rheoscope.corpus import Batch, Corpus, batches
from rheoscope.instruments.engine import batch_size_for, run_pass
from rheoscope.instruments.instrument import Instrument, LayerSites
from rheoscope.instruments.loss import Loss
from rheoscope.models.view import ModelView
from rheoscope.stats import Estimate, paired_difference
from rheoscope.surgery.edits import Edit, edited
from rheoscope.surgery.edits_sinks import ConstantHeads, Heads, IdentityHeads
from rheoscope.surgery.effects import loss_change
from rheoscope.theory.smoothing import mean_cosine


class TokenCosines(Instrument):
    """Mean cosine between the tokens of each window after every layer; the first token is left out."""

    name = "token_cosines"
    sites = frozenset({"resid_post"})

    @dataclass(frozen=True)
    class Options:
        """Nothing to choose."""

    def __init__(self, view: ModelView, corpus: Corpus, options: Options | None = None):
        super().__init__(view, corpus, options)
        self.window_cosines = np.full((corpus.n_windows, view.n_layers), np.nan)

    def observe(self, layer: int, sites: LayerSites, batch: Batch) -> None:
        valid = batch.valid.to(sites.resid_post.device)
        cosines = mean_cosine(sites.resid_post[:, 1:], valid[:, 1:])
        self.window_cosines[batch.windows.numpy(), layer] = cosines.cpu().numpy()

    def finalize(self) -> xr.Dataset:
        """Mean over windows, by layer."""
        return xr.Dataset({"token_cosine": ("layer", np.nanmean(self.window_cosines, 0))})


class HeadMeans(Instrument):
    """Mean z of every head over all real tokens."""

    name = "head_means"
    sites = frozenset({"attention"})

    @dataclass(frozen=True)
    class Options:
        """Nothing to choose."""

    def __init__(self, view: ModelView, corpus: Corpus, options: Options | None = None):
        super().__init__(view, corpus, options)
        self.total = np.zeros((view.n_layers, view.n_heads, view.d_value))
        self.tokens = np.zeros(view.n_layers)

    def observe(self, layer: int, sites: LayerSites, batch: Batch) -> None:
        z = sites.attention.z
        valid = batch.valid.to(z.device)
        self.total[layer] += (z * valid[:, None, :, None]).sum((0, 2), dtype=torch.float64).cpu().numpy()
        self.tokens[layer] += int(valid.sum())

    def finalize(self) -> xr.Dataset:
        """Mean z by layer, head and coordinate."""
        mean = self.total / self.tokens[:, None, None]
        return xr.Dataset({"head_mean": (("layer", "head", "component"), mean)})


class Effect(NamedTuple):
    """Loss and mean cosine of the last layer after an edit, less those before, paired by unit."""

    loss: Estimate
    cosine: Estimate


class Measured(NamedTuple):
    """Loss and cosines of one pass, to be paired with those of another."""

    loss: Loss
    cosines: TokenCosines


def head_means(view: ModelView, corpus: Corpus) -> Float64[np.ndarray, "layer head d_value"]:
    """Mean z of every head on a text, for `constant_heads`."""
    means = HeadMeans(view, corpus)
    run_pass(view, batches(corpus, batch_size_for(view, corpus.window)), [means], task="head means")
    return means.finalize().head_mean.values


def constant_heads(heads: Heads, means: Float64[np.ndarray, "layer head d_value"]) -> ConstantHeads:
    """The edit that replaces heads by their mean output."""
    return ConstantHeads(heads=tuple(heads), constants=tuple(tuple(means[pair].tolist()) for pair in heads))


def measured(view: ModelView, corpus: Corpus, edits: Sequence[Edit] = ()) -> Measured:
    """Loss and cosines of one pass with the edits in place."""
    readers = Measured(Loss(view, corpus), TokenCosines(view, corpus))
    with edited(view, *edits):
        run_pass(view, batches(corpus, batch_size_for(view, corpus.window)), readers, task="effect")
    return readers


def effect(view: ModelView, corpus: Corpus, edits: Sequence[Edit], *, before: Measured) -> Effect:
    """What the edits do to loss and to the cosine between tokens after the last layer."""
    after = measured(view, corpus, edits)
    units = corpus.units
    cosines = [part.cosines.window_cosines[:, -1] for part in (after, before)]
    known = np.isfinite(cosines[0]) & np.isfinite(cosines[1])
    sums = [np.bincount(units, np.where(known, cosine, 0)) for cosine in cosines]
    change = paired_difference(sums[0], sums[1], denominators=np.bincount(units, known))
    return Effect(loss_change(after.loss, before.loss), change)


class Replaceable(NamedTuple):
    """One head replaced by a map of each token alone, and by a constant."""

    layer: int
    head: int
    as_mlp: Effect
    as_constant: Effect

    def verdict(self, tolerance: float, *, z: float = 2.0) -> str:
        """`constant` or `mlp` where that costs at most `tolerance` nats with z standard errors to spare, else ``.

        The constant is preferred where both do: it needs no values either. Without an error there is no verdict.
        """
        for name, change in (("constant", self.as_constant.loss), ("mlp", self.as_mlp.loss)):
            if change.value + z * change.se <= tolerance:
                return name
        return ""


def replaceable_heads(
    view: ModelView, corpus: Corpus, heads: Sequence[tuple[int, int]], *, means: Float64[np.ndarray, "layer head d"]
) -> Iterator[Replaceable]:
    """Every head replaced in turn by x W_V W_O and by its mean output, two passes a head; one record at a time."""
    before = measured(view, corpus)
    replace: list[Callable[[tuple[int, int]], Edit]] = [
        lambda pair: IdentityHeads(heads=(pair,)),
        lambda pair: constant_heads((pair,), means),
    ]
    for pair in heads:
        effects = (effect(view, corpus, [edit(pair)], before=before) for edit in replace)
        yield Replaceable(*pair, *effects)
