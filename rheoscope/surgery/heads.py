"""Heads really removed from an attention module: rows and columns of its projections, and whatever counts heads.

All of it works on empty (meta) parameters too: a saved model is given its shapes by the same code.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rheoscope.errors import Refused
from rheoscope.models.families import Family, Packing
from rheoscope.models.view import part
from rheoscope.surgery.modules import Widened

# What an attention module may call its width of a head, and what it counts heads by: name -> heads, key heads, or
# heads times width. Those a module has are corrected; `num_key_value_groups` stays, as groups go whole.
WIDTHS = ("head_dim", "attention_head_size", "head_size")
COUNTS = {"num_heads": 0, "n_heads": 0, "num_attention_heads": 0, "num_key_value_heads": 1, "kv_heads": 1}
TOTALS = {"split_size": 0, "all_head_size": 0, "kv_dim": 1}
SINKS = "sinks"


@dataclass(frozen=True)
class Layout:
    """Where the attention of one block keeps its heads, and how many it has; read off its shapes."""

    block: nn.Module
    family: Family
    n_heads: int
    n_kv_heads: int
    d_head: int

    @property
    def attention(self) -> nn.Module:
        return part(self.block, self.family.attn)

    @property
    def o(self) -> nn.Module:
        return part(self.block, self.family.o)

    @property
    def n_rep(self) -> int:
        return self.n_heads // self.n_kv_heads

    @property
    def o_inside(self) -> bool:
        """Whether the output projection is part of the attention module, as it is everywhere but in BERT."""
        return self.family.o.startswith(f"{self.family.attn}.")

    def group(self, kv_head: int) -> range:
        """The query heads that read one key head."""
        return range(kv_head * self.n_rep, (kv_head + 1) * self.n_rep)

    def rows(self, heads: Iterable[int]) -> list[int]:
        """Coordinates of heads among all of them."""
        return list(chain.from_iterable(range(head * self.d_head, (head + 1) * self.d_head) for head in heads))


class FusedHeads(NamedTuple):
    """What a block that was fused says of itself, as its `fused`: its projections have no shapes of their own."""

    n_heads: int
    n_kv_heads: int
    d_head: int
    has_bias: bool  # of the output projection


def fused_heads(block: nn.Module) -> FusedHeads | None:
    """The heads of a block that was fused; None of any other."""
    return getattr(block, "fused", None)


def layout_of(block: nn.Module, family: Family) -> Layout:
    """The layout of a block that has attention."""
    fused = fused_heads(block)
    if fused is not None:
        return Layout(block, family, fused.n_heads, fused.n_kv_heads, fused.d_head)
    attention = part(block, family.attn)
    d_head = next(getattr(attention, name) for name in WIDTHS if hasattr(attention, name))
    beside = sum(token_map.n_beside for token_map in getattr(attention, "token_maps", ()))
    n_heads = (sizes(part(block, family.o), family)[0] - beside) // d_head
    if family.qkv is None:
        n_kv_heads = sizes(part(block, family.k), family)[1] // d_head
    elif family.packing is Packing.PER_HEAD:
        n_kv_heads = n_heads
    else:
        n_kv_heads = (sizes(part(block, family.qkv), family)[1] // d_head - n_heads) // 2
    return Layout(block, family, n_heads, n_kv_heads, d_head)


def sizes(projection: nn.Module, family: Family) -> tuple[int, int]:
    """Inputs and outputs of a projection."""
    shape = projection.weight.shape
    return tuple(shape) if family.transposed else tuple(shape)[::-1]


def rows_of(layout: Layout, which: int, heads: Iterable[int]) -> tuple[nn.Module, list[int]]:
    """The projection that makes queries (0), keys (1) or values (2), and the outputs of it that are those of heads.

    Heads are query heads for queries, key heads for the others.
    """
    family, d = layout.family, layout.d_head
    if family.qkv is None:
        return part(layout.block, (family.q, family.k, family.v)[which]), layout.rows(heads)
    packed = part(layout.block, family.qkv)
    if family.packing is Packing.PER_HEAD:
        starts = ((3 * head + which) * d for head in heads)
        return packed, list(chain.from_iterable(range(start, start + d) for start in starts))
    offset = (0, layout.n_heads, layout.n_heads + layout.n_kv_heads)[which] * d
    return packed, [offset + row for row in layout.rows(heads)]


def keep_groups(layout: Layout, kv_heads: list[int]) -> None:
    """Remove all heads but those that read the given key heads."""
    family, attention = layout.family, layout.attention
    heads = list(chain.from_iterable(layout.group(kv_head) for kv_head in kv_heads))
    q_rows, kv_rows, d = layout.rows(heads), layout.rows(kv_heads), layout.d_head
    if family.qkv is None:
        for path, rows in ((family.q, q_rows), (family.k, kv_rows), (family.v, kv_rows)):
            select_outputs(part(layout.block, path), rows, family)
    else:
        if family.packing is Packing.PER_HEAD:
            rows = list(chain.from_iterable(range(3 * d * head, 3 * d * (head + 1)) for head in heads))
        else:
            q_size, k_size = layout.n_heads * d, layout.n_kv_heads * d
            rows = [*q_rows, *(q_size + row for row in kv_rows), *(q_size + k_size + row for row in kv_rows)]
        select_outputs(part(layout.block, family.qkv), rows, family)
    beside = range(layout.n_heads * d, sizes(layout.o, family)[0])
    select_inputs(layout.o, [*q_rows, *beside], family)
    for path, kept in ((family.q_norm, heads), (family.k_norm, kv_heads)):
        if path is not None:
            _select_norms(part(layout.block, path), kept)
    if isinstance(getattr(attention, SINKS, None), nn.Parameter):
        attention.sinks = selected(attention.sinks, heads, 0)
    _recount(layout, len(heads), len(kv_heads))


def refuse_cut(block: nn.Module, family: Family) -> None:
    """Raise Refused for an attention module from which single heads cannot be taken without changing the others."""
    if family.norm_joint:
        raise Refused(
            "some heads of a layer asked to be removed; its norm of queries and keys runs over all heads at once, so "
            "the others would change: drop all heads of the layer, or none"
        )
    if any(isinstance(part(block, path), Widened) for path in _projections(family)):
        raise Refused(
            "heads asked to be removed from a layer whose queries and keys were made narrower: make both edits at once"
        )
    foreign = own_parameters(block, family)
    if foreign:
        raise Refused(
            f"heads asked to be removed from a layer whose attention has parameters of its own ({foreign[0]}): "
            "only ordinary attention can be cut"
        )


def own_parameters(block: nn.Module, family: Family) -> list[str]:
    """Names of parameters of an attention module beyond those that ordinary attention has."""
    attention = part(block, family.attn)
    paths = [*_projections(family), *(path for path in (family.q_norm, family.k_norm) if path is not None)]
    known = [part(block, path) for path in paths] + [getattr(attention, "token_maps", nn.Module())]
    inside = {id(parameter) for module in known for parameter in module.parameters()}
    return [name for name, p in attention.named_parameters() if id(p) not in inside and name != SINKS]


def _projections(family: Family) -> tuple[str, ...]:
    return (*((family.q, family.k, family.v) if family.qkv is None else (family.qkv,)), family.o)


def in_out(projection: nn.Module, family: Family) -> Float[Tensor, "inputs outputs"]:
    """The weight of a projection as [in, out]."""
    weight = projection.weight.detach()
    return weight if family.transposed else weight.T


def selected(parameter: Tensor, places: list[int], dim: int) -> nn.Parameter:
    """Some places of a parameter along one dimension, as a parameter of its own."""
    index = torch.tensor(places, dtype=torch.long, device=parameter.device)
    return nn.Parameter(parameter.detach().index_select(dim, index), requires_grad=parameter.requires_grad)


def select_outputs(projection: nn.Module, rows: list[int], family: Family) -> None:
    """Keep some outputs of a projection."""
    projection.weight = selected(projection.weight, rows, 1 if family.transposed else 0)
    if getattr(projection, "bias", None) is not None:
        projection.bias = selected(projection.bias, rows, 0)
    _resize(projection, family)


def select_inputs(projection: nn.Module, columns: list[int], family: Family) -> None:
    """Keep some inputs of a projection."""
    projection.weight = selected(projection.weight, columns, 0 if family.transposed else 1)
    _resize(projection, family)


def _resize(projection: nn.Module, family: Family) -> None:
    n_in, n_out = sizes(projection, family)
    for name, size in (("in_features", n_in), ("out_features", n_out), ("nx", n_in), ("nf", n_out)):
        if hasattr(projection, name):
            setattr(projection, name, size)


def _select_norms(norm: nn.Module, heads: list[int]) -> None:
    """Keep the gains of some heads; a gain that all heads share stays."""
    if isinstance(getattr(norm, "norms", None), nn.ModuleList):
        norm.norms = nn.ModuleList([norm.norms[head] for head in heads])
        norm.num_heads = len(heads)
        return
    for name, weight in list(norm.named_parameters(recurse=False)):
        if weight.dim() == 2:  # [head d_head]
            setattr(norm, name, selected(weight, heads, 0))


def _recount(layout: Layout, n_heads: int, n_kv_heads: int) -> None:
    """Correct what counts heads."""
    attention, counts = layout.attention, (n_heads, n_kv_heads)
    for name, which in COUNTS.items():
        if hasattr(attention, name):
            setattr(attention, name, counts[which])
    for name, which in TOTALS.items():
        if hasattr(attention, name):
            setattr(attention, name, counts[which] * layout.d_head)
    if layout.family.counts_in_config:
        attention.config = copy.copy(attention.config)
        attention.config.num_attention_heads, attention.config.num_key_value_heads = counts
