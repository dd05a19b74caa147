"""An edited model beside the original: loss, agreement, size and the clock, on text that nothing was fitted on.

verification = verify(view, edited_model, text)
print(verification.to_json())
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor
from transformers import PreTrainedModel

from rheoscope.corpus import Batch, Corpus, batches
from rheoscope.instruments.engine import Progress, batch_size_for, refuse_window, silent
from rheoscope.instruments.loss import ROWS, refuse_loss
from rheoscope.models.view import ModelView
from rheoscope.stats import paired_difference, ratio_of_sums
from rheoscope.surgery.clock import DECODED, SECONDS, Latency, latencies, not_timed, peak_memory
from rheoscope.surgery.edited_model import EditedForCausalLM
from rheoscope.surgery.sizes import attention_parameters, flops_per_token, parameters

LENGTHS = (64, 256, 1024)
BATCH_SIZES = (1, 4)


class Reading(NamedTuple):
    """A value and its standard error over documents."""

    value: float
    se: float


@dataclass(frozen=True)
class Pair:
    """One number of the original and of the edited model."""

    before: float
    after: float


@dataclass(frozen=True)
class Control:
    """A random plan of the same kinds and number: its loss change as it is, and with the same recovery."""

    change: Reading
    change_recovered: Reading | None


@dataclass(frozen=True)
class Verification:
    """The edited model beside the original. Losses in nats per token, KL(original ‖ edited) in nats per token.

    agreement: share of tokens at which both give the same next token most probability. flops: per token, at the window
    of the text. memory: bytes of one prefill at the largest size timed, beyond the weights. change_before_recovery:
    of the edits alone. Errors are over documents, `n` of them, or windows where there are fewer than eight.
    """

    text: dict[str, Any]
    n: int
    loss: Pair
    change: Reading
    kl: Reading
    agreement: Reading
    parameters: Pair
    attention_parameters: Pair
    flops: Pair
    memory: Pair
    latencies: tuple[Latency, ...]
    not_timed: tuple[tuple[int, int], ...] = ()  # batch, length: there was no time for them
    change_before_recovery: Reading | None = None
    change_after_refit: Reading | None = None  # where a distillation followed
    controls: tuple[Control, ...] = ()  # fewer than were asked for where the edits fit nowhere else
    n_controls_asked: int = 0
    n_chosen_on: int = 0  # documents among those verified on that the plan was chosen on: too few others were left

    def to_json(self) -> str:
        """All of it; what is not known is null."""
        return json.dumps(_plain(asdict(self)), indent=2, ensure_ascii=False) + "\n"


class _Sums(NamedTuple):
    """Sums over the scored tokens of each window."""

    before: Float64[np.ndarray, " window"]
    after: Float64[np.ndarray, " window"]
    kl: Float64[np.ndarray, " window"]
    agree: Float64[np.ndarray, " window"]
    tokens: Float64[np.ndarray, " window"]


def verify(
    view: ModelView,
    edited: EditedForCausalLM,
    text: Corpus,
    *,
    lengths: Sequence[int] = LENGTHS,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    seconds: float = SECONDS,
    batch_size: int | None = None,
    progress: Progress = silent,
) -> Verification:
    """Both models on one text, paired by document, and timed in turns for about so many seconds.

    Lengths beyond the context are left out; no lengths, no clock.
    """
    refuse_loss(view)
    refuse_window(view, text.window)
    sums = _compared(view, edited, text, batch_size or batch_size_for(view, text.window), progress)
    units = text.units
    before, after, kl, agree, tokens = (np.bincount(units, part) for part in sums)
    change = paired_difference(after, before, denominators=tokens)
    sides = ((view.model, view.blocks), (edited, edited.blocks))
    counted = [
        (
            parameters(model),
            attention_parameters(blocks, view.family),
            flops_per_token(model, blocks, view.family, length=text.window),
        )
        for model, blocks in sides
    ]
    fitting = [length for length in lengths if view.context is None or length + DECODED <= view.context]
    sizes: dict[str, Any] = {"lengths": fitting, "batch_sizes": batch_sizes}
    times = latencies(view.model, edited, **sizes, seconds=seconds, progress=progress)
    return Verification(
        text=text.provenance(),
        n=int(change.n),
        loss=Pair(float(before.sum() / tokens.sum()), float(after.sum() / tokens.sum())),
        change=Reading(float(change.value), float(change.se)),
        kl=_reading(kl, tokens),
        agreement=_reading(agree, tokens),
        parameters=Pair(counted[0][0], counted[1][0]),
        attention_parameters=Pair(counted[0][1], counted[1][1]),
        flops=Pair(counted[0][2], counted[1][2]),
        memory=_memory(view.model, edited, times),
        latencies=tuple(times),
        not_timed=tuple(not_timed(times, **sizes)),
    )


def _memory(before: PreTrainedModel, after: PreTrainedModel, times: Sequence[Latency]) -> Pair:
    """Peaks of one prefill at the largest size timed."""
    if not times:
        return Pair(math.nan, math.nan)
    size = {"batch": times[-1].batch, "length": times[-1].length}
    return Pair(peak_memory(before, **size), peak_memory(after, **size))


def _reading(sums: Float64[np.ndarray, " unit"], tokens: Float64[np.ndarray, " unit"]) -> Reading:
    estimate = ratio_of_sums(sums, tokens)
    return Reading(float(estimate.value), float(estimate.se))


@torch.no_grad()
def _compared(view: ModelView, edited: PreTrainedModel, text: Corpus, size: int, progress: Progress) -> _Sums:
    totals = np.zeros((5, text.n_windows))
    for batch in batches(text, size):
        windows = batch.windows.numpy()
        before = view.forward(batch.tokens, batch.valid)
        after = logits_of(edited, batch)
        for place, window in enumerate(windows):
            scored = batch.valid[place, 1:]
            rows = (before[place, :-1], after[place, :-1], batch.tokens[place, 1:], scored)
            totals[:, window] = sum(_of_rows(*part) for part in _split(*rows))
        del before, after
        progress("verify", int(windows[-1]) + 1, text.n_windows)
    return _Sums(*totals)


def logits_of(model: PreTrainedModel, batch: Batch) -> Float[Tensor, "batch position vocabulary"]:
    """Logits of a model on a batch padded on the right."""
    device = model.device
    mask = batch.valid.to(device, torch.long)
    return model(input_ids=batch.tokens.to(device), attention_mask=mask, use_cache=False).logits


def _split(*parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(part.split(ROWS) for part in parts), strict=True)


def _of_rows(
    before: Float[Tensor, "row vocabulary"],
    after: Float[Tensor, "row vocabulary"],
    targets: Int[Tensor, " row"],
    scored: Bool[Tensor, " row"],
) -> Float64[np.ndarray, " five"]:
    """Loss before and after, KL, agreement and number of scored tokens, summed over some rows; in float64."""
    p, q = (logits.double().log_softmax(-1) for logits in (before, after.to(before.device)))
    scored, targets = scored.to(p.device), targets.to(p.device)
    nll = [-x.gather(1, targets[:, None])[:, 0] for x in (p, q)]
    kl = (p.exp() * (p - q)).sum(-1)
    agree = (p.argmax(-1) == q.argmax(-1)).double()
    columns = (*nll, kl, agree, torch.ones_like(kl))
    return np.array([float(column[scored].sum()) for column in columns])


def _plain(value: Any) -> Any:
    """Numbers that JSON has; NaN and infinities become null."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, Reading):
        return {"value": _plain(value.value), "se": _plain(value.se)}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
