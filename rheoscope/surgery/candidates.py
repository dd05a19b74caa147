"""What could be edited, one candidate at a time: the smallest cuts of each kind that a saved model can really lack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float64

from rheoscope.errors import Refused, RheoscopeError
from rheoscope.models.view import ModelView
from rheoscope.run import Run
from rheoscope.surgery.edits import Edit
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.edits_sinks import DropHeads
from rheoscope.surgery.edits_structure import Parallelize, ShrinkHeads
from rheoscope.surgery.reshape import is_parallel
from rheoscope.surgery.restructure import saving
from rheoscope.surgery.sink_effects import constant_heads

Means = Float64[np.ndarray, "layer head d_value"]
Lost = Float64[np.ndarray, "layer group"]
OF_HEADS = ("drop", "constant")  # kinds that take key groups, and may stand together in one layer

FEATURE = (
    "softmax"  # of linear layers: on SmolLM2-135M cheaper than elu + 1 in every layer tried, its state as constant
)


@dataclass(frozen=True)
class Candidate:
    """One edit that may be chosen. share: of all that its kind could take, for weighing kinds against one another."""

    kind: str
    layer: int
    edit: Edit
    share: float
    group: int | None = None  # of the keys; None: the whole layer
    n_groups: int = 0  # of its layer
    saving: int = 0  # parameters

    @property
    def place(self) -> str:
        """What it takes, in words."""
        return f"layer {self.layer}" if self.group is None else f"layer {self.layer}, key group {self.group}"

    def clashes(self, other: Candidate) -> bool:
        """Whether a model cannot have both: the same heads twice, or two edits of what one layer's scores are."""
        if self.layer != other.layer or "parallelize" in (self.kind, other.kind):
            return self.layer == other.layer and self.kind == other.kind
        if self.kind in OF_HEADS and other.kind in OF_HEADS:
            return self.group == other.group
        return True


def heads_of_group(view: ModelView, group: int) -> tuple[int, ...]:
    """The query heads that read one key head."""
    n_rep = view.n_heads // view.n_kv_heads
    return tuple(range(group * n_rep, (group + 1) * n_rep))


def _groups(view: ModelView, kind: str, edit: Callable[[tuple[tuple[int, int], ...]], Edit]) -> list[Candidate]:
    if view.n_kv_heads == 1:
        raise Refused(
            f"{kind} asked for; all heads of {view.ref} share one key head, and heads are removed by whole key groups: "
            "leave this kind out"
        )
    n = view.n_kv_heads
    share = 1 / (view.n_layers * n)
    made = []
    for layer in range(view.n_layers):
        for group in range(n):
            heads = tuple((layer, head) for head in heads_of_group(view, group))
            made.append(Candidate(kind, layer, edit(heads), share, group, n))
    return made


def group_parameters(view: ModelView, layer: int) -> int:
    """Numbers in the projections of one key group: its queries, key and value, and their rows of the output."""
    n_rep, family = view.n_heads // view.n_kv_heads, view.family
    widths = (n_rep * view.d_head, view.d_head, view.d_value)
    paths = (family.q, family.k, family.v) if family.qkv is None else (family.qkv,) * 3
    biased = [getattr(view.part(layer, path), "bias", None) is not None for path in paths]
    into = sum(width * (view.d_model + has) for width, has in zip(widths, biased, strict=True))
    return into + n_rep * view.d_value * view.d_model


def attention_parameters(view: ModelView) -> int:
    """Numbers in the projections of all layers that go with heads: all but output biases and norms."""
    return sum(view.n_kv_heads * group_parameters(view, layer) for layer in range(view.n_layers))


def _layers(view: ModelView, kind: str, edit: Callable[[tuple[int]], Edit]) -> list[Candidate]:
    return [Candidate(kind, layer, edit((layer,)), 1 / view.n_layers) for layer in range(view.n_layers)]


