"""Single entries of attention maps without the maps: from queries, keys and the normaliser of every row.

A(i, j) = exp(M_ij - L_i), L_i the log-sum-exp of row i, which fused attention computes anyway. Where the map is there
already, or the model needs it for its output (soft-cap, learned sinks), entries are read from it. All are in float32 or
better, whatever the model computes in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from rheoscope.models.attention import Attention

CHUNK = 128  # queries whose scores are alive at a time, where no fused kernel gives the normaliser


class MapEntries(ABC):
    """Some entries of the maps of one attention call, 0 where a query may not attend."""

    @abstractmethod
    def columns(self, keys: Int[Tensor, "batch head column"]) -> Float[Tensor, "batch head column query"]:
        """A(i, k) of all queries, for some keys of each head."""

    @abstractmethod
    def diagonal(self, lag: int) -> Float[Tensor, "batch head query"]:
        """A(i, i - lag) of all queries; 0 for the first `lag` of them."""

    @abstractmethod
    def rows(self, queries: Int[Tensor, "#batch row"]) -> Float[Tensor, "batch head row key"]:
        """Whole rows of some queries of each window."""


def map_entries(attention: Attention) -> MapEntries:
    """The entries of one call, by the cheapest exact route. Where z was not computed yet it is now."""
    needs_map = attention._probs is not None or attention._scores is not None or attention.bias is not None
    if needs_map or attention.softcap or attention.sinks is not None:
        return FromMap(attention.probs)
    _ = attention.z  # where the fused kernel makes it, the normalisers come with it
    call, normaliser = attention.raised(), attention.normaliser
    return FromNormaliser(call, chunked_normaliser(call) if normaliser is None else normaliser)


@dataclass
class FromMap(MapEntries):
    """Entries read from maps that are there."""

    probs: Float[Tensor, "batch head query key"]

    def columns(self, keys: Int[Tensor, "batch head column"]) -> Float[Tensor, "batch head column query"]:
        n_query = self.probs.shape[2]
        return _raised(self.probs.gather(3, keys[:, :, None].expand(-1, -1, n_query, -1)).mT)

    def diagonal(self, lag: int) -> Float[Tensor, "batch head query"]:
        entries = _raised(self.probs.diagonal(-lag, dim1=2, dim2=3))
        return torch.nn.functional.pad(entries, (self.probs.shape[2] - entries.shape[-1], 0))

    def rows(self, queries: Int[Tensor, "#batch row"]) -> Float[Tensor, "batch head row key"]:
        return _raised(of_queries(self.probs, queries))


@dataclass
class FromNormaliser(MapEntries):
    """Entries computed one by one from queries, keys and row normalisers."""

    attention: Attention
    normaliser: Float[Tensor, "batch head query"]

    def columns(self, keys: Int[Tensor, "batch head column"]) -> Float[Tensor, "batch head column query"]:
        q, k = self.attention.q, self.attention.k
        batch, heads, _, d_head = q.shape
        groups = keys.unflatten(1, (k.shape[1], -1)).flatten(2)
        chosen = k.gather(2, groups[..., None].expand(-1, -1, -1, d_head)).reshape(batch, heads, -1, d_head)
        logits = chosen @ q.mT * self.attention.scale
        logits = logits.masked_fill(~may_attend(self.attention, keys), -torch.inf)
        return (logits - self.normaliser[:, :, None]).exp()

    def diagonal(self, lag: int) -> Float[Tensor, "batch head query"]:
        q, k = self.attention.q, self.attention.k
        n = q.shape[2]
        kept = max(n - lag, 0)
        grouped = q[:, :, n - kept :].unflatten(1, (k.shape[1], -1))
        logits = (grouped * k[:, :, None, :kept]).sum(-1).flatten(1, 2) * self.attention.scale
        if self.attention.mask is not None:
            seen = self.attention.allowed.diagonal(-lag, dim1=2, dim2=3)
            logits = logits.masked_fill(~seen, -torch.inf)
        entries = (logits - self.normaliser[:, :, n - kept :]).exp()
        return torch.nn.functional.pad(entries, (n - kept, 0))

    def rows(self, queries: Int[Tensor, "#batch row"]) -> Float[Tensor, "batch head row key"]:
        scores = masked_scores(self.attention, queries)
        return (scores - of_queries(self.normaliser[..., None], queries)).exp()


def _raised(entries: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    return entries.to(torch.promote_types(entries.dtype, torch.float32))


def masked_scores(attention: Attention, queries: Int[Tensor, "#batch row"]) -> Float[Tensor, "batch head row key"]:
    """Scores of some queries with -inf where they may not attend."""
    q, k = of_queries(attention.q, queries), attention.k
    scores = (q.unflatten(1, (k.shape[1], -1)) @ k.mT[:, :, None]).flatten(1, 2) * attention.scale
    seen = seen_by(attention, queries)
    return scores if seen is None else scores.masked_fill(~seen, -torch.inf)


def seen_by(attention: Attention, queries: Int[Tensor, "#batch row"]) -> Bool[Tensor, "#batch #head row key"] | None:
    """Which keys some queries may attend to; None for all."""
    if attention.mask is not None:
        return of_queries(attention.allowed, queries)
    if attention.causal:
        return queries[:, None, :, None] >= torch.arange(attention.k.shape[2], device=queries.device)
    return None


def may_attend(attention: Attention, keys: Int[Tensor, "batch head column"]) -> Bool[Tensor, "batch head column query"]:
    """Which queries may attend to some keys of each head."""
    n_query = attention.q.shape[2]
    if attention.mask is not None:
        allowed = attention.allowed.expand(keys.shape[0], keys.shape[1], -1, -1)
        return allowed.gather(3, keys[:, :, None].expand(-1, -1, n_query, -1)).mT
    if attention.causal:
        return torch.arange(n_query, device=keys.device) >= keys[..., None]
    return keys.new_ones((*keys.shape, n_query), dtype=torch.bool)


def of_queries(
    values: Shaped[Tensor, "batch head query d"], queries: Int[Tensor, "#batch row"]
) -> Shaped[Tensor, "batch head row d"]:
    """The rows of some queries of each window; one list of queries serves all windows."""
    if len(queries) == 1:
        return values[:, :, queries[0]]
    wide = values if len(values) == len(queries) else values.expand(len(queries), -1, -1, -1)
    index = queries[:, None, :, None].expand(-1, wide.shape[1], -1, wide.shape[3])
    return wide.gather(2, index)


def chunked_normaliser(attention: Attention) -> Float[Tensor, "batch head query"]:
    """Log-sum-exp of every row, a block of queries at a time; 0 for a row that sees nothing."""
    queries = torch.arange(attention.q.shape[2], device=attention.q.device)
    parts = [masked_scores(attention, chunk[None]).logsumexp(-1) for chunk in queries.split(CHUNK)]
    return torch.cat(parts, -1).nan_to_num(neginf=0.0)
