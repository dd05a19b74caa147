"""Low-rank adapters (LoRA, arXiv 2106.09685) for the training of an edited model, merged into its weights afterwards.

They are those of peft, which is installed with `pip install rheoscope[lora]`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rheoscope.errors import RheoscopeError
from rheoscope.surgery.edited_model import EditedForCausalLM

GAIN = 2.0  # alpha / rank


def refuse_adapters(rank: int) -> None:
    """Raise RheoscopeError where adapters of that rank cannot be had."""
    if rank < 1:
        raise RheoscopeError(f"adapters of rank {rank} asked for: give 1 or more")
    if find_spec("peft") is None:
        raise RheoscopeError(
            f"adapters of rank {rank} asked for; they need peft, which is not installed: pip install rheoscope[lora]"
        )


@contextmanager
def adapters(edited: EditedForCausalLM, rank: int, *, seed: int) -> Iterator[dict[str, nn.Parameter]]:
    """Parameters of new adapters of every linear module inside the layers, by name; merged when the block ends.

    The model is then built as it was before. Experts that keep their weights in one tensor have no adapters.
    """
    refuse_adapters(rank)
    from peft import LoraConfig, inject_adapter_in_model

    before = [(parameter, parameter.requires_grad) for parameter in edited.parameters()]
    chosen = _linear_modules(edited)
    settings = LoraConfig(r=rank, lora_alpha=GAIN * rank, target_modules=chosen, lora_dropout=0.0)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, edited)
    try:
        yield {name: parameter for name, parameter in edited.named_parameters() if ".lora_" in name}
    finally:
        for name in chosen:
            adapted = edited.get_submodule(name)
            adapted.merge()
            edited.set_submodule(name, adapted.get_base_layer())
        for parameter, wanted in before:
            parameter.requires_grad_(wanted)


def _linear_modules(edited: EditedForCausalLM) -> list[str]:
    inside = {id(module) for block in edited.blocks for module in block.modules()}
    return [
        name
        for name, module in edited.named_modules()
        if id(module) in inside and type(module) in (nn.Linear, Conv1D) and module.weight.numel()
    ]