def half_rank(view: ModelView) -> int:
    """Half of the width of a head, made even: what queries and keys are shrunk to."""
    return max(2, view.d_head // 4 * 2)


KINDS: dict[str, Callable[[ModelView, Means], list[Candidate]]] = {
    "drop": lambda view, means: _groups(view, "drop", lambda heads: DropHeads(heads=heads)),
    "constant": lambda view, means: _groups(view, "constant", lambda heads: constant_heads(heads, means)),
    "linearize": lambda view, means: _layers(view, "linearize", lambda layers: Linearize(layers, feature=FEATURE)),
    "parallelize": lambda view, means: _layers(view, "parallelize", lambda layers: Parallelize(layers)),
    "shrink": lambda view, means: _layers(view, "shrink", lambda layers: ShrinkHeads(layers, rank=half_rank(view))),
}


def candidates(view: ModelView, means: Means, *, only: Sequence[str] = ()) -> tuple[list[Candidate], dict[str, str]]:
    """Every candidate of the kinds asked for, and why kinds are left out. Without `only`: all that the model takes.

    Raises RheoscopeError for an unknown kind, Refused for one asked for by name that this model cannot take.
    """
    unknown = [kind for kind in only if kind not in KINDS]
    if unknown:
        raise RheoscopeError(f"edits of kind {unknown[0]!r} asked for; there are {', '.join(KINDS)}")
    found: list[Candidate] = []
    left_out: dict[str, str] = {}
    for kind in only or KINDS:
        try:
            found += _kept(view, kind, KINDS[kind](view, means))
        except Refused as refusal:
            if only:
                raise
            left_out[kind] = str(refusal)
    return found, left_out


def _kept(view: ModelView, kind: str, made: Sequence[Candidate]) -> list[Candidate]:
    """Those that change the model. Raises Refused, as the first of them was, where it can take none."""
    possible: list[Candidate] = []
    reasons: list[Refused] = []
    for candidate in made:
        try:
            possible.append(replace(candidate, saving=saving(view, candidate.edit)))
        except Refused as refusal:
            reasons.append(refusal)
    if not possible:
        raise reasons[0]
    kept = [candidate for candidate in possible if not _is_so(view, candidate)]
    if not kept:
        raise Refused(f"{kind} asked for; {view.ref} is like that already: leave this kind out")
    return kept


def _is_so(view: ModelView, one: Candidate) -> bool:
    """Whether the layer is already what the edit would make of it."""
    if one.kind == "parallelize":
        return is_parallel(view.blocks[one.layer], view.family)
    return one.kind == "shrink" and one.saving == 0


def most_promising(
    found: Sequence[Candidate], most: int, *, run: Run | None = None, lost: Lost | None = None
) -> list[Candidate]:
    """At most so many candidates of each kind: the first by rank, or by place where nothing ranks them.

    lost: what the other heads of a layer cannot stand in for, by layer and group (redundancy.py), ranks key groups; a
    run's readings rank layers. A rank only decides what is measured at all, never what is chosen.
    """
    kept: list[Candidate] = []
    for kind in dict.fromkeys(candidate.kind for candidate in found):
        of_kind = [candidate for candidate in found if candidate.kind == kind]
        ranks = _ranks(kind, of_kind, run, lost) if len(of_kind) > most else None
        order = range(len(of_kind)) if ranks is None else np.argsort(ranks, kind="stable")
        kept += [of_kind[place] for place in order[:most]]
    return kept


def more_heads_than(found: Sequence[Candidate], most: int) -> bool:
    """Whether some kind has more key groups than may be measured, so that they must be ranked first."""
    return any(sum(one.kind == kind for one in found) > most for kind in OF_HEADS)


# kind: instrument and reading that is small where the edit is likely to cost little
READINGS: Mapping[str, tuple[str, str]] = {
    "linearize": ("routing", "routing_k90"),
    "parallelize": ("steering", "defect"),
    "shrink": ("routing", "score_k90"),
}


def _ranks(kind: str, of_kind: Sequence[Candidate], run: Run | None, lost: Lost | None) -> list[float] | None:
    """What of each key group is lost, or the mean reading of each layer."""
    if kind in OF_HEADS:
        return None if lost is None else [float(lost[one.layer, one.group]) for one in of_kind]
    instrument, name = READINGS[kind]
    if run is None or instrument not in run or name not in run[instrument]:
        return None
    values = run[instrument][name].values
    return [float(np.nanmean(values[one.layer])) for one in of_kind]
