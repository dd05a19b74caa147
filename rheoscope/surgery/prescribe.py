"""From readings to a plan: every candidate measured alone, the best taken together, and random plans beside them.

    prescription = prescribe(view, choosing, checking, limit=0.02)
    prescription.plan.save("plan.yaml")

Chosen on some documents, checked on others: a choice of the best on one text flatters itself there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from rheoscope.corpus import Corpus
from rheoscope.errors import RheoscopeError
from rheoscope.instruments.engine import Progress, refuse_window, silent
from rheoscope.instruments.loss import refuse_loss
from rheoscope.models.view import ModelView
from rheoscope.run import Run
from rheoscope.stats import Estimate
from rheoscope.surgery.candidates import Candidate, candidates, more_heads_than, most_promising
from rheoscope.surgery.greedy import Bounds, Choice, Step, alone, edits_of, greedy, random_choice
from rheoscope.surgery.passes import Passes
from rheoscope.surgery.plan import Plan, PlannedEdit, fingerprint, shape_of, without_constants, written
from rheoscope.surgery.redundancy import lost_with_groups
from rheoscope.surgery.sink_effects import head_means
from rheoscope.surgery.texts import KnownDocuments

N_RANDOM = 3
MOST_CANDIDATES = 512  # of one kind; more are ranked first


@dataclass(frozen=True)
class Measured:
    """Loss change of the plan and of random plans of the same size, on one text, in nats per token."""

    plan: Estimate
    random: tuple[Estimate, ...]


@dataclass(frozen=True)
class Prescription:
    """A plan and how it was come by. choosing: on the text it was chosen on; checking: on documents never seen."""

    plan: Plan
    choice: Choice
    choosing: Measured
    checking: Measured
    left_out: dict[str, str]
    n_candidates: int
    n_passes: int


def prescribe(
    view: ModelView,
    choosing: Corpus,
    checking: Corpus,
    *,
    limit: float = 0.02,
    only: Sequence[str] = (),
    run: Run | None = None,
    most_candidates: int = MOST_CANDIDATES,
    n_random: int = N_RANDOM,
    seed: int = 0,
    memory: Path | None = None,
    progress: Progress = silent,
) -> Prescription:
    """The plan that takes most while the loss on `choosing` rises by at most `limit` nats per token, without recovery.

    Of a kind with more than `most_candidates`, key groups are ranked first by what the other heads of their layer
    cannot stand in for, layers by the readings of `run`. memory: a file that keeps every pass, so that a stopped choice
    goes on where it was. Raises RheoscopeError where no edit is within the limit.
    """
    if not limit > 0:
        raise RheoscopeError(f"a loss change of at most {limit:g} asked for: give a number above 0")
    if most_candidates < 1:
        raise RheoscopeError(f"at most {most_candidates} candidates of a kind asked for: give at least 1")
    refuse_loss(view)
    refuse_window(view, choosing.window)
    passes = Passes(view, choosing, memory=memory, progress=progress)
    found, left_out = candidates(view, head_means(view, choosing), only=only)
    lost = lost_with_groups(view, choosing, progress=progress) if more_heads_than(found, most_candidates) else None
    tried = most_promising(found, most_candidates, run=run, lost=lost)
    changes = alone(passes, tried)
    choice = greedy(passes, changes, Bounds(limit))
    if not choice.steps:
        best = min(changes.values(), key=lambda change: float(change.value))
        raise RheoscopeError(
            f"a plan within {limit:g} nats asked for; the cheapest of {len(tried)} edits alone costs "
            f"{float(best.value):.4f}: allow more (--max-loss)"
        )
    generator = np.random.default_rng(seed)
    randoms = [random_choice(found, choice.chosen, generator) for _ in range(n_random)]
    check = Passes(view, checking, memory=memory, progress=progress)
    texts = [measured(one, choice.chosen, randoms) for one in (passes, check)]
    plan = Plan(
        planned=tuple(_planned(step) for step in choice.steps),
        model=view.ref,
        fingerprint=fingerprint(view),
        shape=shape_of(view),
        text=_described(choosing),
        seed=seed,
        limit=limit,
        found=_findings(choice, *texts),
    )
    return Prescription(plan, choice, *texts, left_out, len(tried), passes.n_run + check.n_run)


def measured(passes: Passes, chosen: Sequence[Candidate], randoms: Sequence[Sequence[Candidate]]) -> Measured:
    """The change by a choice, and by random ones, on one text."""
    return Measured(
        passes.change(*edits_of(chosen), task="the plan"),
        tuple(passes.change(*edits_of(one), task="a random plan") for one in randoms),
    )


def _described(text: Corpus) -> dict[str, object]:
    """What a plan says of the text it was chosen on."""
    return {
        "sources": list(text.sources),
        "hash": text.hash,
        "windows": text.n_windows,
        "window": text.window,
        "documents": len(set(text.documents.tolist())),
        **written(KnownDocuments.of(text)),
    }


def _planned(step: Step) -> PlannedEdit:
    because = f"alone it changes the loss by {pm(step.alone)} nats"
    if step.given is not None:
        because += f", given the edits chosen before it by {pm(step.given)}"
    return PlannedEdit(
        edit=without_constants(step.candidate.edit),
        because=because,
        predicted_change=round(float(step.predicted.value), 6),
        predicted_change_se=round(float(step.predicted.se), 6),
        saving=step.candidate.saving,
    )


def _findings(choice: Choice, choosing: Measured, checking: Measured) -> dict[str, object]:
    """What was measured of the whole, as a plan writes it."""
    found: dict[str, object] = {"predicted_change": round(predicted(choice), 6)}
    for name, part in (("choosing", choosing), ("checking", checking)):
        found[f"change_{name}"] = round(float(part.plan.value), 6)
        found[f"change_{name}_se"] = round(float(part.plan.se), 6)
        found[f"random_changes_{name}"] = [round(float(one.value), 6) for one in part.random]
    return found


def predicted(choice: Choice) -> float:
    """Sum of the changes by every edit alone."""
    return sum(float(step.alone.value) for step in choice.steps)


def rank_agreement(choice: Choice) -> float:
    """Rank correlation of the changes alone and given other edits; NaN with fewer than three measured twice."""
    pairs = choice.remeasured
    return float(spearmanr(*zip(*pairs, strict=True)).statistic) if len(set(pairs)) > 2 else float("nan")


def pm(change: Estimate) -> str:
    """A change with its error."""
    return f"{float(change.value):+.4f} ± {float(change.se):.4f}"
