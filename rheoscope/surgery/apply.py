"""A plan carried out: edits made, loss won back, the result verified on other documents, and saved.

outcome = carried_out(view, plan, corpus)
save_edited(outcome.model, view.tokenizer, "edited", files=outcome.files())
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rheoscope.corpus import Corpus
from rheoscope.instruments.engine import Progress, refuse_window, silent
from rheoscope.instruments.loss import Loss, refuse_loss
from rheoscope.models.view import ModelView
from rheoscope.surgery.adapters import refuse_adapters
from rheoscope.surgery.control import random_plans
from rheoscope.surgery.distill import Distillation, distil
from rheoscope.surgery.edited_model import EditedForCausalLM
from rheoscope.surgery.edits import Edit
from rheoscope.surgery.edits_sinks import ConstantHeads
from rheoscope.surgery.effects import loss_change, window_losses
from rheoscope.surgery.plan import Plan, completed, no_means
from rheoscope.surgery.recover import LayerFit, refit, refitted
from rheoscope.surgery.restructure import refuse_edits, restructured
from rheoscope.surgery.sink_effects import head_means
from rheoscope.surgery.texts import parted
from rheoscope.surgery.verify import Control, Reading, Verification, verify

PLAN, VERIFICATION = "plan.yaml", "verification.json"


@dataclass(frozen=True)
class Outcome:
    """The edited model, the plan with all its numbers, what was fitted, and what was measured on other documents."""

    model: EditedForCausalLM
    plan: Plan
    fits: tuple[LayerFit, ...]
    verification: Verification

    def files(self) -> dict[str, str]:
        """What is saved beside the weights."""
        return {PLAN: self.plan.to_yaml(), VERIFICATION: self.verification.to_json()}


def carried_out(
    view: ModelView,
    plan: Plan,
    corpus: Corpus,
    *,
    with_refit: bool = True,
    distillation: Distillation | None = None,
    memory: Path | None = None,
    n_random: int = 1,
    seed: int = 0,
    clock: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> Outcome:
    """The plan on a copy of the model. Half of the documents are fitted on, the others verify.

    Those that the plan was chosen on are fitted on, unless too few others are left. distillation: a short training
    after the refit; memory: the file that keeps it. n_random: random plans of the same kinds and number that are
    measured beside it, before and after the same refit; fewer where the edits fit nowhere else. clock: lengths,
    batch_sizes and seconds of `verify`.
    Raises RheoscopeError for a plan of another model, Refused for edits that cannot be kept, before anything is run.
    """
    refuse_loss(view)
    refuse_window(view, corpus.window)
    plan.refuse_other(view)
    if distillation is not None and distillation.lora_rank is not None:
        refuse_adapters(distillation.lora_rank)
    texts = parted(corpus, plan.chosen_on, seed=seed)
    calibration, checking = texts.calibration, texts.checking
    refuse_edits(view, completed(plan.edits, no_means(view)))
    draws = random_plans(view, plan.edits, n_random, np.random.default_rng(seed))
    means = _means(view, plan.edits, calibration)
    edits = completed(plan.edits, means)
    before = window_losses(view, checking, task="before", progress=progress)
    part = _Recovery(view, calibration, checking, before, with_refit, progress)
    change, fits = part.unrecovered(edits), part.fits(edits)
    with refitted(view, fits):
        model = restructured(view, edits)
    refitted_change = None
    if distillation is not None:
        refitted_change = part.recovered(edits, fits)
        distil(view, model, calibration, distillation, memory=memory, progress=progress)
    verification = verify(view, model, checking, progress=progress, **(clock or {}))
    controls = [part.control(completed(drawn, means)) for drawn in draws]
    verification = replace(
        verification,
        change_before_recovery=change,
        change_after_refit=refitted_change,
        controls=tuple(controls),
        n_controls_asked=n_random,
        n_chosen_on=texts.n_known,
    )
    planned = tuple(replace(one, edit=edit) for one, edit in zip(plan.planned, edits, strict=True))
    return Outcome(model, replace(plan, planned=planned), fits, verification)


def _means(view: ModelView, edits: Sequence[Edit], calibration: Corpus) -> np.ndarray:
    """Mean z by layer and head, where constant heads ask for it."""
    if any(isinstance(edit, ConstantHeads) for edit in edits):
        return head_means(view, calibration)
    return no_means(view)


@dataclass(frozen=True)
class _Recovery:
    """Edits measured through taps on the checking text, as they are and after the same recovery."""

    view: ModelView
    calibration: Corpus
    checking: Corpus
    before: Loss
    with_refit: bool
    progress: Progress

    def fits(self, edits: Sequence[Edit]) -> tuple[LayerFit, ...]:
        return refit(self.view, edits, self.calibration, progress=self.progress) if self.with_refit else ()

    def unrecovered(self, edits: Sequence[Edit]) -> Reading:
        after = window_losses(self.view, self.checking, edits, task="edits alone", progress=self.progress)
        return _reading(after, self.before)

    def control(self, edits: Sequence[Edit]) -> Control:
        change, fits = self.unrecovered(edits), self.fits(edits)
        if not fits:
            return Control(change, None)
        return Control(change, self.recovered(edits, fits))

    def recovered(self, edits: Sequence[Edit], fits: Sequence[LayerFit]) -> Reading:
        with refitted(self.view, fits):
            return self.unrecovered(edits)


def _reading(after: Loss, before: Loss) -> Reading:
    change = loss_change(after, before)
    return Reading(float(change.value), float(change.se))
