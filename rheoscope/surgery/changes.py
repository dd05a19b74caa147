"""What edits ask of each layer, gathered before anything is changed, and refused where they contradict one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rheoscope.errors import Refused, RheoscopeError
from rheoscope.surgery.edits import Edit
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.edits_sinks import ConstantHeads, DiagonalHeads, DropHeads, HeadEdit
from rheoscope.surgery.edits_steering import GateFFN, ParallelFFN
from rheoscope.surgery.edits_structure import DropAttention, Parallelize, ShrinkHeads

KEPT = (
    DropHeads,
    ConstantHeads,
    DiagonalHeads,
    DropAttention,
    Linearize,
    ParallelFFN,
    Parallelize,
    ShrinkHeads,
    GateFFN,
)


@dataclass
class LayerChange:
    """All that becomes of one layer. Head numbers are those before any of it."""

    no_attention: bool = False
    dropped: set[int] = field(default_factory=set)
    constants: dict[int, tuple[float, ...]] = field(default_factory=dict)
    diagonal: set[int] = field(default_factory=set)
    linear: Linearize | None = None
    parallel: ParallelFFN | None = None
    rank: int | None = None
    gate: float = 1.0

    @property
    def gone(self) -> set[int]:
        """Heads that attend no more."""
        return self.dropped | set(self.constants) | self.diagonal


def gathered(edits: Sequence[Edit], n_layers: int) -> dict[int, LayerChange]:
    """Layer → what becomes of it. Raises RheoscopeError for edits that contradict one another."""
    changes: dict[int, LayerChange] = {}
    for edit in edits:
        if type(edit) not in KEPT:
            name, names = type(edit).__name__, ", ".join(kind.__name__ for kind in KEPT)
            raise Refused(f"{name} asked to be kept in a model; it acts through taps only: a model can keep {names}")
        for place, layer in enumerate(sorted(set(edit.layers)) or range(n_layers)):
            _add(changes.setdefault(layer, LayerChange()), edit, layer, place)
    return changes


def _add(change: LayerChange, edit: Edit, layer: int, place: int) -> None:
    """One edit of one layer; `place` is that of the layer among those of the edit."""
    if isinstance(edit, HeadEdit):
        _add_heads(change, edit, layer)
    elif isinstance(edit, DropAttention):
        change.no_attention = True
    elif isinstance(edit, Linearize):
        if change.linear is not None:
            raise RheoscopeError(f"layer {layer} asked to be made linear twice: choose one edit for it")
        change.linear = edit
    elif isinstance(edit, ShrinkHeads):
        if change.rank is not None:
            raise RheoscopeError(f"queries and keys of layer {layer} asked to be made narrower twice: choose one edit")
        change.rank = edit.rank
    elif isinstance(edit, GateFFN):
        change.gate *= edit.gates[place]
    else:
        change.parallel = edit
    if change.no_attention and (change.gone or change.linear or change.rank):
        raise RheoscopeError(f"layer {layer} asked to lose its attention and to have it changed: choose one")


def _add_heads(change: LayerChange, edit: HeadEdit, layer: int) -> None:
    heads = edit.of_layer(layer)
    twice = sorted(change.gone & set(heads))
    if twice:
        raise RheoscopeError(f"head ({layer}, {twice[0]}) asked to be changed twice: choose one edit for it")
    if isinstance(edit, DropHeads):
        change.dropped |= set(heads)
    elif isinstance(edit, DiagonalHeads):
        change.diagonal |= set(heads)
    else:
        by_head = dict(zip(edit.heads, edit.constants, strict=True))
        change.constants |= {head: by_head[layer, head] for head in heads}
