"""The untrained null: the same architecture with the weights it would start training from, in the live model's place.

A second model of the same size would double the memory. Here each block is given fresh random weights only while it
runs: afterwards its parameters point at the trained numbers again, which were never written to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ..errors import Refused
from .view import ModelView


@contextmanager
def untrained(view: ModelView, seed: int) -> Iterator[None]:
    """Run every block and embedding with freshly initialised weights while the block lasts.

    Initialisation is the model's own (`_init_weights`), reproducible to the seed. Raises Refused for offloaded or
    quantised weights, whose parameters cannot be exchanged.
    """
    if any(p.is_meta or not p.is_floating_point() for p in view.model.parameters()):
        raise Refused("an untrained null was asked for; the weights are offloaded or quantised: measure without nulls")
    swapped = _Swapped(view)
    with ExitStack() as undo:
        undo.callback(swapped.restore_all)
        for index, module in enumerate(_groups(view)):
            draw = seed * 10_007 + index
            hook = module.register_forward_pre_hook(lambda m, _args, draw=draw: swapped.exchange(m, draw))
            undo.callback(hook.remove)
            undo.callback(module.register_forward_hook(lambda m, _args, _out: swapped.restore(m)).remove)
        yield


def _groups(view: ModelView) -> list[nn.Module]:
    """The blocks, and every module with parameters of its own outside of blocks and head."""
    inside = {id(module) for block in view.blocks for module in block.modules()}
    head = view.model.get_output_embeddings()
    outside = [
        module
        for module in view.model.modules()
        if id(module) not in inside and module is not head and any(True for _ in module.parameters(recurse=False))
    ]
    return [*view.blocks, *outside]


class _Swapped:
    """The trained tensors of the modules that run on random ones at the moment."""

    def __init__(self, view: ModelView):
        self.view = view
        self.trained: dict[nn.Module, dict[nn.Parameter, torch.Tensor]] = {}

    def exchange(self, module: nn.Module, seed: int) -> None:
        parameters = list(module.parameters())
        self.trained[module] = {parameter: parameter.data for parameter in parameters}
        marks = {parameter: getattr(parameter, "_is_hf_initialized", None) for parameter in parameters}
        with torch.random.fork_rng(devices=[self.view.device] if self.view.device.type == "cuda" else []):
            torch.manual_seed(seed)
            for parameter in parameters:
                parameter.data = torch.zeros_like(parameter.data)
                parameter._is_hf_initialized = False  # or transformers leaves it as it is
            module.apply(self.view.model._init_weights)
        for parameter, mark in marks.items():
            if mark is None:
                del parameter._is_hf_initialized
            else:
                parameter._is_hf_initialized = mark

    def restore(self, module: nn.Module) -> None:
        for parameter, data in self.trained.pop(module, {}).items():
            parameter.data = data

    def restore_all(self) -> None:
        for module in list(self.trained):
            self.restore(module)
