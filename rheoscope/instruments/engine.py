"""The only loop over data: run the model once for all instruments that one pass can serve."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from rheoscope.corpus import Batch
from rheoscope.errors import RheoscopeError
from rheoscope.instruments.heap import hand_back
from rheoscope.instruments.instrument import Instrument, LayerSites
from rheoscope.instruments.outputs import outputs, separate_head
from rheoscope.models.attention import Attention
from rheoscope.models.taps import Tap
from rheoscope.models.view import ModelView

LOGITS_BYTES = 512 * 2**20  # of logits alive at a time, for the batch size that is chosen where none is given
BATCH_TOKENS = 2048
SHARED = frozenset({"attn_probs", "attn_mean"})  # computed once, before z, and shared through `attention`


@runtime_checkable
class Progress(Protocol):
    """Told after every batch: what is under way, windows done, windows in all."""

    def __call__(self, task: str, done: int, total: int) -> None: ...


def silent(task: str, done: int, total: int) -> None:
    """No progress."""


@torch.no_grad()
def run_pass(
    view: ModelView,
    batches: Sequence[Batch] | Iterator[Batch],
    instruments: Sequence[Instrument],
    *,
    task: str = "measure",
    done: int = 0,
    total: int = 0,
    progress: Progress = silent,
) -> float:
    """One forward pass over all batches, read by every instrument. Returns the seconds it took.

    done: windows that came before these batches, for the progress alone.
    """
    started = time.monotonic()
    readers = [instrument for instrument in instruments if instrument.reads_output]
    head = separate_head(view) if readers else None
    with _observed(view, instruments) as current:
        for batch in batches:
            current.batch = batch
            if readers:
                _read_outputs(view, batch, head, readers)
            else:
                view.forward(batch.tokens, batch.valid, head=False)
            hand_back()
            done += len(batch.tokens)
            progress(task, done, total)
    return time.monotonic() - started


def _read_outputs(view: ModelView, batch: Batch, head: nn.Module | None, readers: Sequence[Instrument]) -> None:
    """One forward pass over a batch, its logits read part by part."""
    for output, part in outputs(view, batch, head):
        for instrument in readers:
            instrument.observe_output(output, part)


def batch_size_for(view: ModelView, window: int) -> int:
    """Windows per batch: about 2,048 tokens, fewer where the logits would take over half a gigabyte."""
    head = view.model.get_output_embeddings()
    vocabulary = head.weight.shape[0] if head is not None else 1
    tokens = min(BATCH_TOKENS, LOGITS_BYTES // (4 * vocabulary))
    return max(1, tokens // window)


def refuse_window(view: ModelView, window: int) -> None:
    """Raise RheoscopeError where the window is longer than the model's positions reach."""
    if view.context is not None and window > view.context:
        raise RheoscopeError(
            f"windows of {window} tokens asked for; {view.ref} takes at most {view.context}: give a shorter --window"
        )


class _Current:
    """The batch under way and what its taps have caught of the layer under way."""

    batch: Batch

    def __init__(self, instruments: Sequence[Instrument]):
        self.instruments = instruments
        self.sites = LayerSites()

    def catch(self, site: str, layer: int, value: Tensor | Attention) -> None:
        setattr(self.sites, site, value)

    def layer_ends(self, layer: int, resid_post: Tensor) -> None:
        """All sites of a layer are there: let the instruments reduce them, then forget them."""
        sites, self.sites = self.sites, LayerSites()
        sites.resid_post = resid_post
        for instrument in self.instruments:
            if instrument.sites:
                instrument.observe(layer, sites, self.batch)


@contextmanager
def _observed(view: ModelView, instruments: Sequence[Instrument]) -> Iterator[_Current]:
    """The model with a tap at every site that some instrument needs."""
    current = _Current(instruments)
    wanted = set().union(*(instrument.sites for instrument in instruments))
    taps: dict[str, Tap] = {}
    for site in wanted - {*SHARED, "resid_post"}:
        taps[site] = lambda layer, value, site=site: current.catch(site, layer, value)
    for site in wanted & SHARED:
        taps[site] = lambda layer, value: None
    if wanted:
        taps["resid_post"] = current.layer_ends
    with view.tapped(taps):
        yield current
