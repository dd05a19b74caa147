"""Measured time and memory of two models, taken in turns, so that what slows the machine slows both."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

WARM_UP, REPEATS, DECODED = 1, 5, 8
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
    lengths: Sequence[int],
    batch_sizes: Sequence[int] = (1, 4),
    repeats: int = REPEATS,
) -> list[Latency]:
    """Prefill and decode of both models at every length and batch size, the one right after the other in each turn."""
    measured = []
    for batch in batch_sizes:
        for length in lengths:
            for phase in ("prefill", "decode"):
                ready = [_timed(phase, model, batch, length) for model in (before, after)]
                for _ in range(WARM_UP):
                    for run in ready:
                        run()
                turns = [tuple(run() for run in ready) for _ in range(repeats)]
                measured.append(_latency(phase, batch, length, turns))
    return measured


def _latency(phase: str, batch: int, length: int, turns: list[tuple[float, float]]) -> Latency:
    ratios = [second / first for first, second in turns]
    first, second = (1e3 * statistics.median(times) for times in zip(*turns, strict=True))
    return Latency(phase, batch, length, first, second, statistics.median(ratios), min(ratios), max(ratios), len(turns))


def _timed(phase: str, model: PreTrainedModel, batch: int, length: int) -> Callable[[], float]:
    """A function that runs one phase and gives its seconds; per token for decode."""
    tokens = some_tokens(model, batch, length + (DECODED if phase == "decode" else 0))

    def prefill() -> float:
        started = _now(model)
        _step(model, tokens[:, :length], _new_cache(model), length)
        return _now(model) - started

    def decode() -> float:
        cache = _new_cache(model)
        _step(model, tokens[:, :length], cache, length)
        started = _now(model)
        for place in range(length, length + DECODED):
            _step(model, tokens[:, place : place + 1], cache, place + 1)
        return (_now(model) - started) / DECODED

    return prefill if phase == "prefill" else decode


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
    held = _resident("VmRSS") if _reset_peak() else float("nan")
    _step(model, tokens, _new_cache(model), length)
    return _resident("VmHWM") - held


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
