"""Aggregation pressure: how the spread of directions through the depth answers when attention or FFN are changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

from rheoscope.corpus import batches
from rheoscope.instruments.engine import run_pass
from rheoscope.instruments.steering.steering import Steering
from rheoscope.surgery.edits import Edit, edited
from rheoscope.surgery.edits_steering import AttentionGain
from rheoscope.surgery.passes import Passes
from rheoscope.surgery.variants import VARIANTS

GAINS = (1.0, 1.5, 2.0, 3.0)


def pressure_readings(passes: Passes, *, gains: Sequence[float] = GAINS) -> xr.Dataset:
    """Loss change under each attention gain; diversity after every layer under each gain and each variant.

    Each is one pass for the loss and one for the diversity.
    """
    changes = [passes.change(AttentionGain(gain=gain), task=f"attention x {gain:g}") for gain in gains]
    by_gain = [diversity_by_depth(passes, AttentionGain(gain=gain)) for gain in gains]
    full = diversity_by_depth(passes)
    by_variant = [full, *(diversity_by_depth(passes, kind()) for kind in VARIANTS.values())]
    passes.n_run += len(by_gain) + len(by_variant)
    return xr.Dataset(
        {
            "gain_change": ("gain", np.array([float(change.value) for change in changes])),
            "gain_change_se": ("gain", np.array([float(change.se) for change in changes])),
            "diversity_by_gain": (("gain", "layer"), np.stack([reading.values for reading, _ in by_gain])),
            "diversity_by_gain_se": (("gain", "layer"), np.stack([error.values for _, error in by_gain])),
            "diversity_by_edit": (("edit", "layer"), np.stack([reading.values for reading, _ in by_variant])),
            "diversity_by_edit_se": (("edit", "layer"), np.stack([error.values for _, error in by_variant])),
        },
        coords={"gain": list(gains), "edit": ["full", *VARIANTS], "layer": np.arange(passes.view.n_layers)},
    )


def diversity_by_depth(passes: Passes, *edits: Edit) -> tuple[xr.DataArray, xr.DataArray]:
    """Spherical diversity after every layer with its error, with edits in place; first tokens left out."""
    view, corpus = passes.view, passes.corpus
    reader = Steering(view, corpus, Steering.Options(defect_stride=0, n_top_k=0, n_null=0))
    with edited(view, *edits):
        run_pass(view, batches(corpus, passes.batch_size), [reader], task="diversity", total=corpus.n_windows)
    data = reader.finalize()
    return data["diversity_post"], data["diversity_post_se"]
