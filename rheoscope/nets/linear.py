"""Attention without a softmax, linear in the number of tokens, with a state of constant size.

A state is everything the past leaves behind: sum_j b_j v_j'. Tensors are [batch head position d]. `valid` is False at
padded places, which leave no trace in a state or a normaliser. Half precision is summed in float32.
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64  # tokens whose products are formed at once; time and memory are flat between 32 and 128


def elu_feature(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """elu(x) + 1, as exp(x) below 0: the sum cancels there, by 58 % at x = -6 in bfloat16."""
    return torch.where(x > 0, x + 1, torch.exp(x.clamp_max(0)))


def causal_sums(
    a: Float[Tensor, "batch head position d"],
    b: Float[Tensor, "batch head position d"],
    value: Float[Tensor, "batch head position d_value"],
    *,
    state: Float[Tensor, "batch head d d_value"] | None = None,
    chunk: int = CHUNK,
) -> tuple[Float[Tensor, "batch head position d_value"], Float[Tensor, "batch head d d_value"]]:
    """Sums over j <= i of (a_i·b_j) v_j, and the state after the last token.

    Within a chunk by products, between chunks by the state at its start: time and memory are linear in positions.
    Autocast is off inside.
    """
    n = a.shape[2]
    size = min(chunk, n)
    a, b, value = (_chunks(x, size) for x in (a, b, value))
    with torch.autocast(a.device.type, enabled=False):
        added = b.mT @ value
        start = torch.zeros_like(added[:, :, 0]) if state is None else state.to(added.dtype)
        states = torch.cat([start[:, :, None], added], 2).cumsum(2)
        sums = a @ states[:, :, :-1] + (a @ b.mT).tril() @ value
    return rearrange(sums, "batch head chunk place d -> batch head (chunk place) d")[:, :, :n], states[:, :, -1]


def elu_attention(
    query: Float[Tensor, "batch head position d"],
    key: Float[Tensor, "batch head position d"],
    value: Float[Tensor, "batch head position d_value"],
    *,
    valid: Bool[Tensor, "batch position"] | None = None,
    state: Float[Tensor, "batch head d d_value_and_one"] | None = None,
) -> tuple[Float[Tensor, "batch head position d_value"], Float[Tensor, "batch head d d_value_and_one"]]:
    """f(q_i)·sum f(k_j) v_j' / f(q_i)·sum f(k_j) over j <= i, with f = elu + 1, and the state.

    The last column of the state is the normaliser sum f(k_j). For S-D attention query and key are a and b of
    `skew_pair`. A query before any valid key gives 0.
    """
    features = _present(elu_feature(_wide(key)), valid)
    sums, state = causal_sums(elu_feature(_wide(query)), features, pad(_wide(value), (0, 1), value=1.0), state=state)
    total = sums[..., -1:].clamp_min(torch.finfo(sums.dtype).tiny)
    return (sums[..., :-1] / total).to(value.dtype), state


def sd_linear_attention(
    a: Float[Tensor, "batch head position twice"],
    b: Float[Tensor, "batch head position twice"],
    value: Float[Tensor, "batch head position d_value"],
    damping: Float[Tensor, "batch head position"],
    *,
    scale: float,
    valid: Bool[Tensor, "batch position"] | None = None,
    state: Float[Tensor, "batch head twice d_value"] | None = None,
    seen: Int[Tensor, "batch 1"] | None = None,
) -> tuple[Float[Tensor, "batch head position d_value"], Float[Tensor, "batch head twice d_value"]]:
    """Y_i = (sum over j < i of S_ij v_j - d_i v_i) / sqrt(i), and the state; a, b from `skew_pair`, scale in S.

    i counts the valid tokens from 1, those `seen` before this call included. S_ii = 0, so j <= i gives the same sum.
    """
    sums, state = causal_sums(_wide(a) * scale, _present(_wide(b), valid), _wide(value), state=state)
    places = torch.arange(1, a.shape[2] + 1, device=a.device)[None] if valid is None else valid.cumsum(-1)
    if seen is not None:
        places = places + seen
    mixed = sums - _wide(damping)[..., None] * _wide(value)
    return (mixed / places.clamp_min(1).to(mixed.dtype).sqrt()[:, None, :, None]).to(value.dtype), state


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _present(x: Tensor, valid: Tensor | None) -> Tensor:
    return x if valid is None else x * valid[:, None, :, None]


def _chunks(x: Tensor, size: int) -> Tensor:
    short = -x.shape[2] % size
    x = pad(x, (0, 0, 0, short)) if short else x
    return rearrange(x, "batch head (chunk place) d -> batch head chunk place d", place=size)
