"""Phase portraits: the flow on the part of the sphere that holds a pair of critical directions."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from rheoscope.theory.criticals import Field, zero_score

GRID = 21
REACH = 1.6  # half the width of a portrait, in units of t, where its pair is


@torch.no_grad()
def portrait(
    field: Field, first: Float[Tensor, " d_model"], second: Float[Tensor, " d_model"], third: Float[Tensor, " d_model"]
) -> dict[str, Float[Tensor, "row column"]]:
    """The flow du/dt = P_u F on the slice u(a, b) ∝ m + a e₁ + b e₂, as velocities of a and b, and the zero score.

    m is midway between the pair and e₁ points from the first to the second, which are at (-t, 0) and (t, 0) with
    t = tan of half their angle; e₂ leads to the third, at right angles. What leads out of the slice shows in the zero
    score alone. Also the coordinates `a`, `b`.
    """
    middle, e1 = _unit(first + second), _unit(second - first)
    e2 = third - (third @ middle) * middle
    e2 = _unit(e2 - (e2 @ e1) * e1)
    reach = REACH * float((second @ e1) / (second @ middle))
    steps = torch.linspace(-reach, reach, GRID, dtype=first.dtype, device=first.device)
    b, a = torch.meshgrid(steps, steps, indexing="ij")
    x = middle + a[..., None] * e1 + b[..., None] * e2
    length = x.norm(dim=-1, keepdim=True)
    u = x / length
    F = field(u.reshape(-1, u.shape[-1])).reshape(u.shape)
    turn = F - (F * u).sum(-1, keepdim=True) * u
    # x = u / <u, m>: the chart moves as dx/dt = length (turn - <turn, m> length u)
    moved = length * (turn - (turn @ middle)[..., None] * length * u)
    score = zero_score(F.reshape(-1, F.shape[-1]), u.reshape(-1, u.shape[-1])).reshape(a.shape)
    return {"a": a, "b": b, "velocity_a": moved @ e1, "velocity_b": moved @ e2, "score": score}


def _unit(x: Tensor) -> Tensor:
    return x / x.norm()
