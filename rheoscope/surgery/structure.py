"""The structure of an edited model: made from its configuration, changed by more edits, and made ready to run."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import rheoscope.nets  # noqa: F401  so that transformers knows the networks that we train
from rheoscope.errors import Refused, RheoscopeError
from rheoscope.models.checkpoint import model_class
from rheoscope.models.families import FAMILIES
from rheoscope.surgery.changes import gathered
from rheoscope.surgery.edited_model import EditedConfig, EditedForCausalLM
from rheoscope.surgery.edits import Edit
from rheoscope.surgery.mixing import Mixing, attend_so
from rheoscope.surgery.mixing import fit_cache as fit_cache
from rheoscope.surgery.registry import from_dict, to_dict
from rheoscope.surgery.reshape import has_attention, reshape


def wrapped(model: PreTrainedModel) -> EditedForCausalLM:
    """An ordinary model as an edited one that no edit has changed yet. Takes the model over: give it a copy."""
    if model.config.model_type not in FAMILIES:
        raise Refused(
            f"edits asked to be kept in a {model.config.model_type}, which has no row in rheoscope/models/families.py: "
            "use a family of docs/families.md"
        )
    model.config.architectures = [type(model).__name__]
    config = EditedConfig(text_config=model.config, rounds=[])
    config.dtype = model.config.dtype = model.dtype
    return EditedForCausalLM(config, model)


def empty(config: EditedConfig) -> PreTrainedModel:
    """The original model before any edit, with the weights that a new model has. It gets a configuration of its own."""
    if not isinstance(config.text_config, PreTrainedConfig):
        raise RheoscopeError("an edited model asked for without the configuration of the original: give text_config")
    own = copy.deepcopy(config.text_config)
    own._attn_implementation = "eager"  # every family has it; once whole, the model attends by our function
    if config._experts_implementation is not None:
        own._experts_implementation = config._experts_implementation
    config.text_config = own
    found = model_class(f"an edited {own.model_type}", own, trust_remote_code=False)
    return found.from_config(own) if found is AutoModelForCausalLM else found._from_config(own)


def make(model: EditedForCausalLM, edits: Sequence[Edit]) -> list[dict[str, Any]]:
    """Make edits on the model inside, and give them as plain values."""
    blocks, family, config = model.blocks, model.family, model.edited.config
    for layer, change in gathered(edits, len(blocks)).items():
        reshape(blocks[layer], family, change, config, f"layer {layer}")
    return [to_dict(edit) for edit in edits]


def repeat(model: EditedForCausalLM, edits: Sequence[Mapping[str, Any]]) -> None:
    """Make the edits of one round that was written down."""
    make(model, [from_dict(edit) for edit in edits])


def settle(model: EditedForCausalLM) -> tuple[dict[int, Mixing], frozenset[int]]:
    """Have the model attend by our function. Gives how linear layers mix, and all layers that keep no keys."""
    attend_so(model)
    attentions: dict[int, nn.Module] = {
        layer: block.get_submodule(model.family.attn) for layer, block in enumerate(model.blocks)
    }
    linear = {layer: module.mixing for layer, module in attentions.items() if hasattr(module, "mixing")}
    gone = {layer for layer, block in enumerate(model.blocks) if not has_attention(block, model.family)}
    return linear, frozenset(gone | set(linear))
