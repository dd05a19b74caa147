"""What scores are worth in parts: loss against the rank of routing and of filtering, and against linear layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

from rheoscope.corpus import Corpus
from rheoscope.errors import RheoscopeError
from rheoscope.instruments.engine import refuse_window
from rheoscope.stats import Estimate
from rheoscope.surgery.calibration import N_CALIBRATION, Calibration, calibrated
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.edits_routing import FilterOff, FilterScalar, KeyBiasRouting, TruncateFiltering, TruncateRouting
from rheoscope.surgery.passes import Passes

SCORE_EDITS = {"key-bias routing": KeyBiasRouting, "filter scalar": FilterScalar, "filter off": FilterOff}


def linearisation_curve(passes: Passes, *, sizes: Sequence[int] | None = None, scaled: bool = False) -> xr.Dataset:
    """Loss change with layers 0 to n - 1 linearised as they are, for every n (or those of `sizes`). A pass per n."""
    n_layers = passes.view.n_layers
    sizes = list(range(1, n_layers + 1)) if sizes is None else sorted(set(sizes))
    if not sizes or not 1 <= sizes[0] <= sizes[-1] <= n_layers:
        raise RheoscopeError(f"{sizes} linear layers asked for; the model has {n_layers}: give numbers from 1 to that")
    changes = [
        passes.change(Linearize(layers=tuple(range(n)), scaled=scaled), task=f"{n} linear layers") for n in sizes
    ]
    return _dataset("linear_change", changes, "n_linear", sizes)


def truncation_curve(
    passes: Passes, calibration: Calibration, *, ranks: Sequence[int] | None = None, layers: tuple[int, ...] = ()
) -> xr.Dataset:
    """Loss change with routing, and with filtering, cut to each rank in all layers (or some). A pass per rank and part.

    Models with S-D layers have no filtering of a rank, and no curve of it.
    """
    view = passes.view
    chosen = layers or tuple(range(view.n_layers))
    capacity = min(view.routing_capacity(layer) for layer in chosen)
    ranks = curve_ranks(capacity) if ranks is None else sorted(set(ranks))
    damped = any(view.is_damped(layer) for layer in chosen)
    kinds = {"routing": TruncateRouting} | ({} if damped else {"filtering": TruncateFiltering})
    parts = []
    for part, kind in kinds.items():
        changes = [
            passes.change(kind(layers=layers, calibration=calibration, rank=rank), task=f"{part} of rank {rank}")
            for rank in ranks
        ]
        parts.append(_dataset(f"{part}_change", changes, "rank", ranks))
    return xr.merge(parts)


def score_readings(passes: Passes, calibration: Corpus) -> list[xr.Dataset]:
    """Truncation curve and simple forms, fitted on a text by one more pass."""
    refuse_window(passes.view, calibration.window)
    fitted = calibrated(passes.view, calibration, progress=passes.progress)
    passes.n_run += 1
    return [truncation_curve(passes, fitted), score_edit_table(passes, fitted)]


def first_windows(corpus: Corpus, n: int = N_CALIBRATION) -> Corpus:
    """The first windows of a text, to fit on where no other text is given."""
    return corpus.of_windows(np.arange(min(n, corpus.n_windows)))


def score_edit_table(passes: Passes, calibration: Calibration, *, layers: tuple[int, ...] = ()) -> xr.Dataset:
    """Loss change with routing as a bias of keys, filtering as one number, and no filtering. Three passes."""
    changes = [
        passes.change(kind(layers=layers, calibration=calibration if kind.fitted else None), task=name)
        for name, kind in SCORE_EDITS.items()
    ]
    return _dataset("score_edit_change", changes, "score_edit", list(SCORE_EDITS))


def curve_ranks(capacity: int) -> list[int]:
    """Ranks of a truncation curve: 0, then doubled from 2, up to what a head can have."""
    return [0, *(rank for rank in (2**k for k in range(1, 12)) if rank < capacity), capacity]


def _dataset(name: str, changes: list[Estimate], dim: str, values: list) -> xr.Dataset:
    data = {
        name: (dim, np.array([float(change.value) for change in changes])),
        f"{name}_se": (dim, np.array([float(change.se) for change in changes])),
    }
    return xr.Dataset(data, coords={dim: values})
