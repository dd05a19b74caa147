"""Sink, diagonal and previous-token masses of attention, from a few columns of the maps of each window.

The sink of a head in a window is the key with the largest mean mass over the queries that may attend to it. Candidates
are the first keys and the best key of a few probing rows, spread over the window; their masses are then exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rheoscope.instruments.sinks.map_entries import MapEntries, may_attend, seen_by
from rheoscope.models.attention import Attention

FEWEST_QUERIES = 32  # that must be able to attend to a sink, or a quarter of the window or of the sliding window
SKIPPED = 8  # queries at the start with so few keys that attention to oneself means little


@dataclass(frozen=True)
class Sinks:
    """The sink of every head in every window.

    key: its position. attended: A(i, key) of all queries, plus what a learned sink takes. counted: queries whose
    attention to it counts. mass: mean of `attended` over those. first: what the first keys receive and from how many
    queries, both 0 for keys that too few may attend to. missing: what learned sinks take of each query; None without.
    """

    key: Int[Tensor, "batch head"]
    attended: Float[Tensor, "batch head query"]
    counted: Bool[Tensor, "batch head query"]
    mass: Float[Tensor, "batch head"]
    first: tuple[Float[Tensor, "batch head first"], Int[Tensor, "batch head first"]]
    missing: Float[Tensor, "batch head query"] | None


def found_sinks(
    attention: Attention, entries: MapEntries, valid: Bool[Tensor, "batch query"], *, n_first: int, n_probes: int
) -> Sinks:
    """The sink of every head in every window, found and then measured on all queries.

    The row that sees one key only (row 0 of a causal model) is left out.
    """
    batch, heads, n_query, _ = attention.q.shape
    counted = counted_queries(attention, valid)
    probes = _spread(valid.sum(1), n_probes)
    rows, seen = entries.rows(probes), seen_by(attention, probes)
    weight = counted.gather(1, probes)[:, None, :, None].to(rows)
    shown = weight.expand(-1, -1, -1, n_query) if seen is None else weight * seen
    estimate = (rows * weight).sum(2) / shown.sum(2).clamp(min=1)
    eligible = eligible_keys(attention, valid)
    best = estimate.masked_fill(~eligible[:, None], -1.0).argmax(-1, keepdim=True)
    first = torch.arange(min(n_first, n_query), device=best.device).expand(batch, heads, -1)
    keys = torch.cat([first, best], -1)
    columns, counts = entries.columns(keys), may_attend(attention, keys) & counted[:, None, None]
    allowed = eligible.gather(1, keys.flatten(1)).view_as(keys)
    received, queries = ((part * allowed[..., None]).sum(-1) for part in (columns * counts, counts))
    place = (received / queries).nan_to_num(nan=-1.0).argmax(-1, keepdim=True)
    take = place[..., None].expand(-1, -1, -1, n_query)
    attended, of_sink = columns.gather(2, take)[:, :, 0], counts.gather(2, take)[:, :, 0]
    missing = None if attention.sinks is None else 1 - attention.probs.sum(-1, dtype=columns.dtype)
    if missing is not None:
        attended = attended + missing
    mass = (attended * of_sink).sum(-1) / of_sink.sum(-1)
    first_keys = received[..., :-1], queries[..., :-1]
    return Sinks(keys.gather(2, place)[..., 0], attended, of_sink, mass, first_keys, missing)


def counted_queries(attention: Attention, valid: Bool[Tensor, "batch query"]) -> Bool[Tensor, "batch query"]:
    """Queries that count: real tokens, and in a causal model not the first, which has no choice."""
    counted = valid.clone()
    if attention.causal:
        counted[:, 0] = False
    return counted


def queries_per_key(attention: Attention, counted: Bool[Tensor, "batch query"]) -> Int[Tensor, "batch key"]:
    """How many counted queries may attend to each key."""
    if attention.mask is not None:
        return (attention.allowed[:, 0] & counted[:, :, None]).sum(1)
    if attention.causal:
        return counted.flip(1).cumsum(1).flip(1)
    return counted.sum(1, keepdim=True).expand(-1, counted.shape[1])


def query_sums(
    entries: MapEntries, sinks: Sinks, valid: Bool[Tensor, "batch query"], *, off: float
) -> dict[str, tuple[Float[Tensor, "batch head"], Tensor]]:
    """Numerators and denominators of the masses and switches of every window; denominators count queries."""
    late = late_queries(valid)
    number = late.sum(1, keepdim=True)
    after_sink = late[:, None] & sinks.counted
    diagonal = entries.diagonal(0)
    sums = {
        "sink_mass": ((sinks.attended * sinks.counted).sum(-1), sinks.counted.sum(-1)),
        "diagonal_mass": ((diagonal * late[:, None]).sum(-1), number),
        "previous_mass": ((entries.diagonal(1) * late[:, None]).sum(-1), number),
        "hard_switch_share": (((sinks.attended > off) & after_sink).sum(-1), after_sink.sum(-1)),
        "soft_switch_share": (((diagonal > off) & late[:, None]).sum(-1), number),
    }
    if sinks.missing is not None:
        sums["learned_sink_mass"] = ((sinks.missing * valid[:, None]).sum(-1), valid.sum(1, keepdim=True))
    return {name: (top, below.expand_as(top)) for name, (top, below) in sums.items()}


def late_queries(valid: Bool[Tensor, "batch query"]) -> Bool[Tensor, "batch query"]:
    """Real tokens from position SKIPPED on."""
    late = valid.clone()
    late[:, :SKIPPED] = False
    return late


def eligible_keys(attention: Attention, valid: Bool[Tensor, "batch key"]) -> Bool[Tensor, "batch key"]:
    """Keys that can be sinks: FEWEST_QUERIES may attend to them, or a quarter of the (sliding) window."""
    reach = valid.sum(1) if attention.window is None else valid.sum(1).clamp(max=attention.window)
    fewest = (reach // 4).clamp(min=1, max=FEWEST_QUERIES)
    return (queries_per_key(attention, counted_queries(attention, valid)) >= fewest[:, None]) & valid


def _spread(lengths: Int[Tensor, " batch"], n: int) -> Int[Tensor, "batch probe"]:
    """Positions of `n` queries spread evenly over each window, from its second token to its last."""
    steps = torch.arange(1, n + 1, device=lengths.device)
    return ((lengths[:, None] - 1) * steps / n).round().long().clamp(min=0)
