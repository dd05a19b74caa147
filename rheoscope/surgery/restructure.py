"""Edits as modules instead of taps: a new model in which work and parameters are really saved.

    model = restructured(view, [DropHeads(heads=((3, 0), (3, 1), (3, 2))), Linearize(layers=(7,))])
    save_edited(model, view.tokenizer, "edited")

It gives the logits that the same edits give through taps.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from rheoscope.errors import Refused, RheoscopeError
from rheoscope.models.view import ModelView
from rheoscope.surgery.changes import gathered
from rheoscope.surgery.edited_model import EditedForCausalLM
from rheoscope.surgery.edits import Edit
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.heads import own_parameters
from rheoscope.surgery.reshape import reshape
from rheoscope.surgery.structure import wrapped


def restructured(view: ModelView, edits: Sequence[Edit]) -> EditedForCausalLM:
    """A new model with the edits made for good; the model of the view is left as it is, and shares nothing with it.

    Head numbers in all edits are those of the view's model. Raises Refused where a family cannot be changed so.
    """
    refuse_edits(view, edits)
    model = copy.deepcopy(view.model)
    model = model if isinstance(model, EditedForCausalLM) else wrapped(model)
    model.edit(edits)
    return model.eval()


def saving(view: ModelView, edit: Edit) -> int:
    """Parameters that the edit removes; negative where it adds some. Raises as `restructured` does."""
    return _tried(view, [edit])


def refuse_edits(view: ModelView, edits: Sequence[Edit]) -> None:
    """Raise where the edits cannot be made on this model, before anything is copied or run."""
    _tried(view, edits)


def _tried(view: ModelView, edits: Sequence[Edit]) -> int:
    """Parameters that the edits remove, found by making them on copies of the layers that hold no numbers."""
    if not edits:
        raise RheoscopeError("a model asked to be restructured by no edits: give at least one")
    if view.family is None:
        raise Refused(
            f"edits asked to be kept in a {view.model_type}, which has no row in rheoscope/models/families.py: "
            "use a family of docs/families.md"
        )
    for edit in edits:
        edit.chosen(view)
        edit.taps(view)
        if isinstance(edit, Linearize):
            _refuse_linear(view, edit)
    saved = 0
    for layer, change in gathered(edits, view.n_layers).items():
        block = _shape_of(view.blocks[layer])
        before = _count(block)
        reshape(block, view.family, change, view.config, f"layer {layer}")
        saved += before - _count(block)
    return saved


def _refuse_linear(view: ModelView, edit: Linearize) -> None:
    for layer in edit.chosen(view):
        attention = view.attentions[layer]
        if view.windows[layer] is not None:
            raise Refused(
                f"layer {layer} asked to be made linear for good; it attends through a window of "
                f"{view.windows[layer]} tokens, and sums of all tokens have none: leave it out"
            )
        if getattr(attention, "sinks", None) is not None:
            raise Refused(
                f"layer {layer} asked to be made linear for good; it has learned sinks, logits beside the scores, and "
                "there are no scores: leave it out"
            )
        foreign = own_parameters(view.blocks[layer], view.family) if view.sizes[layer].n_heads else []
        if foreign:
            raise Refused(
                f"layer {layer} asked to be made linear for good; its attention has parameters of its own "
                f"({foreign[0]}): leave it out, or train a network with linear layers"
            )


def _shape_of(block: nn.Module) -> nn.Module:
    """A copy of a block without its numbers."""
    empty: dict[int, torch.Tensor] = {
        id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in block.parameters()
    }
    return copy.deepcopy(block, empty | {id(buffer): buffer.to("meta") for buffer in block.buffers()})


def _count(block: nn.Module) -> int:
    return sum(parameter.numel() for parameter in block.parameters())
