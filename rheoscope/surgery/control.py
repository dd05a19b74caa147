"""The control of a plan: the same edits at random places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int

from rheoscope.models.view import ModelView, part
from rheoscope.surgery.edits import Edit
from rheoscope.surgery.edits_sinks import ConstantHeads, HeadEdit
from rheoscope.surgery.fused import is_fused


def relabelled(view: ModelView, edits: Sequence[Edit], generator: np.random.Generator) -> list[Edit]:
    """The edits with layers, and within each layer key groups, renamed at random.

    Kinds and numbers stay, and so does how many of them share a layer. An edit of all layers stays what it is. In a
    model that was edited before, layers change places with those of the same build. Constant heads lose their
    constants, which are those of other heads.
    """
    layer_of = _renamed(view, generator)
    group_of = [generator.permutation(size.n_kv_heads) for size in view.sizes]

    def moved(head: tuple[int, int]) -> tuple[int, int]:
        layer, number = head
        n_rep = view.sizes[layer].n_heads // view.sizes[layer].n_kv_heads
        group, place = divmod(number, n_rep)
        return int(layer_of[layer]), int(group_of[layer][group]) * n_rep + place

    drawn: list[Edit] = []
    for edit in edits:
        if isinstance(edit, HeadEdit):
            cleared = {"constants": ()} if isinstance(edit, ConstantHeads) else {}
            drawn.append(replace(edit, heads=tuple(moved(head) for head in edit.heads), **cleared))
        else:
            drawn.append(replace(edit, layers=tuple(sorted(int(layer_of[layer]) for layer in edit.layers))))
    return drawn


def _renamed(view: ModelView, generator: np.random.Generator) -> Int[np.ndarray, " layer"]:
    """A random layer of the same build for every layer, each taken once."""
    builds = [
        (size.n_heads, size.n_kv_heads, hasattr(part(block, view.family.attn), "mixing"), is_fused(block))
        for size, block in zip(view.sizes, view.blocks, strict=True)
    ]
    layer_of = np.arange(view.n_layers)
    for build in sorted(set(builds)):
        layers = np.array([layer for layer, other in enumerate(builds) if other == build])
        layer_of[layers] = layers[generator.permutation(len(layers))]
    return layer_of
