"""Greedy choice of edits by measured loss, and random choices of the same size to compare it with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rheoscope.stats import Estimate
from rheoscope.surgery.candidates import Candidate
from rheoscope.surgery.edits import Edit
from rheoscope.surgery.effects import loss_change
from rheoscope.surgery.passes import Passes


class Step(NamedTuple):
    """One chosen candidate: what it changes alone, and given those chosen before it (None for the first batch)."""

    candidate: Candidate
    alone: Estimate
    given: Estimate | None

    @property
    def predicted(self) -> Estimate:
        """What it was expected to change when it was chosen."""
        return self.given or self.alone


@dataclass
class Choice:
    """What was chosen, in order; the measured change after every batch; and what was measured a second time."""

    steps: list[Step] = field(default_factory=list)
    totals: list[tuple[int, Estimate]] = field(default_factory=list)  # number of edits, change of the loss
    remeasured: list[tuple[float, float]] = field(default_factory=list)  # alone, given those chosen by then

    @property
    def chosen(self) -> list[Candidate]:
        return [step.candidate for step in self.steps]

    @property
    def total(self) -> float:
        """Measured change of the loss by all together."""
        return float(self.totals[-1][1].value) if self.totals else 0.0


@dataclass(frozen=True)
class Bounds:
    """When to stop: at this change of the loss, at so many edits, or when `full` says so of those chosen.

    batch: candidates that are taken, and measured together, at a time.
    """

    limit: float
    most: int | None = None
    full: Callable[[Sequence[Candidate]], bool] = lambda chosen: False
    batch: int = 4

    def room(self, chosen: Sequence[Candidate]) -> int:
        """How many more may be taken now."""
        left = self.batch if self.most is None else min(self.batch, self.most - len(chosen))
        return 0 if self.full(chosen) else left


def alone(passes: Passes, found: Sequence[Candidate]) -> dict[Candidate, Estimate]:
    """Loss change by every candidate alone. One pass each."""
    n = len(found)
    return {one: passes.change(one.edit, task=f"{one.kind} {i}/{n}") for i, one in enumerate(found, 1)}


def greedy(passes: Passes, changes: Mapping[Candidate, Estimate], bounds: Bounds) -> Choice:
    """Candidates in order of loss per share, while the measured change of all together stays within the limit.

    The next 2 x batch candidates are measured anew given those chosen; the cheapest that are predicted to fit are
    taken, and all are measured together; where that exceeds the limit, half of the batch is tried. The first such
    round of which none fits ends the choice.
    """
    choice = Choice()
    waiting = _by_cost({one: float(change.value) for one, change in changes.items()})
    while room := bounds.room(choice.chosen):
        waiting = [one for one in waiting if fits(one, choice.chosen)]
        ready = waiting[: 2 * bounds.batch]
        given = _given(passes, choice.chosen, ready)
        steps = {one: Step(one, changes[one], given.get(one)) for one in ready}
        twice = [step for step in steps.values() if step.given]
        choice.remeasured += [(float(step.alone.value), float(step.given.value)) for step in twice]
        ranked = _by_cost({one: float(step.predicted.value) for one, step in steps.items()})
        batch = _within([steps[one] for one in ranked], choice, bounds.limit, room)
        measured = None
        while batch:
            measured = passes.change(*edits_of([*choice.chosen, *(step.candidate for step in batch)]), task="together")
            if float(measured.value) <= bounds.limit:
                break
            batch = batch[: len(batch) // 2]
        if not batch or measured is None:
            return choice
        choice.steps += batch
        choice.totals.append((len(choice.steps), measured))
    return choice


def random_choice(
    found: Sequence[Candidate], like: Sequence[Candidate], generator: np.random.Generator
) -> list[Candidate]:
    """As many candidates of each kind as in another choice, drawn at random; none clash. Fewer where no more fit."""
    drawn: list[Candidate] = []
    for kind, number in Counter(one.kind for one in like).items():
        of_kind = [one for one in found if one.kind == kind]
        for place in generator.permutation(len(of_kind)):
            if sum(one.kind == kind for one in drawn) < number and fits(of_kind[place], drawn):
                drawn.append(of_kind[place])
    return drawn


def edits_of(chosen: Sequence[Candidate]) -> list[Edit]:
    """The edits of candidates, layer by layer, so that equal choices are equal passes."""
    ordered = sorted(chosen, key=lambda one: (one.layer, one.kind, -1 if one.group is None else one.group))
    return [one.edit for one in ordered]


def fits(one: Candidate, taken: Sequence[Candidate]) -> bool:
    """Whether a candidate may join those taken: no clash, and a key group of its layer is left."""
    if any(one.clashes(other) for other in taken):
        return False
    gone = sum(other.layer == one.layer and other.group is not None for other in taken)
    return one.group is None or gone + 1 < one.n_groups


def _within(ranked: Sequence[Step], choice: Choice, limit: float, room: int) -> list[Step]:
    """The first steps that are predicted to stay within the limit together."""
    batch: list[Step] = []
    total = choice.total
    for step in ranked:
        taken = [*choice.chosen, *(other.candidate for other in batch)]
        if len(batch) < room and total + float(step.predicted.value) <= limit and fits(step.candidate, taken):
            batch.append(step)
            total += float(step.predicted.value)
    return batch


def _given(passes: Passes, chosen: list[Candidate], ready: Sequence[Candidate]) -> dict[Candidate, Estimate]:
    """The change by each candidate given those chosen; nothing while nothing is chosen."""
    if not chosen:
        return {}
    before = passes.losses(*edits_of(chosen))
    n = len(chosen)
    return {
        one: loss_change(passes.losses(*edits_of([*chosen, one]), task=f"{one.kind} given {n}"), before)
        for one in ready
    }


def _by_cost(changes: Mapping[Candidate, float]) -> list[Candidate]:
    """Candidates by loss change per share. What lowers the loss comes first, by how much, whatever its share."""
    return sorted(changes, key=lambda one: changes[one] / one.share if changes[one] > 0 else changes[one])
