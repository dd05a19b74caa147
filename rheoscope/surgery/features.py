"""Feature maps of attention without a softmax, and that attention: in chunks, from a state, or one token at a time.

    elu      elu(x) + 1, as published; d features
    softmax  [softmax(x), softmax(-x)]: exponentials that share one unit of mass; 2 d features
    taylor   [1, x, x ⊗ x / √2]: φ(q)·φ(k) = 1 + q·k + (q·k)²/2, the exponential to second order; 1 + d + d² features

All are positive where it counts: no sum of weights can be 0 or negative. `elu` and `softmax` have features of their
own scale; `taylor` only means something where q·k is the score itself, so it always takes the score scale.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from rheoscope.errors import RheoscopeError
from rheoscope.nets.linear import elu_feature, normalised_sums


def softmax_feature(x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape twice"]:
    """[softmax(x), softmax(-x)] over the coordinates of a head."""
    return torch.stack([x, -x], -2).softmax(-1).flatten(-2)


def taylor_feature(x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape wide"]:
    """[1, x, x ⊗ x / √2]."""
    square = (x[..., :, None] * x[..., None, :]).flatten(-2) * 2**-0.5
    return torch.cat([torch.ones_like(x[..., :1]), x, square], -1)


FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": elu_feature,
    "softmax": softmax_feature,
    "taylor": taylor_feature,
}
ALWAYS_SCALED = frozenset({"taylor"})


def feature_root(feature: str, scale: float, *, scaled: bool) -> float:
    """What q and k are multiplied by before the map. Raises RheoscopeError for a map that there is not."""
    if feature not in FEATURES:
        raise RheoscopeError(f"no feature map is called {feature!r}: give one of {', '.join(FEATURES)}")
    return scale**0.5 if scaled or feature in ALWAYS_SCALED else 1.0


def feature_attention(
    query: Float[Tensor, "batch head position d"],
    key: Float[Tensor, "batch kv_head position d"],
    value: Float[Tensor, "batch kv_head position d_value"],
    *,
    feature: str,
    valid: Bool[Tensor, "batch position"] | None = None,
    state: Float[Tensor, "batch kv_head features d_value_and_one"] | None = None,
) -> tuple[Float[Tensor, "batch head position d_value"], Float[Tensor, "batch kv_head features d_value_and_one"]]:
    """φ(q_i)·Σ φ(k_j) v_j' / φ(q_i)·Σ φ(k_j) over j ≤ i, and the state Σ φ(k_j) [v_j', 1] after the last token.

    Head h reads key head h // n_rep; a state is kept once per key head. A query before any valid key gives 0. Half
    precision is summed in float32.
    """
    if query.shape[2] > 1:
        return normalised_sums(query, key, value, feature=FEATURES[feature], valid=valid, state=state)
    return _one_token(query, key, value, feature=FEATURES[feature], valid=valid, state=state)


def _one_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature: Callable[[Tensor], Tensor],
    valid: Tensor | None,
    state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(value.dtype, torch.float32)
    q, k, v = feature(query.to(wide)), feature(key.to(wide)), pad(value.to(wide), (0, 1), value=1.0)
    v = v if valid is None else v * valid[:, None, :, None]
    added = k.mT * v
    state = added if state is None else state + added
    sums = (q.reshape(len(q), k.shape[1], -1, q.shape[-1]) @ state).reshape(*q.shape[:-1], -1)
    total = sums[..., -1:].clamp_min(torch.finfo(wide).tiny)
    return (sums[..., :-1] / total).to(value.dtype), state
