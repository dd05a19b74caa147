"""What a routing reading would be by chance: independent Gaussian queries and keys of the same sizes."""

from __future__ import annotations

import numpy as np
import torch

from ..linalg import gauge_share, routing_share, score_eigenvalues, score_energies, score_factors
from .routing import spectral_readings

DRAWS = 32


@torch.no_grad()
def gaussian_readings(window: int, d_head: int, *, seed: int, draws: int = DRAWS) -> dict[str, tuple[float, float]]:
    """Mean and standard error of every routing reading over `draws` heads of independent standard normal q and k.

    `stability_max_re` is given per unit of `growth_scale` (the Frobenius norm of K^T Q), so that it can be matched to a
    head of any size.
    """
    generator = torch.Generator().manual_seed(seed)
    Q, K = torch.randn(2, draws, window, d_head, generator=generator, dtype=torch.float64)
    T = score_factors(Q, K, scale=d_head**-0.5)
    readings = spectral_readings(T, score_eigenvalues(T))
    energies = score_energies(Q, K, scale=d_head**-0.5)
    readings |= {
        "routing_share": routing_share(T),
        "gauge_share": gauge_share(T),
        "diagonal_share": energies.diagonal / energies.score,
    }
    readings["stability_max_re"] = readings["stability_max_re"] / readings.pop("growth_scale")
    values = {name: value.numpy() for name, value in readings.items()}
    return {name: (float(np.mean(v)), float(np.std(v, ddof=1) / np.sqrt(draws))) for name, v in values.items()}
