"""What the readings of fields are by chance, and the scales that stand out from it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import xarray as xr

from rheoscope.corpus import Corpus
from rheoscope.instruments.fields.wavelets import dominant_scales, strongest_scales

COMPARED = ("scale_energy", "lag_profile", "intensity", "intensity_by_lag", "h_star_by_count")


def chance_corpus(corpus: Corpus, seed: int) -> Corpus:
    """The same windows with their text tokens in random order; special tokens and separators stay in their places."""
    generator = np.random.default_rng(seed)
    tokens = corpus.tokens.copy()
    places = np.arange(corpus.window)
    text = (places >= len(corpus.framing.prefix)) & (places < corpus.window - len(corpus.framing.suffix))
    for row in tokens:
        moved = text & (row != corpus.separator) if corpus.packed else text
        row[moved] = generator.permutation(row[moved])
    return replace(corpus, tokens=tokens)


def with_chance(data: xr.Dataset, null: xr.Dataset, role: str) -> xr.Dataset:
    """The dataset with readings of a null beside its own; counts of snapshots that the null lacks are NaN."""
    for name in COMPARED:
        for suffix in ("", "_se"):
            if f"{name}{suffix}" in null and f"{name}{suffix}" in data:
                chance = null[f"{name}{suffix}"]
                aligned = chance.reindex({dim: data[dim] for dim in chance.dims if dim == "count"})
                data[f"{name}_{role}{suffix}"] = aligned
    return data


def dominant(data: xr.Dataset, rule: str) -> xr.Dataset:
    """The dataset with every layer's dominant scales: relative to the untrained null, else to uniform attention."""
    scales, energy = data.scale.values, data.scale_energy
    trained = "scale_energy_null" in data
    null = data["scale_energy_null" if trained else "scale_energy_null_uniform"]
    squares = (data.scale_energy_se / energy) ** 2
    error = np.sqrt(squares + (data.scale_energy_null_se / null) ** 2 if trained else squares)
    rows = []
    for layer in range(data.sizes["layer"]):
        of_layer, chance, uncertain = (values.values[layer] for values in (energy, null, error))
        rows.append(
            strongest_scales(of_layer, scales)
            if rule == "raw"
            else dominant_scales(of_layer, chance, scales, relative_error=np.nan_to_num(uncertain))
        )
    data["dominant_scale"] = ("layer", "peak"), np.stack(rows)
    data.attrs["dominant_rule"] = rule
    return data
