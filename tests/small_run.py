"""A run small enough to read, for the tests of files and tables."""

import numpy as np
import xarray as xr

from rheoscope.run import Run

PROVENANCE = {"model": {"ref": "tiny"}, "seed": 7, "text": {"first_tokens": ["<s>", "\ud83d", "é\0"]}}


def small_run() -> Run:
    rng = np.random.default_rng(0)
    share = xr.DataArray(rng.random((3, 2)), dims=("layer", "head"), attrs={"units": "1", "n": 5, "summary": "median"})
    routing = xr.Dataset(
        {
            "routing_share": share,
            "routing_share_se": share * 0.01,
            "routing_share_null_gaussian": xr.DataArray(0.5),
            "by_lag": (("layer", "lag"), rng.random((3, 5)), {"units": "1"}),
        },
        coords={"layer": [0, 1, 2], "head": [0, 1], "lag": [1, 2, 3, 4, 5]},
    )
    loss = xr.Dataset({"nll_mean": ((), 3.25, {"units": "nats/token", "summary": "value"}), "nll_mean_se": 0.5})
    return Run.of({"loss": loss, "routing": routing}, PROVENANCE)
