"""The untrained null: the same architecture with the weights it would start training from, in the live model's place.

A second model of the same size would double the memory. Here each block is given fresh random weights only while it
runs: afterwards its parameters point at the trained numbers again, which were never written to.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import nn

from rheoscope.errors import Refused, RheoscopeError
from rheoscope.models.placement import at_hand, has_numbers
from rheoscope.models.view import ModelView

_RUNNING: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models with an untrained null under way


@contextmanager
def untrained(view: ModelView, seed: int) -> Iterator[None]:
    """Run every block and embedding with freshly initialised weights while the block lasts; the head stays as it is.

    Initialisation is the model's own (`_init_weights`), reproducible to the seed. Raises Refused for quantised weights,
    which cannot be exchanged, RheoscopeError inside another such block.
    """
    if not has_numbers(view.model):
        raise Refused("an untrained null was asked for; the weights are quantised or missing: measure without nulls")
    if view.model in _RUNNING:
        raise RheoscopeError("an untrained null was asked for inside another of the same model: end that one first")
    swaps = [_Swap(view, module, seed * 10_007 + index) for index, module in enumerate(_groups(view))]
    with ExitStack() as undo:
        _RUNNING.add(view.model)
        undo.callback(_RUNNING.discard, view.model)
        undo.enter_context(at_hand(*(swap.module for swap in swaps if not swap.whole)))
        for swap in swaps:
            undo.callback(swap.restore)
            undo.callback(swap.module.register_forward_pre_hook(swap.exchange).remove)
            undo.callback(swap.module.register_forward_hook(swap.restore, always_call=True).remove)
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


class _Swap:
    """One block with all inside it, or one other module alone; and its trained tensors while it runs on random ones."""

    def __init__(self, view: ModelView, module: nn.Module, seed: int):
        self.view, self.module, self.seed = view, module, seed
        self.whole = any(module is block for block in view.blocks)
        self.trained: dict[torch.Tensor, torch.Tensor] = {}
        self.fetched = ExitStack()

    def exchange(self, *_: object) -> None:
        """Fresh weights in, trained ones kept. First restores what a pass that broke off may have left."""
        self.restore()
        self.fetched.enter_context(at_hand(self.module) if self.whole else nullcontext())
        parameters = list(self.module.parameters(recurse=self.whole))
        buffers = list(self.module.buffers(recurse=self.whole))  # initialisation writes to these too
        self.trained = {tensor: tensor.data for tensor in (*parameters, *buffers)}
        marks = {parameter: getattr(parameter, "_is_hf_initialized", None) for parameter in parameters}
        initialise = self.view.model._init_weights
        with torch.random.fork_rng(devices=[self.view.device] if self.view.device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            for buffer in buffers:
                buffer.data = buffer.data.clone()
            for parameter in parameters:
                parameter.data = torch.zeros_like(parameter.data)
                parameter._is_hf_initialized = False  # or transformers leaves it as it is
            self.module.apply(initialise) if self.whole else initialise(self.module)
        for parameter, mark in marks.items():
            if mark is None:
                del parameter._is_hf_initialized
            else:
                parameter._is_hf_initialized = mark

    def restore(self, *_: object) -> None:
        """The trained weights back in their place."""
        for tensor, data in self.trained.items():
            tensor.data = data
        self.trained = {}
        self.fetched.close()
