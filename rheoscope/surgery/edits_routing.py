"""Edits of what scores are made of: routing S, filtering F, in part or altogether, without a look at the future.

With x = [q; k] of a token, scores are scale x_i·C x_j: C is half of [[0, 1], [-1, 0]] for S, half of [[0, 1], [1, 0]]
for F. An edit is another C, fitted beforehand (`calibration`), so that a score still depends on its two tokens alone.
Scores are edited before soft-cap, mask and learned sinks, which act as ever. S-D layers have F = 0 and -D in its place,
added to the diagonal. Two edits of one layer's scores do not go together: the second is refused.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from rheoscope.errors import RheoscopeError
from rheoscope.linalg.planes import kept_directions, kept_planes
from rheoscope.models.attention import Attention
from rheoscope.models.interface import Tap
from rheoscope.models.view import ModelView
from rheoscope.surgery.calibration import Calibration, joint, skew_form, symmetric_form
from rheoscope.surgery.edits import Edit


class Form(NamedTuple):
    """What scores become: scale x_i·(core x_j) + scale (x_i·bias - x_j·bias) + diagonal where i = j."""

    core: Float64[Tensor, "head twice twice"]
    bias: Float64[Tensor, "head twice"] | None = None
    diagonal: Float64[Tensor, " head"] | None = None
    keeps_damping: bool = True  # of an S-D layer: -D stays as it is


@dataclass(frozen=True)
class ScoreEdit(Edit):
    """One change of the scores. calibration: of the model it is made on, from `calibrated`."""

    calibration: Calibration | None = None
    fitted: ClassVar[bool] = True  # whether it needs a calibration

    @abstractmethod
    def form(self, view: ModelView, layer: int) -> Form:
        """What the scores of one layer become."""

    def refuse(self, view: ModelView) -> None:
        """Raise RheoscopeError where the edit does not fit the model."""
        name = type(self).__name__
        if not self.fitted:
            return
        if self.calibration is None:
            raise RheoscopeError(f"{name} asked for without a calibration: give calibrated(view, corpus)")
        shape, wanted = self.calibration.mean.shape, (view.n_layers, view.n_heads, 2 * view.d_head)
        if shape != wanted:
            raise RheoscopeError(
                f"{name} asked for with the calibration of another model: its shape is {shape}, this model's {wanted}"
            )

    def taps(self, view: ModelView) -> Mapping[str, Tap]:
        self.refuse(view)
        form = cache(lambda layer: self.form(view, layer))
        return {"call": lambda layer, attention: _apply(form(layer), attention, damped=view.is_damped(layer))}


@dataclass(frozen=True)
class TruncateRouting(ScoreEdit):
    """S with its leading rank/2 planes alone, as they turn the calibration text; rank 0: no S. F, or D, stays.

    On the calibration text, as one window, this is the best approximation of S of that rank in the Frobenius norm.
    """

    rank: int = 2

    def refuse(self, view: ModelView) -> None:
        if self.rank % 2 or self.rank < 0:
            raise RheoscopeError(f"routing of rank {self.rank} asked for; S turns planes: give an even number from 0")
        for layer in self.chosen(view):
            _refuse_rank("routing", self.rank, view.routing_capacity(layer))
        super().refuse(view)

    def form(self, view: ModelView, layer: int) -> Form:
        routing, filtering = _forms(view)
        if self.rank < view.routing_capacity(layer):
            routing = kept_planes(self.calibration.planes(layer), self.rank // 2)
        return Form(routing + (0 if view.is_damped(layer) else filtering))


@dataclass(frozen=True)
class TruncateFiltering(ScoreEdit):
    """F with its leading `rank` directions alone, by weight on the calibration text; rank 0: no F. S stays.

    Refused for S-D layers: there F = 0, and D is of full rank; use FilterScalar or FilterOff.
    """

    rank: int = 2

    def refuse(self, view: ModelView) -> None:
        damped = [layer for layer in self.chosen(view) if view.is_damped(layer)]
        if damped:
            raise RheoscopeError(
                f"filtering of rank {self.rank} asked for; layer {damped[0]} is S-D, whose filtering is a diagonal of "
                "full rank: use FilterScalar or FilterOff"
            )
        if self.rank < 0:
            raise RheoscopeError(f"filtering of rank {self.rank} asked for; give a number from 0")
        _refuse_rank("filtering", self.rank, 2 * view.d_head)
        super().refuse(view)

    def form(self, view: ModelView, layer: int) -> Form:
        routing, filtering = _forms(view)
        if self.rank < 2 * view.d_head:
            filtering = kept_directions(self.calibration.directions(layer), self.rank)
        return Form(routing + filtering)


@dataclass(frozen=True)
class FilterScalar(ScoreEdit):
    """One number per head in place of the filtering part: scores S + m on the diagonal, S elsewhere.

    S-D layers: m = -mean d over the calibration text, in place of -d_i. Standard attention has no D: all of F goes, and
    m is the mean of F_ii = scale q_i·k_i over the calibration text.
    """

    def form(self, view: ModelView, layer: int) -> Form:
        routing, _ = _forms(view)
        own = self.calibration.self_score(layer) * view.scales[layer]
        if view.is_damped(layer):
            own = -torch.from_numpy(self.calibration.damping[layer])
        return Form(routing, diagonal=own, keeps_damping=False)


@dataclass(frozen=True)
class FilterOff(ScoreEdit):
    """No filtering: scores S alone. S-D layers: D = 0. Standard attention: F = 0, a token's score with itself too."""

    fitted: ClassVar[bool] = False

    def form(self, view: ModelView, layer: int) -> Form:
        return Form(_forms(view)[0], keeps_damping=False)


