"""What an edit costs: the loss with and without it on the same windows, paired by document."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from rheoscope.corpus import Corpus, batches
from rheoscope.instruments.engine import Progress, batch_size_for, run_pass, silent
from rheoscope.instruments.loss import Loss
from rheoscope.models.view import ModelView
from rheoscope.stats import Estimate, paired_difference
from rheoscope.surgery.edits import Edit, edited


def window_losses(
    view: ModelView,
    corpus: Corpus,
    edits: Sequence[Edit] = (),
    *,
    batch_size: int | None = None,
    task: str = "loss",
    progress: Progress = silent,
) -> Loss:
    """The loss reading of one pass over the text with the edits in place; `window_nll` are its sums per window."""
    loss = Loss(view, corpus)
    size = batch_size or batch_size_for(view, corpus.window)
    with edited(view, *edits):
        run_pass(view, batches(corpus, size), [loss], task=task, total=corpus.n_windows, progress=progress)
    return loss


def loss_change(after: Loss, before: Loss) -> Estimate:
    """Loss after minus loss before in nats per token, paired by unit (document), with its standard error."""
    units = before.corpus.units
    sums = [np.bincount(units, weights) for weights in (after.window_nll, before.window_nll, before.window_tokens)]
    return paired_difference(sums[0], sums[1], denominators=sums[2])


def unit_changes(after: Loss, before: Loss) -> Float64[np.ndarray, " unit"]:
    """Loss change of every unit, in nats per token of that unit; NaN for a unit without tokens."""
    units = before.corpus.units
    tokens = np.bincount(units, before.window_tokens)
    return np.bincount(units, after.window_nll - before.window_nll) / np.where(tokens > 0, tokens, np.nan)
