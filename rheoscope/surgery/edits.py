"""Edits: what to change in a model, as frozen dataclasses; `edited` applies them for a block of code and undoes them.

    with edited(view, DropAttention(layers=(3,))):
        ...

An edit acts through the taps, so it works on every family that has its sites, and leaving the block gives the model
back bit for bit. Edits that follow one another see what those before them have made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from rheoscope.errors import RheoscopeError
from rheoscope.models.interface import Tap
from rheoscope.models.view import ModelView


@dataclass(frozen=True)
class Edit(ABC):
    """One change of a model. Fields are plain values, so that an edit can be written down and read back.

    layers: the layers it changes; empty: all of them.
    """

    layers: tuple[int, ...] = ()

    def chosen(self, view: ModelView) -> tuple[int, ...]:
        """The layers it changes in this model. Raises RheoscopeError for one that the model does not have."""
        wrong = [layer for layer in self.layers if not 0 <= layer < view.n_layers]
        if wrong:
            raise RheoscopeError(f"layers {wrong} asked for; the model has layers 0 to {view.n_layers - 1}")
        return self.layers or tuple(range(view.n_layers))

    @abstractmethod
    def taps(self, view: ModelView) -> Mapping[str, Tap]:
        """Site → tap that makes the change. Raises Refused where this family cannot be changed so."""


@contextmanager
def edited(view: ModelView, *edits: Edit) -> Iterator[ModelView]:
    """The model with the edits in place while the block lasts; undone on exit, also by an exception or Ctrl-C."""
    with ExitStack() as undo:
        for edit in edits:
            undo.enter_context(view.tapped(edit.taps(view), layers=edit.layers or None))
        yield view
