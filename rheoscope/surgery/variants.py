"""What attention and the parts of the feed-forward network are worth: the loss without each of them."""

from __future__ import annotations

import numpy as np
import xarray as xr

from rheoscope.surgery.edits_steering import SPARED, RadialFFN, TangentialFFN, TermEdit, ZeroAttention, ZeroFFN
from rheoscope.surgery.passes import Passes

VARIANTS: dict[str, type[TermEdit]] = {
    "zero-FFN": ZeroFFN,
    "radial-only FFN": RadialFFN,
    "tangential-only FFN": TangentialFFN,
    "zero attention": ZeroAttention,
}


def variant_table(passes: Passes) -> xr.Dataset:
    """Loss change of each variant at all layers at once, with every token changed and with some left alone.

    The fifth variant is the model itself, with which all are compared. 1 + 4 x 3 passes.
    """
    changes = [
        [passes.change(kind(spare=spare), task=f"{name}, {spare} spared") for spare in SPARED]
        for name, kind in VARIANTS.items()
    ]
    return _table("variant_change", changes, {"variant": list(VARIANTS), "spare": list(SPARED)})


def variants_by_layer(passes: Passes) -> xr.Dataset:
    """Loss change of each variant in one layer alone. 4 passes per layer."""
    layers = range(passes.view.n_layers)
    changes = [
        [passes.change(kind(layers=(layer,)), task=f"{name}, layer {layer}") for layer in layers]
        for name, kind in VARIANTS.items()
    ]
    return _table("variant_change_by_layer", changes, {"variant": list(VARIANTS), "layer": list(layers)})


def _table(name: str, changes: list[list], coords: dict[str, list]) -> xr.Dataset:
    values = np.array([[float(change.value) for change in row] for row in changes])
    errors = np.array([[float(change.se) for change in row] for row in changes])
    dims = tuple(coords)
    return xr.Dataset({name: (dims, values), f"{name}_se": (dims, errors)}, coords=coords)
