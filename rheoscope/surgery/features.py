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
from rheoscope.nets.linear import causal_sums, elu_feature


def softmax_feature(x: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape twice"]:
    """[softmax(x), softmax(-x)] over the coordinates of a head."""
    return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)


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
    wide = torch.promote_types(value.dtype, torch.float32)
    function = FEATURES[feature]
    q, k, v = function(query.to(wide)), function(key.to(wide)), pad(value.to(wide), (0, 1), value=1.0)
    if valid is not None:
        k = k * valid[:, None, :, None]
    sums, state = _one_token(q, k, v, state) if q.shape[2] == 1 else _in_chunks(q, k, v, state)
    total = sums[..., -1:].clamp_min(torch.finfo(wide).tiny)
    return (sums[..., :-1] / total).to(value.dtype), state


def _one_token(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    added = k.mT * v
    state = added if state is None else state + added
    grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
    return (grouped @ state).reshape(*q.shape[:-1], -1), state


def _in_chunks(q: Tensor, k: Tensor, v: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    n_rep = q.shape[1] // k.shape[1]
    k, v, state = (x if x is None or n_rep == 1 else x.repeat_interleave(n_rep, 1) for x in (k, v, state))
    sums, state = causal_sums(q, k, v, state=state)
    return sums, state[:, ::n_rep]
