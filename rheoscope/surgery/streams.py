"""A text carried through a model a few layers at a time: the stream is kept between, and no layer is run for nothing.

A fit that goes layer by layer needs what enters each layer once those before it have been changed. Whole passes would
run layers x layers blocks; this runs each of them once, and holds tokens x d_model numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from rheoscope.corpus import Corpus, batches
from rheoscope.errors import Refused
from rheoscope.models.view import ModelView
from rheoscope.surgery.edits import Edit, edited


class Rows(NamedTuple):
    """What one layer's output projection is given and gives, at the real tokens of one batch."""

    inputs: Float[Tensor, "row inputs"]
    outputs: Float[Tensor, "row d_model"]
    stream: Float[Tensor, "row d_model"]  # that enters the layer


class Streams:
    """The stream of a text before one layer, which moves on through the model."""

    def __init__(self, view: ModelView, corpus: Corpus, *, batch_size: int, edits: Sequence[Edit] = ()):
        if view.family is None or not view.one_stream:
            raise Refused(f"a refit asked for; where {view.model_type} keeps its output projections is not known")
        self.view, self.edits = view, tuple(edits)
        self.batches = list(batches(corpus, batch_size))
        self.layer = 0
        self.kept: list[Tensor | None] = [None] * len(self.batches)
        self._skipped = _block_outputs(view)
        self._attending = [layer for layer, size in enumerate(view.sizes) if size.n_heads]

    @torch.no_grad()
    def to(self, layer: int) -> Iterator[Rows]:
        """Rows of every batch at a layer at or after the last one; the stream then waits before that layer."""
        first, self.layer = self.layer, layer
        for number, batch in enumerate(self.batches):
            caught: dict[str, Tensor] = {}
            with ExitStack() as undo:
                undo.enter_context(self._running(first, layer))
                # by our attention, in which rows of padding that see nothing are 0 and not NaN
                undo.enter_context(self.view.tapped({"attention": lambda *_: None}, layers=self._attending))
                start = self.kept[number]
                if start is not None:
                    taps = {"resid_pre": lambda _layer, x, start=start: start.to(x)}
                    undo.enter_context(self.view.tapped(taps, layers=[first]))
                undo.enter_context(edited(self.view, *self.edits))
                undo.enter_context(self.view.tapped({"resid_pre": _keep(caught)}, layers=[layer]))
                undo.callback(output_projection(self.view, layer).register_forward_hook(_catch(caught)).remove)
                self.view.forward(batch.tokens, batch.valid, head=False)
            self.kept[number] = caught["stream"].cpu()
            yield Rows(*(_real(caught[part], batch.valid) for part in ("inputs", "outputs", "stream")))

    @contextmanager
    def _running(self, first: int, last: int) -> Iterator[None]:
        """All blocks but those from first to last hand the stream on as it is."""
        with ExitStack() as undo:
            for layer, block in enumerate(self.view.blocks):
                if not first <= layer <= last:
                    undo.enter_context(_forward_replaced(block, _handing_on(self._skipped[layer])))
            yield


def output_projection(view: ModelView, layer: int) -> nn.Module:
    """The module that applies W_O in a layer."""
    return view.part(layer, view.family.o)


@contextmanager
def _forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Another `forward` of one module while the block lasts."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _handing_on(n_outputs: int) -> Callable[..., Any]:
    """A block that does nothing; n_outputs: length of the tuple that it returns, 0 for a bare tensor."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        return (x, *[None] * (n_outputs - 1)) if n_outputs else x

    return forward


@torch.no_grad()
def _block_outputs(view: ModelView) -> list[int]:
    """How many things each block returns in a tuple; 0 for a bare tensor."""
    found = [0] * view.n_layers

    def note(layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: tuple, output: Any) -> None:
            found[layer] = len(output) if isinstance(output, tuple) else 0

        return hook

    with ExitStack() as undo:
        for layer, block in enumerate(view.blocks):
            undo.callback(block.register_forward_hook(note(layer)).remove)
        view.forward(torch.full((1, 2), view.pad_token), head=False)
    return found


def _keep(caught: dict[str, Tensor]) -> Callable[[int, Tensor], None]:
    def tap(_layer: int, x: Tensor) -> None:
        caught["stream"] = x.clone()

    return tap


def _catch(caught: dict[str, Tensor]) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple, output: Tensor) -> None:
        caught["inputs"], caught["outputs"] = args[0].clone(), output.clone()

    return hook


def _real(x: Tensor, valid: Bool[Tensor, "batch position"]) -> Tensor:
    """The rows of real tokens, of [batch position d] or the same with both flattened (OPT)."""
    rows = x if x.dim() == 2 else x.flatten(0, 1)
    return rows[valid.flatten().to(rows.device)]
