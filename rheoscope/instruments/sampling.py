"""Which windows are read in full, and the mean of what is read on them."""

from __future__ import annotations

import numpy as np

from rheoscope.stats import Estimate, ratio_of_sums


def spread(n_windows: int, n_sampled: int) -> np.ndarray:
    """Numbers of `n_sampled` windows, evenly spread over all of them: [sample]."""
    return np.unique(np.linspace(0, n_windows - 1, min(n_sampled, n_windows)).round().astype(int))


def mean_over_units(samples: np.ndarray, units: np.ndarray) -> Estimate:
    """Mean of one sampled reading over windows, with its error over the units they belong to; NaN readings left out."""
    totals, counts = (np.zeros((units.max() + 1, *samples.shape[1:])) for _ in range(2))
    np.add.at(totals, units, np.nan_to_num(samples))
    np.add.at(counts, units, ~np.isnan(samples))
    return ratio_of_sums(totals, counts)