@dataclass(frozen=True)
class KeyBiasRouting(ScoreEdit):
    """S replaced by its gauge part f_i - f_j, f_i = scale (q_i·mean k - k_i·mean q)/2, means of the calibration text.

    Softmax ignores f_i, unless it has a soft-cap or a learned sink: what is left of routing is one bias -f_j for every
    key, the same for all queries. If the loss hardly moves, low-rank routing was salience of keys. F, or D, stays.
    """

    def form(self, view: ModelView, layer: int) -> Form:
        mean = torch.from_numpy(self.calibration.mean[layer])
        q, k = mean.chunk(2, -1)
        filtering = _forms(view)[1]
        return Form(0 * filtering if view.is_damped(layer) else filtering, bias=torch.cat([k, -q], -1) / 2)


def _forms(view: ModelView) -> tuple[Float64[Tensor, "head twice twice"], Float64[Tensor, "head twice twice"]]:
    """The forms of S and F of every head."""
    return tuple(form(view.d_head).expand(view.n_heads, -1, -1) for form in (skew_form, symmetric_form))


def _refuse_rank(part: str, rank: int, capacity: int) -> None:
    if rank > capacity:
        raise RheoscopeError(
            f"{part} of rank {rank} asked for; heads of this model reach {capacity}: give at most that"
        )


def _apply(form: Form, attention: Attention, *, damped: bool) -> None:
    """Put the scores of a form in place of the call's own."""
    if attention.scores_replaced:
        raise RheoscopeError(
            "two edits of the scores of one layer asked for; the second would undo the first: make one of them"
        )
    if attention.q.shape[2] != attention.k.shape[2]:
        raise RheoscopeError(
            f"scores of {attention.q.shape[2]} queries and {attention.k.shape[2]} keys asked to be edited; they "
            "need q and k of every token: run whole windows without a cache"
        )
    x = joint(attention)
    dtype = attention.q.dtype
    precision = torch.promote_types(dtype, torch.float32)
    # [q; k] C in float64: a fitted form may be oblique, and what cancels in it would be rounding
    left = (x @ form.core.to(x.device)).to(attention.q.device, precision)
    scores = left @ x.to(attention.q.device, precision).mT * attention.scale
    if form.bias is not None:
        f = (torch.einsum("bhpt,ht->bhp", x, form.bias.to(x.device)) * attention.scale).to(scores)
        scores += f[..., :, None] - f[..., None, :]
    if form.diagonal is not None:
        scores.diagonal(dim1=-2, dim2=-1).add_(form.diagonal.to(scores)[:, None])
    if damped and not form.keeps_damping:
        attention.bias = None
    attention.scores = scores.to(dtype)
