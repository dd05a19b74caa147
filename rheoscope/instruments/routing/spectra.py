"""All readings of the spectrum of one head's scores, and what they would be for Gaussian queries and keys."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from jaxtyping import Bool, Complex128, Float
from torch import Tensor

from rheoscope.linalg import (
    EffectiveRanks,
    centred_factors,
    effective_ranks,
    filtering_eigenvalues,
    gauge_share,
    repeated_keys,
    routing_energy_spectrum,
    routing_share,
    score_eigenvalues,
    score_energies,
    score_energy_spectrum,
    score_factors,
    split_factors,
    stability,
)

DRAWS = 32

# A part with less than this share of the energy of the whole is rounding: of the factor T at its worst. Numbers in a
# lower precision than float64 raise it to the square of their rounding.
VOID = 1e-18


@torch.no_grad()
def head_spectra(
    Q: Float[Tensor, "batch head position d_head"],
    K: Float[Tensor, "batch kv_head position d_head"],
    *,
    scale: float,
    valid: Bool[Tensor, "batch position"],
) -> tuple[dict[str, Float[Tensor, "batch head"]], Complex128[Tensor, "batch head component"]]:
    """All spectral readings of every head, and the eigenvalues of its scores.

    On a CPU the heads are shared out over threads: LAPACK on many small matrices does not use more than one core, and
    its own threads make it slower.
    """
    batch, heads = Q.shape[:2]
    padded = not bool(valid.all())
    threads = torch.get_num_threads()
    workers = threads if Q.device.type == "cpu" else 1
    if batch * K.shape[1] % workers:  # groups cannot be shared out evenly: heads, each with its own keys, nearly can
        K = repeated_keys(Q, K)
    groups = batch * K.shape[1]  # of query heads with one key head, which are read together
    parts = (
        Q.reshape(groups, -1, *Q.shape[-2:]),
        K.reshape(groups, 1, *K.shape[-2:]),
        valid[:, None].expand(-1, K.shape[1], -1).reshape(groups, 1, -1),
    )
    chunks = zip(*(part.chunk(min(workers, groups)) for part in parts), strict=True)

    def read(chunk: tuple[Tensor, Tensor, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        T = score_factors(chunk[0], chunk[1], scale=scale, valid=chunk[2] if padded else None)
        eigenvalues = score_eigenvalues(T)
        return spectral_readings(T, eigenvalues, void=void_share(Q.dtype)), eigenvalues

    try:  # one thread inside each worker: a number that LAPACK keeps for the whole process, and is put back
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,)) as pool:
            readings, eigenvalues = zip(*pool.map(read, chunks), strict=True)
    finally:
        torch.set_num_threads(threads)
    joined = {name: torch.cat([part[name] for part in readings]).view(batch, heads) for name in readings[0]}
    return joined, torch.cat(eigenvalues).view(batch, heads, -1)


def spectral_readings(
    T: Float[Tensor, "*batch row column"], eigenvalues: Tensor, *, void: float = VOID
) -> dict[str, Float[Tensor, "*batch"]]:
    """Effective ranks of every part, utilisation and stability from factors T and the eigenvalues of the scores.

    A part with less than the share `void` of the energy has no rank: NaN.
    """
    whole = score_energy_spectrum(T)
    spectra = {
        ("routing", ""): routing_energy_spectrum(T),
        ("routing", "_gauge_removed"): routing_energy_spectrum(centred_factors(T)),
        ("filtering", ""): filtering_eigenvalues(T).square(),
        ("score", ""): whole,
    }
    readings = {}
    for (part, suffix), energies in spectra.items():
        for rank, value in ranks_of_part(energies, whole, void=void)._asdict().items():
            readings[f"{part}_{rank}{suffix}"] = value
    readings["utilisation"] = readings["routing_k90"] / min(T.shape[-2:])
    stable = stability(eigenvalues)
    readings["stability_max_re"], readings["stability_share_positive"] = stable.max_re, stable.share_positive
    T_Q, T_K = split_factors(T)
    readings["growth_scale"] = (T_K.mT @ T_Q).square().sum((-2, -1)).sqrt()
    return readings


def ranks_of_part(
    energies: Float[Tensor, "*batch value"], whole: Float[Tensor, "*batch all"], *, void: float
) -> EffectiveRanks:
    """Effective ranks of a part, given σ²; NaN where it holds at most the share `void` of the energy of the whole."""
    of_part, of_whole = (spectrum.sum(-1, keepdim=True) for spectrum in (energies, whole))
    return effective_ranks(energies.masked_fill(of_part <= void * of_whole, 0).sqrt())


def void_share(dtype: torch.dtype) -> float:
    """The share of energy below which a part of scores made of numbers in this precision is rounding."""
    return max(VOID, torch.finfo(dtype).eps ** 2)


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
