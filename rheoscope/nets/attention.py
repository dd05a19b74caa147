"""Attention that ends in a softmax: scores S - D, gated keys, lagged keys. Tensors are [batch head position d].

`mask` is None (causal, nothing padded) or boolean, True where a query may attend to a key. Keys may be more than
queries: the last key is the last query's own, the earlier ones come from a cache.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention


def skew_pair(
    query: Float[Tensor, "batch head position d_head"], key: Float[Tensor, "batch head position d_head"]
) -> tuple[Float[Tensor, "batch head position twice"], Float[Tensor, "batch head position twice"]]:
    """Vectors a = [q; k] and b = [k; -q], so that a_i·b_j = q_i·k_j - k_i·q_j: skew, and exactly 0 where i = j."""
    return torch.cat([query, key], -1), torch.cat([key, -query], -1)


def causal_mask(n_query: int, n_key: int, device: torch.device) -> Bool[Tensor, "query key"]:
    """True where a query may attend: to the keys up to its own, the last key being the last query's."""
    return torch.ones(n_query, n_key, dtype=torch.bool, device=device).tril(n_key - n_query)


def diagonal_bias(damping: Float[Tensor, "batch head query"], n_key: int) -> Float[Tensor, "batch head query key"]:
    """The matrix -D: -d_i where query i meets its own key, 0 elsewhere. Added to scores S it makes S - D."""
    past = n_key - damping.shape[-1]
    return pad(torch.diag_embed(-damping), (past, 0))


def sd_attention(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch head query d_head"],
    value: Float[Tensor, "batch head query d_value"],
    damping: Float[Tensor, "batch head query"],
    *,
    mask: Bool[Tensor, "#batch #head query key"] | None,
    scale: float,
    past: tuple[Float[Tensor, "batch head past twice"], Float[Tensor, "batch head past d_value"]] | None = None,
) -> Float[Tensor, "batch head query d_value"]:
    """softmax(S - D) V by one fused call; `past` holds b of `skew_pair` and values of earlier tokens, without gradient.

    The score of a query with itself is -d_i alone, as S_ii = 0. So the keys are shifted by one place, key 0 becomes a
    null key whose score with query i is -d_i (one more coordinate on a and b), and every query sees the null key and
    the keys before its own. An extra column of V returns p_i, the weight of the null key, and p_i v_i is added.
    Exact for every d_i, unlike a correction by the log-sum-exp, which cancels where p_i is near 1.
    """
    n_query = query.shape[2]
    queries, keys, values = _Shifted.apply(query, key, value, damping, scale, past)
    n_key = keys.shape[2]
    earlier = None
    if mask is not None:
        before = causal_mask(n_query, n_key - 1, mask.device)
        earlier = pad(mask[..., :-1] & before, (1, 0), value=True)
    elif 1 < n_query != n_key:
        earlier = causal_mask(n_query, n_key, query.device)
    mixed = scaled_dot_product_attention(
        queries, keys, values, attn_mask=earlier, scale=scale, is_causal=earlier is None and n_query > 1
    )
    return _WithSelf.apply(mixed, value)


class _Shifted(torch.autograd.Function):
    """The three inputs of the fused call, written straight into place.

    As a chain of cat and pad the same costs a third of the attention call itself in copies, forward and backward.
    Memory runs over positions before heads, as in the projections around, so that nothing is copied to be reordered.
    """

    @staticmethod
    def forward(ctx, query, key, value, damping, scale, past):
        d, d_value, n_past = query.shape[-1], value.shape[-1], 0 if past is None else past[0].shape[2]
        width = 2 * d + 1
        queries = _rows(query, query.shape[2], width)
        queries[..., :d], queries[..., d:-1], queries[..., -1] = query, key, damping / -scale
        keys, values = (_rows(query, n_past + query.shape[2], width) for _ in range(2))
        keys[..., -1], values[..., d_value:] = 0, 0
        keys[:, :, 0], values[:, :, 0] = 0, 0
        keys[:, :, 0, -1], values[:, :, 0, d_value] = 1, 1
        if past is not None:
            keys[:, :, 1 : n_past + 1, :-1], values[:, :, 1 : n_past + 1, :d_value] = past
        after = keys[:, :, n_past + 1 :]
        after[..., :d] = key[:, :, :-1]
        torch.neg(query[:, :, :-1], out=after[..., d:-1])
        values[:, :, n_past + 1 :, :d_value] = value[:, :, :-1]
        ctx.sizes = d, d_value, n_past, scale, damping.dtype
        return queries, keys, values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, to_queries, to_keys, to_values):
        d, d_value, n_past, scale, dtype = ctx.sizes
        n_query = to_queries.shape[2]
        after = to_keys[:, :, n_past + 1 :]
        query, key, value = (_rows(to_queries, n_query, size) for size in (d, d, d_value))
        torch.sub(to_queries[:, :, :-1, :d], after[..., d:-1], out=query[:, :, :-1])
        torch.add(to_queries[:, :, :-1, d:-1], after[..., :d], out=key[:, :, :-1])
        query[:, :, -1], key[:, :, -1] = to_queries[:, :, -1, :d], to_queries[:, :, -1, d:-1]
        value[:, :, :-1], value[:, :, -1] = to_values[:, :, n_past + 1 :, :d_value], 0
        return query, key, value, (to_queries[..., -1] / -scale).to(dtype), None, None


