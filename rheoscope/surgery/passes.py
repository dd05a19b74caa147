"""Losses of a model under many edits on one text: counted, timed, and kept in a file so that none is run twice."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np
from jaxtyping import Float64, Int64

from rheoscope.corpus import Corpus
from rheoscope.instruments.engine import Progress, batch_size_for, silent
from rheoscope.instruments.measure import weights_hash
from rheoscope.instruments.scale import configuration_of
from rheoscope.models.view import ModelView
from rheoscope.stats import Estimate
from rheoscope.surgery.edits import Edit
from rheoscope.surgery.effects import loss_change, window_losses
from rheoscope.surgery.pass_file import add, passes_in


@dataclass(frozen=True)
class PassLosses:
    """Loss sums and scored tokens of every window in one pass, and the seconds it took."""

    corpus: Corpus
    window_nll: Float64[np.ndarray, " window"]
    window_tokens: Int64[np.ndarray, " window"]
    seconds: float


@dataclass
class Passes:
    """The passes of one model over one text. The first under no edit is what all others are compared with.

    memory: a file that keeps every pass as one line of JSON under a hash of model, text, edits and version; a run
    that was stopped goes on where it was. n_run counts the passes that were run, not those that were read back.
    """

    view: ModelView
    corpus: Corpus
    memory: Path | None = None
    batch_size: int | None = None
    progress: Progress = silent
    n_run: int = 0
    _known: dict[str, dict] = field(default_factory=dict)
    _base: str = ""

    def __post_init__(self) -> None:
        self.batch_size = self.batch_size or batch_size_for(self.view, self.corpus.window)
        does = json.dumps(configuration_of(self.view), sort_keys=True)
        model = f"{weights_hash(self.view)} {does} {self.view.dtype} {self.view.device.type}"
        self._base = f"{model} {self.corpus.hash} {self.batch_size} {version('rheoscope')}"
        if self.memory is not None:
            self._known = passes_in(self.memory)

    def losses(self, *edits: Edit, task: str = "") -> PassLosses:
        """The losses with these edits in place."""
        key = hashlib.sha256(f"{self._base} {edits!r}".encode()).hexdigest()
        if key not in self._known:
            self._known[key] = self._run(key, edits, task)
        record = self._known[key]
        return PassLosses(
            self.corpus,
            np.array(record["nll"], np.float64),
            np.array(record["tokens"], np.int64),
            float(record["seconds"]),
        )

    def change(self, *edits: Edit, task: str = "") -> Estimate:
        """Paired change of the loss by these edits, nats per token, with its standard error over units."""
        plain = self.losses(task="unedited")
        return loss_change(self.losses(*edits, task=task), plain)

    def _run(self, key: str, edits: Sequence[Edit], task: str) -> dict:
        started = time.perf_counter()
        loss = window_losses(
            self.view, self.corpus, edits, batch_size=self.batch_size, task=task or "edited", progress=self.progress
        )
        record = {
            "key": key,
            "edits": repr(edits),
            "nll": loss.window_nll.tolist(),
            "tokens": loss.window_tokens.tolist(),
            "seconds": time.perf_counter() - started,
        }
        self.n_run += 1
        if self.memory is not None:
            add(self.memory, record)
        return record
