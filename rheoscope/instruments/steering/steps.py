"""One layer's step on the sphere: x moves to x + A + F, attention writes A and the feed-forward network F.

Lengths and products are taken in float32 or better; a share of something of length 0 is NaN, and does not count.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

ROWS = 256  # tokens at a time, so that their copies in float64 stay in the cache


def exact(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The values in float32 or better."""
    return x if x.dtype == torch.float64 else x.float()


def inner(a: Float[Tensor, "*shape d_model"], b: Float[Tensor, "*shape d_model"]) -> Float[Tensor, "*shape"]:
    """Inner products along the last axis."""
    return torch.linalg.vecdot(a, b)


def tangential(
    v: Float[Tensor, "*shape d_model"], x: Float[Tensor, "*shape d_model"]
) -> Float[Tensor, "*shape d_model"]:
    """The part of v at right angles to x: P_x v = v - <v, x> x / ‖x‖². All of v where x is 0."""
    return v - _quotient(inner(v, x), inner(x, x), otherwise=0.0)[..., None] * x


def radial_share(v: Float[Tensor, "*shape d_model"], x: Float[Tensor, "*shape d_model"]) -> Float[Tensor, "*shape"]:
    """Share of ‖v‖² that lies along x, in [0, 1]; NaN where v or x is 0."""
    return _quotient(inner(v, x).square(), inner(v, v) * inner(x, x)).clamp(max=1.0)


def angle(u: Float[Tensor, "*shape d_model"], v: Float[Tensor, "*shape d_model"]) -> Float[Tensor, "*shape"]:
    """Angle between two vectors in degrees, exact for small ones too; NaN where one of them is 0."""
    length = inner(u, u).sqrt()
    sine, cosine = tangential(v, u).norm(dim=-1), _quotient(inner(u, v), length)
    angle = torch.rad2deg(torch.atan2(sine, cosine))
    return torch.where(inner(v, v) > 0, angle, torch.nan)


def deficit(
    part: Float[Tensor, "*shape d_model"], step: Float[Tensor, "*shape d_model"], x: Float[Tensor, "*shape d_model"]
) -> Float[Tensor, "*shape"]:
    """Angular deficit of a part of a step: 1 - cos(P_x part, P_x step), in [0, 2].

    P_x step is along P_x Δu, as x⁺ = x + step: the whole step has deficit 0. Found from the distance of the two
    directions, so that small deficits are exact. NaN where part or step is along x, to rounding.
    """
    u, v = tangential(part, x), tangential(step, x)
    return (_unit(u, part) - _unit(v, step)).square().sum(-1) / 2


def step_readings(
    x: Float[Tensor, "window position d_model"],
    A: Float[Tensor, "window position d_model"],
    F: Float[Tensor, "window position d_model"],
    *,
    parallel: bool,
) -> dict[str, Float64[Tensor, "window position"]]:
    """Every reading that a token has of its own; `parallel`: the feed-forward network reads x rather than x + A.

    All of them are made of the six inner products of x, A and F, in float64: vectors are read once. The functions
    above say the same of the vectors themselves.
    """
    xx, xA, xF, AA, AF, FF = products(x, A, F)
    yy, yF = xx + 2 * xA + AA, xF + AF
    aa, ff = (_across(vv, xv, xx) for vv, xv in ((AA, xA), (FF, xF)))  # ‖P_x A‖², ‖P_x F‖²
    af = AF - _quotient(xA * xF, xx, otherwise=0.0)
    step = (aa + 2 * af + ff).clamp(min=0)
    noise = max(4 * torch.finfo(x.dtype).eps, 4 * torch.finfo(torch.float64).eps ** 0.5)
    whole = _clear(step, AA + 2 * AF + FF, noise)
    attention = (1 - (aa + af) / (_clear(aa, AA, noise) * whole).sqrt()).clamp(min=0)
    ffn = (1 - (ff + af) / (_clear(ff, FF, noise) * whole).sqrt()).clamp(min=0)
    turned = _turn(step, xx + xA + xF, xx)
    half_chord = torch.cos(torch.deg2rad(turned) / 2)  # ‖P_x Δu‖ / ‖Δu‖
    from_x = _quotient(xF.square(), FF * xx), _quotient(yF.square(), FF * yy)
    return {
        "angular_deficit": attention,
        "angular_deficit_chord": 1 - (1 - attention) * half_chord,
        "angular_deficit_null_orthogonal": 1 - _quotient(aa.sqrt(), (aa + ff).sqrt()),
        "ffn_deficit": ffn,
        "ffn_deficit_chord": 1 - (1 - ffn) * half_chord,
        "attention_radial_share": _quotient(xA.square(), AA * xx).clamp(max=1.0),
        "ffn_radial_share": from_x[0 if parallel else 1].clamp(max=1.0),
        "resid_norm": xx.sqrt(),
        "attention_norm": AA.sqrt(),
        "ffn_norm": FF.sqrt(),
        "turning": turned,
        "turning_attention": _turn(aa, xx + xA, xx),
        "turning_ffn": _turn(_across(FF, yF, yy), yy + yF, yy),
    }


