"""Running attention and feed-forward network side by side: what it costs, which layers, and what time it could save."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float64, Int
from torch import nn

from rheoscope.corpus import Batch, Corpus, batches
from rheoscope.errors import RheoscopeError
from rheoscope.instruments.engine import run_pass
from rheoscope.instruments.steering.steering import Steering
from rheoscope.models.view import ModelView
from rheoscope.stats import Estimate
from rheoscope.surgery.edits_steering import ParallelFFN
from rheoscope.surgery.passes import Passes

N_TIMED = 3  # passes over one batch whose fastest times count


def parallel_layers(passes: Passes) -> xr.Dataset:
    """Defect of every layer, and the loss change when that layer alone is made parallel. 1 + layers passes."""
    changes = [
        passes.change(ParallelFFN(layers=(layer,)), task=f"parallel layer {layer}")
        for layer in range(passes.view.n_layers)
    ]
    readings = layer_defects(passes.view, passes.corpus, batch_size=passes.batch_size)
    return xr.Dataset(
        {
            "parallel_defect": ("layer", readings["defect"].values),
            "parallel_displacement": ("layer", readings["defect_displacement"].values),
            "parallel_change_by_layer": ("layer", np.array([float(change.value) for change in changes])),
            "parallel_change_by_layer_se": ("layer", np.array([float(change.se) for change in changes])),
        },
        coords={"layer": np.arange(passes.view.n_layers)},
    )


def parallel_curve(
    passes: Passes,
    defects: Float64[np.ndarray, " layer"],
    displacements: Float64[np.ndarray, " layer"],
    *,
    sizes: Sequence[int] | None = None,
    n_random: int = 5,
    seed: int = 0,
) -> xr.Dataset:
    """Loss change against the number of parallel layers: low and high defect first, low displacement first, random.

    A random choice is one order of all layers, so that its sets grow. Sizes x (3 + n_random) passes; sets that
    coincide are run once.
    """
    n_layers = passes.view.n_layers
    sizes = curve_sizes(n_layers) if sizes is None else sorted(set(sizes))
    if not sizes or not 1 <= sizes[0] <= sizes[-1] <= n_layers:
        raise RheoscopeError(f"{sizes} parallel layers asked for; the model has {n_layers}: ask for 1 to {n_layers}")
    orders = schedules(defects, n_random=n_random, seed=seed)
    orders["displacement"] = np.argsort(displacements, kind="stable")
    costs = layer_times(passes.view, passes.corpus, batch_size=passes.batch_size)
    plain = passes.losses(task="unedited").seconds
    data: dict[str, Any] = {}
    for name in ("low", "high", "displacement", "random"):
        chosen = {key: order for key, order in orders.items() if key.startswith(name)}
        runs = [[_one(passes, order[:size], costs, plain) for order in chosen.values()] for size in sizes]
        readings = np.array(runs)  # size, choice, (value, se, estimate, measured)
        dims = ("n_parallel", "choice") if name == "random" else ("n_parallel",)
        readings = readings if name == "random" else readings[:, 0]
        for index, what in enumerate(("change_{}", "change_{}_se", "speedup_{}", "time_{}")):
            data[f"parallel_{what.format(name)}"] = dims, readings[..., index]
    return xr.Dataset(data, coords={"n_parallel": sizes, "choice": np.arange(n_random)})


def _one(
    passes: Passes, layers: Int[np.ndarray, " chosen"], costs: Float64[np.ndarray, "layer two"], plain: float
) -> tuple[float, float, float, float]:
    """Loss change with its error, the estimated speed-up, and the time of the pass over that of the plain one."""
    layers = tuple(sorted(int(layer) for layer in layers))
    edit = ParallelFFN(layers=layers)
    change: Estimate = passes.change(edit, task=f"{len(layers)} parallel layers")
    return float(change.value), float(change.se), estimated_speedup(costs, layers), passes.losses(edit).seconds / plain


def schedules(
    defects: Float64[np.ndarray, " layer"], *, n_random: int, seed: int
) -> dict[str, Int[np.ndarray, " layer"]]:
    """Orders in which layers are made parallel, by name."""
    rising = np.argsort(defects, kind="stable")
    generator = np.random.default_rng(seed)
    orders = {"low": rising, "high": rising[::-1]}
    return orders | {f"random {k}": generator.permutation(len(defects)) for k in range(n_random)}


def curve_sizes(n_layers: int) -> list[int]:
    """Numbers of layers to be made parallel: close together at first, up to all."""
    return sorted({size for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96) if size < n_layers} | {n_layers})


def layer_defects(view: ModelView, corpus: Corpus, *, batch_size: int) -> xr.Dataset:
    """Defect and displacement of every layer on a text, by one pass."""
    reader = Steering(view, corpus, Steering.Options(n_first_order=0, n_top_k=0, n_null=0))
    run_pass(view, batches(corpus, batch_size), [reader], task="defects", total=corpus.n_windows)
    return reader.finalize()


def estimated_speedup(costs: Float64[np.ndarray, "layer two"], parallel: Sequence[int]) -> float:
    """Σ(T_A + T_Φ) over the same with max(T_A, T_Φ) in parallel layers: the paper's estimate, for two free devices."""
    together = costs.sum(1)
    side_by_side = together.copy()
    side_by_side[list(parallel)] = costs[list(parallel)].max(1)
    return float(together.sum() / side_by_side.sum())


@torch.no_grad()
def layer_times(view: ModelView, corpus: Corpus, *, batch_size: int) -> Float64[np.ndarray, "layer two"]:
    """Seconds that attention and FFN of every layer take on one batch: the fastest of a few passes."""
    batch = next(iter(batches(corpus, batch_size)))
    return np.min([_timed(view, batch) for _ in range(N_TIMED)], axis=0)


def _timed(view: ModelView, batch: Batch) -> Float64[np.ndarray, "layer two"]:
    seconds = np.zeros((view.n_layers, 2))

    def begin(layer: int, part: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            seconds[layer, part] -= _now(view)

        return hook

    def end(layer: int, part: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            seconds[layer, part] += _now(view)

        return hook

    with ExitStack() as undo:
        for layer in range(view.n_layers):
            for part, (first, last) in enumerate(_parts(view, layer)):
                undo.callback(first.register_forward_pre_hook(begin(layer, part)).remove)
                undo.callback(last.register_forward_hook(end(layer, part)).remove)
        view.forward(batch.tokens, batch.valid, head=False)
    return seconds


def _parts(view: ModelView, layer: int) -> list[tuple[nn.Module, nn.Module]]:
    """First and last module of attention and of the feed-forward network."""
    ffn = view.family.ffn
    return [(view.attentions[layer],) * 2, (view.part(layer, ffn[0]), view.part(layer, ffn[-1]))]


def _now(view: ModelView) -> float:
    if view.device.type == "cuda":
        torch.cuda.synchronize(view.device)
    return time.perf_counter()
