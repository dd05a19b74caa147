"""Measured time and memory of two models, taken in turns, so that what slows the machine slows both."""

from __future__ import annotations

import copy
import ctypes
import inspect
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rheoscope.instruments.engine import Progress, silent

REPEATS, DECODED = 5, 8
SECONDS = 60.0  # that are enough for the sizes of `verify`, on a slow machine with fewer turns
CACHE_NAMES = ("cache", "past_key_values")


@dataclass(frozen=True)
class Latency:
    """Median milliseconds of both models over `repeats` turns, and the median of the ratios within each turn.

    prefill: a batch of texts of `length` tokens at once, keys kept, logits of the last token alone. decode: one more
    token for each, after `length` tokens.
    """

    phase: str
    batch: int
    length: int
    before_ms: float
    after_ms: float
    ratio: float  # after / before
    ratio_low: float  # smallest and largest ratio of a turn
    ratio_high: float
    repeats: int


@torch.no_grad()
def latencies(
    before: PreTrainedModel,
    after: PreTrainedModel,
    *,
    lengths: Iterable[int],
    batch_sizes: Iterable[int] = (1, 4),
    repeats: int = REPEATS,
    seconds: float = math.inf,
    progress: Progress = silent,
) -> list[Latency]:
    """Prefill and decode of both models at every length and batch size, the one right after the other in each turn.

    A turn that warms up goes before. Small sizes come first. With a limit of `seconds` a size has the share of what is
    left that goes with its tokens, half of it for each phase, and takes fewer turns than `repeats` where that is not
    enough, one at least; where two turns of prefill would go beyond all that is left, this size and those above it are
    not measured.
    """
    sizes = sorted((batch * length, batch, length) for batch in set(batch_sizes) for length in set(lengths))
    ends, per_token, measured = time.monotonic() + seconds, 0.0, []
    for place, (tokens, batch, length) in enumerate(sizes):
        left = ends - time.monotonic()
        if 2 * per_token * tokens > left:
            break
        share = left * tokens / sum(size[0] for size in sizes[place:])
        models = [_OneSize(model, batch, length) for model in (before, after)]
        for phase in ("prefill", "decode"):
            task = f"clock, {batch} x {length:,} tokens, {phase}"
            turns = _Turns(repeats, share / 2, task, progress).taken([getattr(model, phase) for model in models])
            measured.append(_latency(phase, batch, length, turns))
            if phase == "prefill":
                per_token = min(sum(turn) for turn in turns) / tokens
    return measured


def not_timed(
    measured: Iterable[Latency], *, lengths: Iterable[int], batch_sizes: Iterable[int]
) -> list[tuple[int, int]]:
    """Batch and length of the sizes that were asked for and had to be left out."""
    wanted = {(batch, length) for batch in batch_sizes for length in lengths}
    return sorted(wanted - {(one.batch, one.length) for one in measured})


@dataclass
class _Turns:
    """How many turns one measurement gets, and who is told of them."""

    repeats: int
    seconds: float
    task: str
    progress: Progress

    def taken(self, runs: Sequence[Callable[[], float]]) -> list[tuple[float, ...]]:
        """Seconds of every run in each turn: `repeats` of them, or as many as there is time for and at least one."""
        started = time.monotonic()
        for run in runs:
            run()
        turns: list[tuple[float, ...]] = []
        while len(turns) < self.repeats:
            turns.append(tuple(run() for run in runs))
            spent = time.monotonic() - started
            if spent + spent / (len(turns) + 1) > self.seconds:
                break
            if len(turns) < self.repeats:
                self.progress(self.task, len(turns), self.repeats)
        self.progress(self.task, len(turns), len(turns))
        return turns


def _latency(phase: str, batch: int, length: int, turns: list[tuple[float, ...]]) -> Latency:
    ratios = [second / first for first, second in turns]
    first, second = (1e3 * statistics.median(times) for times in zip(*turns, strict=True))
    return Latency(phase, batch, length, first, second, statistics.median(ratios), min(ratios), max(ratios), len(turns))


class _OneSize:
    """One model at one batch size and length: seconds of a prefill, and seconds of a token decoded after it."""

    def __init__(self, model: PreTrainedModel, batch: int, length: int):
        self.model, self.length = model, length
        self.tokens = some_tokens(model, batch, length + DECODED)
        self.kept: DynamicCache | None = None

    def prefill(self) -> float:
        cache = _new_cache(self.model)
        started = _now(self.model)
        _step(self.model, self.tokens[:, : self.length], cache, self.length)
        seconds = _now(self.model) - started
        self.kept = cache
        return seconds

    def decode(self) -> float:
        """After the last prefill, on a copy of its cache."""
        cache = copy.deepcopy(self.kept)
        started = _now(self.model)
        for place in range(self.length, self.length + DECODED):
            _step(self.model, self.tokens[:, place : place + 1], cache, place + 1)
        return (_now(self.model) - started) / DECODED


def _step(model: PreTrainedModel, tokens: Tensor, cache: DynamicCache, seen: int) -> Any:
    """One call with keys kept; `seen` tokens in all after it."""
    accepted = inspect.signature(model.forward).parameters
    inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": True}
    inputs["attention_mask"] = torch.ones(len(tokens), seen, dtype=torch.long, device=tokens.device)
    inputs |= {name: cache for name in CACHE_NAMES if name in accepted}
    if "logits_to_keep" in accepted:
        inputs["logits_to_keep"] = 1
    return model(**inputs)


def _new_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config.get_text_config())


def some_tokens(model: PreTrainedModel, batch: int, length: int) -> Tensor:
    """Random tokens, the same for every model of one vocabulary."""
    generator = torch.Generator().manual_seed(0)
    embeddings = model.get_input_embeddings().weight
    return torch.randint(0, embeddings.shape[0], (batch, length), generator=generator).to(embeddings.device)


def _now(model: PreTrainedModel) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


@torch.no_grad()
def peak_memory(model: PreTrainedModel, *, batch: int, length: int) -> float:
    """Bytes that one prefill takes beyond what was held before it; NaN where the system does not tell.

    By CUDA's allocator on a GPU; elsewhere by the largest resident size that Linux has seen since it was reset.
    """
    tokens = some_tokens(model, batch, length)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
        torch.cuda.reset_peak_memory_stats(model.device)
        held = torch.cuda.memory_allocated(model.device)
        _step(model, tokens, _new_cache(model), length)
        return float(torch.cuda.max_memory_allocated(model.device) - held)
    held = _resident("VmRSS") if _trimmed() and _reset_peak() else float("nan")
    _step(model, tokens, _new_cache(model), length)
    return _resident("VmHWM") - held


def _trimmed() -> bool:
    """Give back what allocators keep of memory that is free, or a prefill would not show; whether this is Linux."""
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
    return True


def _reset_peak() -> bool:
    """Forget the largest resident size of this process; whether that is possible."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _resident(name: str) -> float:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return float("nan")
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return 1024.0 * int(found[0]) if found else float("nan")