def products(
    *vectors: Float[Tensor, "window position d_model"],
) -> tuple[Float64[Tensor, "window position"], ...]:
    """Inner products of some vectors of every token, each with itself and all that follow it, in float64."""
    shape = vectors[0].shape[:-1]
    parts = zip(*(v.reshape(-1, v.shape[-1]).split(ROWS) for v in vectors), strict=True)
    stacked = (torch.stack(part, 1).double() for part in parts)
    gram = torch.cat([rows @ rows.mT for rows in stacked]).reshape(*shape, len(vectors), len(vectors))
    return tuple(gram[..., i, j] for i in range(len(vectors)) for j in range(i, len(vectors)))


def spherical_diversity(
    x: Float[Tensor, "window position d_model"], counted: Bool[Tensor, "*scope window position"]
) -> Float64[Tensor, "*scope window"]:
    """D = 1 - ‖mean u‖² over the counted positions of a window, in [0, 1]; float64, NaN without positions.

    Equal to (n - 1)/n times (1 - mean cosine of different positions); 0: all tokens point one way. Several choices of
    positions are read at once.
    """
    weights = counted / x.norm(dim=-1).clamp(min=torch.finfo(x.dtype).tiny)
    total = torch.einsum("wpd,...wp->...wd", x, weights.to(x)).double()
    return (1 - (total / counted.sum(-1, keepdim=True)).square().sum(-1)).clamp(min=0)


def sums_over(
    readings: Float[Tensor, "window position *quantity"], counted: Bool[Tensor, "window position"]
) -> tuple[Float64[Tensor, "window ..."], Float64[Tensor, "window ..."]]:
    """Sums over the counted positions of each window, and how many there were; NaN readings do not count."""
    counted = counted.reshape(*counted.shape, *[1] * (readings.ndim - 2))
    present = counted & ~readings.isnan()
    return readings.where(present, 0.0).sum(1, dtype=torch.float64), present.sum(1, dtype=torch.float64)


def _across(vv: Tensor, xv: Tensor, xx: Tensor) -> Tensor:
    """‖P_x v‖² of inner products."""
    return (vv - _quotient(xv.square(), xx, otherwise=0.0)).clamp(min=0)


def _clear(across: Tensor, whole: Tensor, noise: float) -> Tensor:
    """The square of the tangential part; NaN where it is rounding of the whole."""
    return torch.where(across > noise**2 * whole, across, math.nan)


def _turn(across: Tensor, along: Tensor, xx: Tensor) -> Tensor:
    """Angle in degrees between x and x + v, of ‖P_x v‖² and <x, x + v>; NaN where x or x + v is 0."""
    turned = torch.rad2deg(torch.atan2(across.sqrt(), _quotient(along, xx.sqrt())))
    return torch.where((across > 0) | (along != 0), turned, math.nan)


def _unit(projected: Tensor, whole: Tensor) -> Tensor:
    """Unit vectors; NaN where what is left of the whole vector after projection is rounding."""
    length = projected.norm(dim=-1, keepdim=True)
    noise = 4 * torch.finfo(whole.dtype).eps * whole.norm(dim=-1, keepdim=True)
    return projected / torch.where(length > noise, length, math.nan)


def _quotient(numerator: Tensor, denominator: Tensor, *, otherwise: float = math.nan) -> Tensor:
    """Quotient; `otherwise` where the denominator is 0."""
    safe = torch.where(denominator == 0, 1.0, denominator)
    return torch.where(denominator == 0, otherwise, numerator / safe)