class _WithSelf(torch.autograd.Function):
    """z_i + p_i v_i from rows (z_i, p_i, 0 ...). By slices, autograd would fill and add two wide tensors of zeros."""

    @staticmethod
    def forward(ctx, mixed, value):
        d_value = value.shape[-1]
        ctx.save_for_backward(mixed[..., d_value : d_value + 1], value)
        ctx.width = mixed.shape[-1]
        return torch.addcmul(mixed[..., :d_value], mixed[..., d_value : d_value + 1], value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, to_output):
        share, value = ctx.saved_tensors
        d_value = value.shape[-1]
        to_mixed = _rows(value, value.shape[2], ctx.width)
        to_mixed[..., :d_value], to_mixed[..., d_value + 1 :] = to_output, 0
        torch.linalg.vecdot(to_output, value, out=to_mixed[..., d_value])
        return to_mixed, to_output * share


def _rows(like: Tensor, n: int, width: int) -> Float[Tensor, "batch head n width"]:
    """Memory for n positions, all heads of a position side by side."""
    return like.new_empty(like.shape[0], n, like.shape[1], width).transpose(1, 2)


def key_biased_attention(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch head key d_head"],
    value: Float[Tensor, "batch head key d_head"],
    bias: Float[Tensor, "batch head key"],
    *,
    mask: Bool[Tensor, "#batch #head query key"] | None,
    scale: float,
) -> Float[Tensor, "batch head query d_head"]:
    """softmax(scale q_i·k_j + bias_j) V by one fused call: the bias is one more coordinate of q and k."""
    n_query, n_key = query.shape[2], key.shape[2]
    if mask is None and 1 < n_query != n_key:
        mask = causal_mask(n_query, n_key, query.device)
    mixed = scaled_dot_product_attention(
        pad(query, (0, 1), value=1 / scale),
        torch.cat([key, bias.to(key.dtype)[..., None]], -1),
        pad(value, (0, 1)),
        attn_mask=mask,
        scale=scale,
        is_causal=mask is None and n_query > 1,
    )
    return mixed[..., :-1]


def lagged_keys(
    key: Float[Tensor, "batch head key d_head"],
    weights: Float[Tensor, "head lag"],
    valid: Bool[Tensor, "batch key"] | None,
) -> Float[Tensor, "batch head key d_head"]:
    """Keys averaged over their own place and the places before it: sum over lags l of weights_l k_{j-l}.

    With them the scores are sum_l weights_l q_i·k_{j-l}. Padded places and places before the first add nothing.
    """
    if valid is not None:
        key = key * valid[:, None, :, None]
    n_key, n_lags = key.shape[2], weights.shape[-1]
    padded = pad(key, (0, 0, n_lags - 1, 0))
    shares = weights.to(key.dtype)[:, :, None, None]
    return sum(shares[:, lag] * padded[:, :, n_lags - 1 - lag :][:, :, :n_key] for lag in range(n_lags))


def eager_attention(
    module: nn.Module | None,
    query: Float[Tensor, "batch head query d"],
    key: Float[Tensor, "batch head key d"],
    value: Float[Tensor, "batch head key d_value"],
    attention_mask: Tensor | None,
    *,
    scaling: float,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Float[Tensor, "batch query head d_value"], Float[Tensor, "batch head query key"]]:
    """softmax(scale q·k + bias + mask) V and the probabilities, in the form transformers calls it."""
    scores = query @ key.mT * scaling
    if position_bias is not None:
        scores = scores + position_bias.to(scores.dtype)
    if attention_mask is None:
        hidden = ~causal_mask(query.shape[2], key.shape[2], query.device)
        scores = scores.masked_fill(hidden, -torch.inf)
    elif attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    else:
        scores = (scores + attention_mask).clamp_min(torch.finfo(scores.dtype).min)
    exact = torch.float32 if scores.dtype in (torch.float16, torch.bfloat16) else None
    probs = scores.softmax(-1, dtype=exact).to(value.dtype)
    return (probs @ value).transpose(1, 2).contiguous(), probs
