"""Oversmoothing in closed form: the mean cosine between tokens after one attention step of a given density.

All heads attend with A_a = (1 - a) I + a U, where U spreads evenly over all tokens. With x the stream, u_j = v_j W the
output of the values and b the bias, token i becomes y_i = x_i + b + (1 - a) u_i + a ū. docs/sinks.md §3 derives it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from rheoscope.theory.visible import visible_keys

SAME = 1e-24  # spread of tokens, relative to their squared length, that is rounding
MIXING = (0.0, 0.25, 0.5, 0.75, 1.0)  # a: 0 attends to itself only, 1 evenly to all


class Smoothing(NamedTuple):
    """What decides how one uniform step changes the cosine between tokens.

    dense_gain: 2 tr C(x, u) + tr C(u, u), relative to tr C(x, x): above 0, denser attention leaves less spread, so it
        smooths more than sparse. mean_gain: ‖x̄ + b + ū‖ / ‖x̄‖: above 1, a uniform step smooths relative to its input.
    """

    dense_gain: Float64[Tensor, "*batch"]
    mean_gain: Float64[Tensor, "*batch"]


def mean_cosine(
    y: Float[Tensor, "*batch token d_model"], counted: Bool[Tensor, "*batch token"] | None = None
) -> Float64[Tensor, "*batch"]:
    """Mean cosine over all pairs of different tokens: (‖Σ_i ŷ_i‖² - T) / (T (T - 1)).

    counted: the tokens that belong; all where None. NaN for fewer than two.
    """
    unit = torch.nn.functional.normalize(y.double(), dim=-1)
    if counted is None:
        n = torch.tensor(float(y.shape[-2]), dtype=torch.float64)
    else:
        unit, n = unit * counted[..., None], counted.sum(-1).double()
    pairs = torch.where(n > 1, n * (n - 1), torch.nan)
    return (unit.sum(-2).square().sum(-1) - n) / pairs


def predicted_cosine(
    x: Float[Tensor, "token d_model"],
    u: Float[Tensor, "token d_model"],
    *,
    bias: Float[Tensor, " d_model"] | float = 0.0,
    attended_mean: Float[Tensor, " d_model"] | None = None,
    mixing: tuple[float, ...] = MIXING,
) -> Float64[Tensor, " mixing"]:
    """Mean cosine after the step for every a: (M - D/(T - 1)) / (M + D), exact where all y_i are equally long.

    M(a) = ‖x̄ + b + (1 - a) ū + a ū_all‖² and D(a) = mean_i ‖dx_i + (1 - a) du_i‖². attended_mean: ū_all, the mean over
    the keys attended to, where tokens are attended to that are not among those compared (the first one); else ū.
    """
    x, u = x.double(), u.double()
    mean_x, mean_u = x.mean(0), u.mean(0)
    everywhere = mean_u if attended_mean is None else attended_mean.double()
    dx, du = x - mean_x, u - mean_u
    xx, xu, uu = (torch.linalg.vecdot(*pair).mean() for pair in ((dx, dx), (dx, du), (du, du)))
    cosines = []
    for a in mixing:
        mean = (mean_x + bias + (1 - a) * mean_u + a * everywhere).square().sum()
        spread = xx + 2 * (1 - a) * xu + (1 - a) ** 2 * uu
        cosines.append((mean - spread / (len(x) - 1)) / (mean + spread))
    return torch.stack(cosines)


def smoothing_conditions(
    x: Float[Tensor, "token d_model"],
    u: Float[Tensor, "token d_model"],
    *,
    bias: Float[Tensor, " d_model"] | float = 0.0,
) -> Smoothing:
    """The two conditions of oversmoothing. For u = x W they are 2 tr(WC) + tr(WCWᵀ) > 0 and ‖(I + W) x̄‖ > ‖x̄‖.

    NaN for tokens that are all alike.
    """
    x, u = x.double(), u.double()
    dx, du = x - x.mean(0), u - u.mean(0)
    own = dx.square().sum(-1).mean()
    own = torch.where(own > SAME * x.square().sum(-1).mean(), own, torch.nan)
    dense = (2 * (dx * du).sum(-1) + du.square().sum(-1)).mean()
    return Smoothing(dense / own, (x.mean(0) + bias + u.mean(0)).norm() / x.mean(0).norm())


def mixed(
    u: Float[Tensor, "*batch token d"], a: float, *, causal: bool, width: int | None = None
) -> Float[Tensor, "*batch token d"]:
    """A_a u: (1 - a) u_i + a times the mean over the tokens that i may see; `width` is that of a sliding window."""
    first, stop = (
        torch.from_numpy(part).to(u.device) for part in visible_keys(u.shape[-2], causal=causal, width=width)
    )
    sums = torch.nn.functional.pad(u.double().cumsum(-2), (0, 0, 1, 0))
    mean = (sums[..., stop, :] - sums[..., first, :]) / (stop - first)[:, None]
    return (1 - a) * u + a * mean.to(u)
