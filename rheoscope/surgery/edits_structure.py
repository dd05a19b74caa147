"""Edits of what a layer consists of: no attention, attention beside the feed-forward network, narrower scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rheoscope.errors import Refused
from rheoscope.models.interface import Tap
from rheoscope.models.view import ModelView
from rheoscope.surgery.edits import Edit
from rheoscope.surgery.edits_steering import ParallelFFN
from rheoscope.surgery.heads import layout_of
from rheoscope.surgery.shrink import basis_of, refuse_shrink


@dataclass(frozen=True)
class DropAttention(Edit):
    """Layers whose heads write nothing. What the layer's output bias, and a norm after it, add stays."""

    def taps(self, view: ModelView) -> Mapping[str, Tap]:
        _refuse_gone(view, self.chosen(view), "attention asked to be dropped")

        def tap(_layer: int, z: Tensor) -> Tensor:
            return torch.zeros_like(z)

        return {"z": tap}


@dataclass(frozen=True)
class Parallelize(ParallelFFN):
    """`ParallelFFN`, to be kept: x + A + Φ(x + A) becomes x + A + Φ(x).

    fused: in the saved model one norm and one product make queries, keys, values and what enters the feed-forward
    network, and one product makes what both write. The same numbers by fewer and larger products.
    """

    fused: bool = False


@dataclass(frozen=True)
class ShrinkHeads(Edit):
    """Queries and keys of `rank` coordinates per head; the score scale stays.

    Without RoPE in the basis that keeps W_Q W_K' best; with RoPE as whole pairs, those with the largest weights.
    Refused with QK-norm, for S-D layers, and for an odd rank with RoPE.
    """

    rank: int = 2

    def taps(self, view: ModelView) -> Mapping[str, Tap]:
        _refuse_gone(view, self.chosen(view), "narrower q and k asked for")
        layouts = {layer: layout_of(view.blocks[layer], view.family) for layer in self.chosen(view)}
        for layer, layout in layouts.items():
            refuse_shrink(layout, view.config, self.rank, f"layer {layer}")
        basis = cache(lambda layer: basis_of(layouts[layer], view.config, self.rank))

        def query(layer: int, q: Tensor) -> Tensor:
            n_rep = layouts[layer].n_rep
            return _narrowed(q, *(x.repeat_interleave(n_rep, 0) for x in (basis(layer).P_q, basis(layer).places)))

        return {"q": query, "k": lambda layer, k: _narrowed(k, basis(layer).P_k, basis(layer).places)}


def _refuse_gone(view: ModelView, layers: Sequence[int], asked: str) -> None:
    """Raise Refused where an earlier edit has taken attention away."""
    gone = [layer for layer in layers if not view.sizes[layer].n_heads]
    if gone:
        raise Refused(f"{asked} in layers {gone}; no attention is left there: leave them out")


def _narrowed(
    x: Float[Tensor, "batch head position d_head"],
    P: Float[Tensor, "head d_head rank"],
    places: Int[Tensor, "head rank"],
) -> Float[Tensor, "batch head position d_head"]:
    """x P in some places, 0 elsewhere."""
    narrow = torch.einsum("bhpd,hdr->bhpr", x, P.to(x))
    return torch.zeros_like(x).scatter(-1, places[None, :, None].expand_as(narrow), narrow)
