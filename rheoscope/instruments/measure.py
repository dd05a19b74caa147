"""Measure a model on a text: the shared pass, the nulls, the weights, and where every number comes from."""

from __future__ import annotations

import datetime
import hashlib
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any

import torch

from rheoscope.corpus import Corpus
from rheoscope.errors import Refused, RheoscopeError
from rheoscope.instruments.catalog import describe
from rheoscope.instruments.chance import untrained_readings
from rheoscope.instruments.engine import Progress, batch_size_for, refuse_window, silent
from rheoscope.instruments.fields.fields import Fields
from rheoscope.instruments.instrument import Instrument
from rheoscope.instruments.loss import Loss
from rheoscope.instruments.memory import estimate, fitting
from rheoscope.instruments.routing.routing import Routing
from rheoscope.instruments.scale import Scale, SharedPasses, digest_of, key_of
from rheoscope.instruments.sinks.sinks import SinkReadings
from rheoscope.instruments.steering.steering import Steering
from rheoscope.models.placement import stored
from rheoscope.models.view import ModelView
from rheoscope.run import Run

INSTRUMENTS: dict[str, type[Instrument]] = {kind.name: kind for kind in (Loss, Routing, Steering, SinkReadings, Fields)}
AT_ONCE = Scale()  # in one process, kept nowhere
PACKAGES = ("rheoscope", "torch", "transformers", "tokenizers", "numpy", "xarray")


def measure(
    view: ModelView,
    corpus: Corpus,
    *,
    instruments: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    nulls: bool = True,
    seed: int = 0,
    command: Sequence[str] = (),
    progress: Progress = silent,
    scale: Scale = AT_ONCE,
) -> Run:
    """All readings of a model on a text, in one pass over it and a few short ones for the nulls.

    instruments: names out of INSTRUMENTS; by default all that this model has. options: by name, an instrument's own
    `Options`. batch_size: windows at a time, chosen by memory where None. Raises RheoscopeError for a window longer
    than the model's context, Refused for an instrument asked for by name that the model does not have. scale: where
    the state is kept meanwhile, and the processes that share the work (docs/scale.md).
    """
    started = time.monotonic()
    refuse_window(view, corpus.window)
    active, left_out = _made(view, corpus, instruments, options or {})
    wanted = scale.batch_size() or batch_size_for(view, corpus.window) if batch_size is None else batch_size
    size = _fitting(view, corpus, list(active.values()), wanted, nulls, scale)
    config = {
        "instruments": list(active),
        "left_out": left_out,
        "options": {name: asdict(instrument.options) for name, instrument in active.items()},
        "batch_size": size,
        "nulls": nulls,
        "seed": seed,
    }
    weights = weights_hash(view)
    key = key_of(view, corpus, config, weights=weights, processes=scale.processes.size)
    if (finished := scale.finished(key)) is not None:
        return finished
    passes = SharedPasses(view, size, scale, scale.opened(view, key), progress)
    passes(corpus, list(active.values()), task="measure")
    chance = untrained_readings(view, corpus, active, passes, seed) if nulls else {}
    datasets = {}
    for name, instrument in active.items():
        data = instrument.finalize()
        if nulls:
            if isinstance(chance.get(name), Refused):
                data = data.assign_attrs(null_refused=str(chance.pop(name)))
            data = instrument.with_nulls(data, chance.pop(name, None), passes, seed)
        datasets[name] = describe(data, name)
    config |= {"command": shlex.join(command)}
    record = provenance(view, corpus, config, seconds=time.monotonic() - started, weights=weights)
    return Run.of(datasets, record | {"processes": scale.processes.size, "key": digest_of(key)})


def _fitting(
    view: ModelView, corpus: Corpus, active: Sequence[Instrument], wanted: int, nulls: bool, scale: Scale
) -> int:
    """The batch size, after the memory that the run will take has been told; smaller where it has to fit a bound."""
    needed = estimate(view, active, window=corpus.window, batch_size=wanted, nulls=nulls)
    size = scale.processes.told("batch size", fitting(needed, scale.max_memory))
    scale.tell(replace(needed, batch_size=min(size, corpus.n_windows)))
    return size


def _made(
    view: ModelView, corpus: Corpus, names: Sequence[str] | None, options: Mapping[str, Any]
) -> tuple[dict[str, Instrument], dict[str, str]]:
    """The instruments asked for; without names, all that this model has, and why the others are left out."""
    unknown = [name for name in (*(names or ()), *options) if name not in INSTRUMENTS]
    if unknown or (names is not None and not names):
        raise RheoscopeError(f"instruments {unknown or names} asked for; there are {', '.join(INSTRUMENTS)}")
    idle = [name for name in options if names is not None and name not in names]
    if idle:
        raise RheoscopeError(
            f"options of {', '.join(idle)} given, which is not measured: name it among the instruments"
        )
    made: dict[str, Instrument] = {}
    left_out: dict[str, str] = {}
    for name, kind in INSTRUMENTS.items():
        if names is not None and name not in names:
            continue
        try:
            made[name] = kind(view, corpus, options.get(name))
        except Refused as refusal:
            if names is not None:
                raise
            left_out[name] = str(refusal)
    return made, left_out


def provenance(
    view: ModelView, corpus: Corpus, options: dict[str, Any], *, seconds: float, weights: str = ""
) -> dict[str, Any]:
    """Where a run's numbers come from, ready for JSON. weights: their hash, where it is known."""
    return {
        "config": options,
        "seed": options["seed"],
        "command": options.pop("command"),
        "model": {
            "ref": view.ref,
            "family": view.model_type if view.family else None,
            "model_type": view.model_type,
            "class": type(view.model).__name__,
            "n_layers": view.n_layers,
            "n_heads": max(size.n_heads for size in view.sizes),
            "n_kv_heads": max(size.n_kv_heads for size in view.sizes),
            "d_model": view.d_model,
            "d_head": view.d_head,
            "parameters": view.n_parameters,
            "causal": view.causal,
            "weights_hash": weights or weights_hash(view),
            "dtype": str(view.dtype).removeprefix("torch."),
            "device": str(view.device),
        },
        "text": corpus.provenance(),
        "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "wall_seconds": round(seconds, 3),
        "threads": torch.get_num_threads(),
    }


def weights_hash(view: ModelView) -> str:
    """SHA-256 over names, shapes and bytes of all parameters, wherever they are kept."""
    digest = hashlib.sha256()
    for name, parameter in stored(view.model):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        flat = parameter.contiguous().cpu().reshape(-1)
        digest.update(memoryview(flat.view(torch.uint8).numpy()))
    return digest.hexdigest()
