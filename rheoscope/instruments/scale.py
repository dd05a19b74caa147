"""What a large measurement needs: where its state is kept meanwhile, who shares the work, how much memory it takes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import rheoscope
from rheoscope.corpus import Batch, Corpus, batches
from rheoscope.errors import RheoscopeError, Stopped
from rheoscope.instruments.engine import Progress, run_pass
from rheoscope.instruments.instrument import Instrument
from rheoscope.instruments.memory import Memory
from rheoscope.instruments.partial import EVERY, Partial, key_in, refuse_unfinished, remove_partial
from rheoscope.instruments.processes import Ended, Processes
from rheoscope.models.interface import taps_of
from rheoscope.models.view import ModelView, forward_hooks
from rheoscope.run import Run

ROOMS = ("linalg", "stats", "corpus", "models", "nets", "theory", "instruments")
UNHEEDED = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")
PACKAGES = ("rheoscope", "torch", "transformers", "tokenizers", "numpy", "scipy", "xarray")


@dataclass
class Stop:
    """A request to stop between two batches. `heeded`: somebody looks for it at the moment."""

    asked: bool = False
    heeded: bool = False


def unsaid(needed: Memory) -> None:
    """Nothing is told."""


@dataclass(frozen=True)
class Scale:
    """How a measurement is kept, resumed and shared out.

    partial: folder for its state while it runs; None: kept nowhere. resume: go on from what the folder holds; without,
    a folder that is there is refused, or removed first with `anew`. every: seconds between two savings, at least.
    max_memory: bytes that the process may take, by the estimate; None: no bound. output: the file that the run will be
    written to; with `resume`, a run that is there already is returned as it is. tell: is given the estimate of memory.
    """

    partial: Path | None = None
    resume: bool = False
    anew: bool = False
    every: float = EVERY
    processes: Processes = field(default_factory=Processes)
    stop: Stop = field(default_factory=Stop)
    max_memory: int | None = None
    output: Path | None = None
    tell: Callable[[Memory], None] = unsaid

    def finished(self, key: Mapping[str, Any]) -> Run | None:
        """The run that is to be resumed, where it is over and written: read back. None where it is not.

        Process 0 says so, as only its machine need have the file; other processes get a run without instruments.
        """
        run = self._written(key) if self.processes.first else None
        if not self.processes.told("finished", int(run is not None)):
            return None
        return run or Run.of({}, {"key": digest_of(key)})

    def _written(self, key: Mapping[str, Any]) -> Run | None:
        if not self.resume or self.output is None or not self.output.exists():
            return None
        run = Run.load(self.output)
        if run.provenance.get("key") != digest_of(key):
            raise RheoscopeError(
                f"{self.output} exists already and is the run of something else: choose another --out, or --overwrite"
            )
        return run

    def batch_size(self) -> int | None:
        """The batch size that an unfinished run was begun with; None where there is none to go on with."""
        key = key_in(self.partial) if self.resume and self.partial is not None else None
        return key and key.get("options", {}).get("batch_size")

    def opened(self, view: ModelView, key: Mapping[str, Any]) -> Partial | None:
        """The state of this measurement, once it is sure that it belongs to no other."""
        self.processes.agree(key)
        if self.partial is None:
            return None
        refuse_edits(view)
        if not self.resume:
            remove_partial(self.partial) if self.anew else refuse_unfinished(self.partial)
        partial = Partial(self.partial, key, process=self.processes.rank, every=self.every)
        partial.require_own()
        return partial


class SharedPasses:
    """The forward passes of one measurement, in order: each shared out, kept, resumed and merged."""

    def __init__(self, view: ModelView, batch_size: int, scale: Scale, partial: Partial | None, progress: Progress):
        self.view, self.batch_size, self.scale, self.partial, self.progress = view, batch_size, scale, partial, progress
        self.number = 0

    def __call__(self, corpus: Corpus, readers: Sequence[Instrument], *, task: str) -> None:
        """One more pass over a text. Afterwards the readers hold what all processes have gathered."""
        number, self.number = self.number, self.number + 1
        share = self.scale.processes.share(-(-corpus.n_windows // max(1, self.batch_size)))
        done = self.partial.restored(number, readers) if self.partial else 0
        left = islice(batches(corpus, self.batch_size), share.start + done, share.stop)
        windows = [
            min(corpus.n_windows, place * self.batch_size) for place in (share.start, share.start + done, share.stop)
        ]
        run_pass(
            self.view,
            self._watched(number, left, readers, done=done),
            readers,
            task=task,
            done=windows[1] - windows[0],
            total=windows[2] - windows[0],
            progress=self.progress,
        )
        self.scale.processes.merge(readers, number=number, idle=lambda: self._save(number, readers, done=len(share)))

    def _watched(
        self, number: int, left: Iterator[Batch], readers: Sequence[Instrument], *, done: int
    ) -> Iterator[Batch]:
        """The batches that are left; between two of them the state is kept, and requests to stop are heeded."""
        stop, processes = self.scale.stop, self.scale.processes
        stop.heeded = self.partial is not None
        for batch in left:
            yield batch
            done += 1
            try:
                processes.look()
            except Ended:
                self._save(number, readers, done=done)
                raise
            if stop.asked or (self.partial is not None and self.partial.is_due):
                self._save(number, readers, done=done)
        stop.heeded = False

    def _save(self, number: int, readers: Sequence[Instrument], *, done: int) -> None:
        """Keeps the state of a pass; a request to stop that comes meanwhile, or came before, is heeded then."""
        stop = self.scale.stop
        if self.partial is None:
            return
        heeded, stop.heeded = stop.heeded, True
        self.partial.save(number, readers, done=done)
        stop.heeded = heeded
        if stop.asked:
            raise Stopped(f"told to stop; what was read is kept in {self.partial.folder}: go on with --resume")


def refuse_edits(view: ModelView) -> None:
    """Raise RheoscopeError where the model is tapped: what taps do is in no key, so its state would fit anything.

    Hooks that the model came with are part of it.
    """
    if forward_hooks(view.model).keys() - view.own_hooks.keys() or any(taps_of(module) for module in view.attentions):
        raise RheoscopeError(
            "a state to resume from was asked for inside an edit, which no key names: measure without one, or make the "
            "edit a model of its own (rheoscope.restructured)"
        )


def key_of(
    view: ModelView, corpus: Corpus, config: Mapping[str, Any], *, weights: str, processes: int
) -> dict[str, Any]:
    """What the numbers of a run depend on, by the words that name it in messages."""
    frame = corpus.framing, corpus.packed, corpus.separator, corpus.bos_id
    arrays = corpus.n_bytes, corpus.units, corpus.starts
    text = hashlib.sha256(f"{corpus.hash} {frame}".encode() + b"".join(array.tobytes() for array in arrays))
    key = {
        "options": config,
        "weights": weights,
        "configuration": configuration_of(view),
        "hooks": sorted(view.own_hooks.values()),
        "text": text.hexdigest(),
        "code": code_hash(),
        "versions": {name: version(name) for name in PACKAGES},
        "number of processes": processes,
        "device": view.device.type,
    }
    return json.loads(json.dumps(key))  # as it is read back: lists for tuples


def configuration_of(view: ModelView) -> dict[str, Any]:
    """What a model computes with its weights, as config.json says it: heads, positions, factors, epsilons.

    Without what says where it was found, who wrote it, and in which dtype (the weights have theirs).
    """
    return _heeded(json.loads(view.model.config.to_json_string()))


def _heeded(said: Any) -> Any:
    if not isinstance(said, dict):
        return said
    return {name: _heeded(value) for name, value in said.items() if name not in UNHEEDED}


def digest_of(key: Mapping[str, Any]) -> str:
    """SHA-256 of what the numbers of a run depend on."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


@cache
def code_hash() -> str:
    """SHA-256 over the program text of the rooms that numbers come from."""
    digest, root = hashlib.sha256(), Path(rheoscope.__file__).parent
    for path in sorted(path for room in ROOMS for path in (root / room).rglob("*.py")):
        digest.update(f"{path.relative_to(root)} ".encode() + path.read_bytes())
    return digest.hexdigest()
