"""Attention without a softmax, linear in the number of tokens, with a state of constant size.

A state is everything the past leaves behind: sum_j b_j v_j'. Tensors are [batch head position d]. `valid` is False at
padded places, which leave no trace in a state or a normaliser. Half precision is summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64  # tokens whose products are formed at once; time and memory are flat between 32 and 128
BLOCK = 512  # tokens whose features are held at once; what is made of so many stays in a processor's cache


def elu_feature(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """elu(x) + 1, as exp(x) below 0: the sum cancels there, by 58 % at x = -6 in bfloat16."""
    return x.clamp_max(0).exp() + x.relu()  # x ≤ 0: exp(x) + 0; x > 0: 1 + x


def causal_sums(
    a: Float[Tensor, "batch head position d"],
    b: Float[Tensor, "batch kv_head position d"],
    value: Float[Tensor, "batch kv_head position d_value"],
    *,
    state: Float[Tensor, "batch kv_head d d_value"] | None = None,
    chunk: int = CHUNK,
) -> tuple[Float[Tensor, "batch head position d_value"], Float[Tensor, "batch kv_head d d_value"]]:
    """Sums over j <= i of (a_i·b_j) v_j, and the state after the last token. Head h reads key head h // n_rep.

    Within a chunk by products, between chunks by the state at its start: time and memory are linear in positions. The
    heads of a key head go through each product together. Autocast is off inside.
    """
    n, n_rep = a.shape[2], a.shape[1] // b.shape[1]
    size = min(chunk, n)
    shape = {"b": len(b), "g": b.shape[1], "p": size}
    a = rearrange(_filled(a, size), "b (g r) (c p) d -> (b g c) (r p) d", r=n_rep, p=size)
    b, value = (rearrange(_filled(x, size), "b g (c p) d -> (b g c) p d", p=size) for x in (b, value))
    with torch.autocast(a.device.type, enabled=False):
        added = rearrange(torch.bmm(b.mT, value), "(b g c) d v -> b g c d v", b=shape["b"], g=shape["g"])
        start = torch.zeros_like(added[:, :, 0]) if state is None else state.to(added.dtype)
        states = torch.cat([start[:, :, None], added], 2).cumsum(2)
        before = rearrange(states[:, :, :-1], "b g c d v -> (b g c) d v")
        near = rearrange(torch.bmm(a, b.mT), "x (r p) q -> x r p q", p=size).tril().flatten(1, 2)
        sums = torch.baddbmm(torch.bmm(a, before), near, value)
    sums = rearrange(sums, "(b g c) (r p) v -> b (g r) (c p) v", r=n_rep, **shape)
    return sums[:, :, :n], states[:, :, -1]


def normalised_sums(
    query: Float[Tensor, "batch head position d"],
    key: Float[Tensor, "batch kv_head position d"],
    value: Float[Tensor, "batch kv_head position d_value"],
    *,
    feature: Callable[[Tensor], Tensor],
    valid: Bool[Tensor, "batch position"] | None = None,
    state: Float[Tensor, "batch kv_head features d_value_and_one"] | None = None,
) -> tuple[Float[Tensor, "batch head position d_value"], Float[Tensor, "batch kv_head features d_value_and_one"]]:
    """f(q_i)·Σ f(k_j) v_j' / f(q_i)·Σ f(k_j) over j ≤ i, and the state Σ f(k_j) [v_j', 1] after the last token.

    The last column of the state is the normaliser. A query before any valid key gives 0.
    """
    parts = []
    for start in range(0, query.shape[2], BLOCK):
        q, k, v = (_wide(x[:, :, start : start + BLOCK]) for x in (query, key, value))
        v = pad(v, (0, 1), value=1.0)
        v = v if valid is None else v * valid[:, None, start : start + BLOCK, None]
        sums, state = causal_sums(feature(q), feature(k), v, state=state)
        total = sums[..., -1:].clamp_min(torch.finfo(sums.dtype).tiny)
        parts.append((sums[..., :-1] / total).to(value.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2), state


def elu_attention(
    query: Float[Tensor, "batch head position d"],
    key: Float[Tensor, "batch head position d"],
    value: Float[Tensor, "batch head position d_value"],
    *,
    valid: Bool[Tensor, "batch position"] | None = None,
    state: Float[Tensor, "batch head d d_value_and_one"] | None = None,
) -> tuple[Float[Tensor, "batch head position d_value"], Float[Tensor, "batch head d d_value_and_one"]]:
    """`normalised_sums` with f = elu + 1. For S-D attention query and key are a and b of `skew_pair`."""
    return normalised_sums(query, key, value, feature=elu_feature, valid=valid, state=state)


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


def _filled(x: Tensor, size: int) -> Tensor:
    """With zeros after the last token, so that chunks are whole."""
    short = -x.shape[2] % size
    return pad(x, (0, 0, 0, short)) if short else x
