"""The control of a plan: the same edits at random places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rheoscope.models.view import ModelView
from rheoscope.surgery.edits import Edit
from rheoscope.surgery.edits_sinks import ConstantHeads, HeadEdit


def relabelled(view: ModelView, edits: Sequence[Edit], generator: np.random.Generator) -> list[Edit]:
    """The edits with layers, and within each layer key groups, renamed at random.

    Kinds and numbers stay, and so does how many of them share a layer. An edit of all layers stays what it is.
    Constant heads lose their constants, which are those of other heads.
    """
    layer_of = generator.permutation(view.n_layers)
    n_rep = view.n_heads // view.n_kv_heads
    group_of = [generator.permutation(view.n_kv_heads) for _ in range(view.n_layers)]

    def moved(head: tuple[int, int]) -> tuple[int, int]:
        layer, number = head
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
