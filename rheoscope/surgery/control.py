"""The control of a plan: the same edits at random places."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int

from rheoscope.errors import Refused
from rheoscope.models.view import ModelView
from rheoscope.surgery.edits import Edit
from rheoscope.surgery.edits_sinks import ConstantHeads, HeadEdit
from rheoscope.surgery.heads import SINKS
from rheoscope.surgery.plan import completed, no_means
from rheoscope.surgery.restructure import refuse_edits

TRIES = 20  # draws for one random plan


def random_plans(view: ModelView, edits: Sequence[Edit], n: int, generator: np.random.Generator) -> list[list[Edit]]:
    """At most so many times the edits at other places, all of which the model can take; fewer where they fit nowhere.

    Constant heads come without constants.
    """
    drawn = (_elsewhere(view, edits, generator) for _ in range(n))
    return [plan for plan in drawn if plan is not None]


def _elsewhere(view: ModelView, edits: Sequence[Edit], generator: np.random.Generator) -> list[Edit] | None:
    """One random plan; None where none was found."""
    for _ in range(TRIES):
        drawn = relabelled(view, edits, generator)
        if _places(drawn) == _places(edits):
            continue
        try:
            refuse_edits(view, completed(drawn, no_means(view)))
        except Refused:
            continue
        return drawn
    return None


def relabelled(view: ModelView, edits: Sequence[Edit], generator: np.random.Generator) -> list[Edit]:
    """The edits with layers, and within each layer key groups, renamed at random.

    Kinds and numbers stay, and so does how many of them share a layer. An edit of all layers stays what it is. Layers
    change places with those of the same build. Constant heads lose their constants, which are those of other heads.
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
    builds = [_build(view, layer) for layer in range(view.n_layers)]
    layer_of = np.arange(view.n_layers)
    for build in dict.fromkeys(builds):
        layers = np.array([layer for layer, other in enumerate(builds) if other == build])
        layer_of[layers] = layers[generator.permutation(len(layers))]
    return layer_of


def _build(view: ModelView, layer: int) -> tuple[Hashable, ...]:
    """What decides which edits a layer can take: its modules, its heads, and how they attend."""
    attention = view.attentions[layer]
    return (
        tuple(type(module) for module in view.blocks[layer].modules()),
        view.sizes[layer],
        view.windows[layer],
        hasattr(attention, "mixing"),
        getattr(attention, SINKS, None) is not None,
        view.attention_has(layer, view.family.rope_if),
    )


def _places(edits: Sequence[Edit]) -> frozenset[tuple[str, Hashable]]:
    """What edits change and where, in whatever order they come."""
    return frozenset(
        (type(edit).__name__, head) if isinstance(edit, HeadEdit) else (repr(replace(edit, layers=())), head)
        for edit in edits
        for head in (edit.heads if isinstance(edit, HeadEdit) else edit.layers)
    )
