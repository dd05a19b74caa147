"""Measure a model on a text: the shared pass, the nulls, the weights, and where every number comes from."""

from __future__ import annotations

import datetime
import hashlib
import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import xarray as xr

from ..corpus import Corpus, batches
from ..errors import Refused, RheoscopeError
from ..models.untrained import untrained
from ..models.view import ModelView
from ..run import Run
from .catalog import describe
from .engine import Progress, batch_size_for, refuse_window, run_pass, silent
from .instrument import Instrument
from .kernel import kernel_readings
from .lags import lag_grid, nearest_lag
from .loss import Loss, refuse_loss
from .nulls import gaussian_readings
from .routing import Routing, spread

INSTRUMENTS = ("loss", "routing")
PACKAGES = ("rheoscope", "torch", "transformers", "tokenizers", "numpy", "xarray")


def measure(
    view: ModelView,
    corpus: Corpus,
    *,
    instruments: Sequence[str] | None = None,
    batch_size: int | None = None,
    n_spectra: int = 32,
    n_null: int = 4,
    seed: int = 0,
    progress: Progress = silent,
) -> Run:
    """All readings of a model on a text, in one pass over it.

    instruments: names out of INSTRUMENTS; by default all that the model has (loss is left out where it predicts no
    next token). n_spectra: windows whose full spectra are taken. n_null: windows given to the untrained null, 0 for
    none. Raises RheoscopeError for a window longer than the model's context, Refused for an instrument it cannot serve.
    """
    started = time.monotonic()
    refuse_window(view, corpus.window)
    names = _chosen(view, instruments)
    size = batch_size or batch_size_for(view, corpus.window)
    makers: dict[str, Callable[[], Instrument]] = {
        "loss": lambda: Loss(view, corpus),
        "routing": lambda: Routing(view, corpus, n_spectra=n_spectra),
    }
    active = {name: makers[name]() for name in names}
    run_pass(view, batches(corpus, size), list(active.values()), total=corpus.n_windows, progress=progress)
    datasets = {name: instrument.finalize() for name, instrument in active.items()}
    if "routing" in active:
        datasets["routing"] = _with_nulls_and_kernel(
            view, corpus, active["routing"], datasets["routing"], n_null=n_null, seed=seed, size=size, progress=progress
        )
    options = {
        "instruments": list(names),
        "batch_size": size,
        "n_spectra": min(n_spectra, corpus.n_windows),
        "n_null": min(n_null, corpus.n_windows),
        "seed": seed,
    }
    described = {name: describe(dataset, name) for name, dataset in datasets.items()}
    return Run.of(described, provenance(view, corpus, options, seconds=time.monotonic() - started))


def _chosen(view: ModelView, instruments: Sequence[str] | None) -> tuple[str, ...]:
    if instruments is None:
        return INSTRUMENTS if view.has_loss else tuple(name for name in INSTRUMENTS if name != "loss")
    unknown = [name for name in instruments if name not in INSTRUMENTS]
    if unknown or not instruments:
        raise RheoscopeError(f"instruments {list(instruments)} asked for; there are {', '.join(INSTRUMENTS)}")
    if "loss" in instruments:
        refuse_loss(view)
    return tuple(name for name in INSTRUMENTS if name in instruments)


def _with_nulls_and_kernel(
    view: ModelView,
    corpus: Corpus,
    routing: Routing,
    data: xr.Dataset,
    *,
    n_null: int,
    seed: int,
    size: int,
    progress: Progress,
) -> xr.Dataset:
    """The routing readings with the weights' own, the untrained null and the Gaussian null beside them."""
    try:
        grid = lag_grid(corpus.window)
        kernel = kernel_readings(view, grid, _mass_on(grid, routing.mass_by_lag))
        by_lag = kernel.kernel_routing_share_by_lag.assign_coords(lag=grid).reindex(lag=data.lag)
        data = data.merge(kernel.drop_vars("kernel_routing_share_by_lag")).assign(kernel_routing_share_by_lag=by_lag)
    except Refused as refusal:
        data.attrs["kernel_refused"] = str(refusal)
    if n_null:
        few = corpus.of_windows(spread(corpus.n_windows, n_null))
        null = Routing(view, few, n_spectra=n_null, n_lag_windows=n_null)
        with untrained(view, seed):
            run_pass(view, batches(few, size), [null], task="untrained null", total=few.n_windows, progress=progress)
        chance = null.finalize()
        for name in _nulled(data):
            data[f"{name}_null"] = chance[name]
            if f"{name}_se" in chance:
                data[f"{name}_null_se"] = chance[f"{name}_se"]
    for name, (value, error) in gaussian_readings(corpus.window, view.d_head, seed=seed).items():
        scale = data["growth_scale"] if name == "stability_max_re" else 1.0
        data[f"{name}_null_gaussian"], data[f"{name}_null_gaussian_se"] = value * scale, error * scale
    return data.drop_vars([name for name in data if name.startswith("growth_scale")])


def _nulled(data: xr.Dataset) -> list[str]:
    """Quantities that an untrained model gives a null for: those of the data, not of the weights, without errors."""
    skipped = ("kernel_", "eigenvalues_", "capacity", "growth_scale")
    return [name for name in map(str, data) if not name.startswith(skipped) and not name.endswith("_se")]


def _mass_on(grid: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Attention mass by signed lag, gathered at the nearest lag of the grid: [layer head lag]."""
    n = (mass.shape[-1] + 1) // 2
    place = nearest_lag(np.arange(1 - n, n), grid)
    gathered = np.zeros((*mass.shape[:-1], len(grid)))
    np.add.at(gathered, (..., place), mass)
    return gathered


def provenance(view: ModelView, corpus: Corpus, options: dict[str, Any], *, seconds: float) -> dict[str, Any]:
    """Where a run's numbers come from, ready for JSON."""
    return {
        "config": options,
        "seed": options["seed"],
        "model": {
            "ref": view.ref,
            "family": view.model_type if view.family else None,
            "model_type": view.model_type,
            "class": type(view.model).__name__,
            "n_layers": view.n_layers,
            "n_heads": view.n_heads,
            "n_kv_heads": view.n_kv_heads,
            "d_model": view.d_model,
            "d_head": view.d_head,
            "parameters": view.n_parameters,
            "causal": view.causal,
            "weights_hash": weights_hash(view),
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
    """SHA-256 over names, shapes and bytes of all parameters."""
    digest = hashlib.sha256()
    for name, parameter in sorted(view.model.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if not parameter.is_meta:
            flat = parameter.detach().contiguous().cpu().reshape(-1)
            digest.update(memoryview(flat.view(torch.uint8).numpy()))
    return digest.hexdigest()
