"""What edits of the scores are fitted on: second moments of [q; k] over a text, per layer and head.

    fitted = calibrated(view, corpus)
    with edited(view, TruncateRouting(rank=2, calibration=fitted)):
        ...

A singular value decomposition of an N x N table of scores sees the future. A form on [q; k] that was fitted beforehand
does not: it is applied token by token.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float64
from torch import Tensor

from rheoscope.corpus import Batch, Corpus, batches
from rheoscope.instruments.engine import Progress, batch_size_for, run_pass, silent
from rheoscope.instruments.instrument import Instrument, LayerSites
from rheoscope.linalg.factors import as_float64
from rheoscope.linalg.planes import Leading, leading_directions, leading_planes
from rheoscope.models.attention import Attention
from rheoscope.models.view import ModelView

N_CALIBRATION = 16  # windows; with 512 tokens each, 32 times as many tokens as [q; k] of 64-wide heads has coordinates


def joint(attention: Attention) -> Float64[Tensor, "batch head position twice"]:
    """x = [q; k] of every position and query head, keys repeated for their groups."""
    k = attention.k.repeat_interleave(attention.n_rep, 1) if attention.n_rep > 1 else attention.k
    return as_float64(torch.cat([attention.q, k], -1))


def skew_form(d_head: int) -> Float64[Tensor, "twice twice"]:
    """The form of S: x_i·B x_j = (q_i·k_j - k_i·q_j)/2, to be multiplied by the score scale."""
    half = torch.eye(d_head, dtype=torch.float64) / 2
    return torch.cat([torch.cat([0 * half, half], 1), torch.cat([-half, 0 * half], 1)], 0)


def symmetric_form(d_head: int) -> Float64[Tensor, "twice twice"]:
    """The form of F: x_i·B x_j = (q_i·k_j + k_i·q_j)/2, to be multiplied by the score scale."""
    return skew_form(d_head).abs()


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """Sums over the real tokens of a text, per layer and query head. Written down as its hash.

    gram: Σ x x^T of x = [q; k]. mean: mean x. damping: mean of -b_ii, b what is added to the scores.
    """

    gram: Float64[np.ndarray, "layer head twice twice"]
    mean: Float64[np.ndarray, "layer head twice"]
    damping: Float64[np.ndarray, "layer head"]
    n_tokens: int
    _leading: dict[tuple[str, int], Leading] = field(default_factory=dict)

    @cached_property
    def hash(self) -> str:
        """sha256 of all numbers."""
        digest = hashlib.sha256(str((self.gram.shape, self.n_tokens)).encode())
        for part in (self.gram, self.mean, self.damping):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"Calibration(n_tokens={self.n_tokens}, sha256={self.hash[:32]})"

    @property
    def d_head(self) -> int:
        return self.gram.shape[-1] // 2

    def planes(self, layer: int) -> Leading:
        """Planes of S of one layer, by what they turn on the text."""
        return self._of("planes", layer)

    def directions(self, layer: int) -> Leading:
        """Directions of F of one layer, by their weight on the text."""
        return self._of("directions", layer)

    def self_score(self, layer: int) -> Float64[Tensor, " head"]:
        """Mean of q_i·k_i, to be multiplied by the score scale."""
        gram, d = self.gram[layer], self.d_head
        return torch.from_numpy(np.trace(gram[:, :d, d:], axis1=1, axis2=2) / self.n_tokens)

    def _of(self, which: str, layer: int) -> Leading:
        if (which, layer) not in self._leading:
            gram = torch.from_numpy(self.gram[layer])
            planes = which == "planes"
            form = (skew_form if planes else symmetric_form)(self.d_head)
            self._leading[which, layer] = (leading_planes if planes else leading_directions)(gram, form)
        return self._leading[which, layer]


class ScoreMoments(Instrument):
    """Second moments and means of [q; k], and the mean of what is added to each query's score with itself."""

    name = "score_moments"
    sites = frozenset({"attention"})

    @dataclass(frozen=True)
    class Options:
        """Nothing to choose."""

    def __init__(self, view: ModelView, corpus: Corpus, options: Options | None = None):
        super().__init__(view, corpus, options)
        shape, wide = (view.n_layers, view.n_heads), 2 * view.d_head
        self.gram, self.total = np.zeros((*shape, wide, wide)), np.zeros((*shape, wide))
        self.damping, self.tokens = np.zeros(shape), np.zeros(view.n_layers, np.int64)

    def observe(self, layer: int, sites: LayerSites, batch: Batch) -> None:
        attention = sites.attention
        x = joint(attention)
        valid = batch.valid.to(x.device)
        x = x.masked_fill(~valid[:, None, :, None], 0)
        flat = x.transpose(0, 1).flatten(1, 2)
        self.gram[layer] += (flat.mT @ flat).cpu().numpy()
        self.total[layer] += flat.sum(1).cpu().numpy()
        self.tokens[layer] += int(valid.sum())
        if attention.bias is not None:
            own = as_float64(attention.bias.diagonal(dim1=-2, dim2=-1)).to(x.device).expand(x.shape[:-1])
            self.damping[layer] -= (own * valid[:, None]).sum((0, 2)).cpu().numpy()

    def finalize(self) -> xr.Dataset:
        """Mean of x by layer, head and coordinate."""
        return xr.Dataset({"score_moment_mean": (("layer", "head", "component"), self.means(self.total))})

    def means(self, total: Float64[np.ndarray, "layer head *rest"]) -> Float64[np.ndarray, "layer head *rest"]:
        """Sums divided by the tokens of each layer."""
        return total / self.tokens.reshape(-1, *(1,) * (total.ndim - 1))

    def calibration(self) -> Calibration:
        """The frozen result."""
        return Calibration(self.gram, self.means(self.total), self.means(self.damping), int(self.tokens[0]))


def calibrated(
    view: ModelView, corpus: Corpus, *, batch_size: int | None = None, progress: Progress = silent
) -> Calibration:
    """The calibration of a model on a text: one pass, all layers."""
    moments = ScoreMoments(view, corpus)
    size = batch_size or batch_size_for(view, corpus.window)
    run_pass(view, batches(corpus, size), [moments], task="calibration", total=corpus.n_windows, progress=progress)
    return moments.calibration()
