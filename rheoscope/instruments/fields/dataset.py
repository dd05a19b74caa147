"""The readings of all layers as one labelled dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from rheoscope.instruments.fields.coherence import coherence_positions
from rheoscope.instruments.fields.ensemble import Readings
from rheoscope.instruments.fields.wavelets import MOST_DOMINANT

if TYPE_CHECKING:
    from rheoscope.instruments.fields.fields import Fields

DIMS: dict[str, tuple[str, ...]] = {
    "intensity": (),
    "intensity_by_lag": ("lag",),
    "intensity_everything": (),
    "sink_variance_share": (),
    "first_rows_variance_share": (),
    "lag_profile": ("lag",),
    "lag_profile_everything": ("lag",),
    "scalogram": ("scale", "lag"),
    "scalogram_by_position": ("scale", "position"),
    "scale_energy": ("scale",),
    "eigenvalues": ("band", "component"),
    "h_star": ("band", "level"),
    "h_star_everything": ("level",),
    "h_star_limited": ("band", "level"),
    "h_star_by_count": ("band", "count", "level"),
    "discarded_share": ("band",),
    "reconstruction_error": ("band", "rank"),
    "held_out_error": ("band", "rank"),
    "held_out_at_h_star": ("band", "level"),
    "beta": ("band",),
    "beta_low": ("band",),
    "beta_high": ("band",),
    "beta_last": ("band",),
    "beta_least": ("band",),
    "beta_most": ("band",),
    "spectral_temperature": ("band",),
    "coefficients": ("band", "snapshot", "mode_number"),
    "mode": ("band", "mode_number", "query_bin", "key_bin"),
    "mode_lag_profile": ("band", "mode_number", "lag"),
    "mode_peak_lag": ("band", "mode_number"),
    "coherence": ("coherence_scale", "row", "other_row"),
    "coherence_raw": ("coherence_scale", "row", "other_row"),
    "head_h_star": ("head", "band", "level"),
    "head_beta": ("head", "band"),
    "head_intensity": ("head",),
    "head_lag_profile": ("head", "lag"),
}
HELD = (90.0, 95.0, 99.0)  # percent of energy that H* holds: 100 (1 - ε)


def field_dataset(layers: list[Readings], fields: Fields) -> xr.Dataset:
    """Readings of every layer, with coordinates; H* over the number of heads beside."""
    corpus, design, entries = fields.corpus, fields.design, fields.entries[0]
    data = {name: (("layer", *DIMS[_base(name)]), np.stack([layer[name] for layer in layers])) for name in layers[0]}
    positions = coherence_positions(entries)
    bins = (np.arange(design.n_bins) + 0.5) * corpus.window / design.n_bins
    coords = {
        "layer": np.arange(len(layers)),
        "lag": entries.lags,
        "position": np.arange(corpus.window),
        "scale": np.array(fields.morlet.scales),
        "band": np.array(design.bands),
        "level": np.array(HELD),
        "count": np.array(design.counts),
        "rank": np.array(design.ranks),
        "mode_number": np.arange(design.n_modes),
        "snapshot": fields.snapshots[fields.layers[0].snapshots[0].seen],
        "query_bin": bins,
        "key_bin": bins,
        "peak": np.arange(MOST_DOMINANT),
        "coherence_scale": np.array(design.bands)[np.isfinite(design.bands)],
        "row": positions,
        "other_row": positions,
    }
    if fields.n_heads:
        coords["head"] = np.arange(fields.n_heads)
    dataset = xr.Dataset(data, coords=coords, attrs=_attrs(fields))
    return dataset.assign(h_star_per_head=dataset.h_star / fields.view.n_heads) if "h_star" in dataset else dataset


def _base(name: str) -> str:
    """The quantity that an error or a null stands beside."""
    return name if name in DIMS else name.removesuffix("_null_uniform").removesuffix("_se")


def _attrs(fields: Fields) -> dict[str, object]:
    """What every number rests on, and how."""
    options, corpus = fields.options, fields.corpus
    attrs = {
        "n": len(np.unique(corpus.units[fields.snapshots])),
        "n_snapshots": len(fields.snapshots),
        "n_scalogram": len(fields.sampled),
        "window": options.window,
        "sink": options.sink,
        "skip_rows": options.skip_rows,
        "omega0": options.omega0,
        "form": f"leading {fields.storage} directions" if isinstance(fields.storage, int) else "all snapshots",
    }
    return attrs
