"""What the weights alone make of a score: shares and ranks of W_QK = W_Q W_K^T, static and at each lag under RoPE.

The gain of the norm before attention is folded in, and so are the gains of a QK-norm; its division by a length, which
is a positive number per token, is not. Biases are left out: they are no part of a bilinear form in the input.
"""

from __future__ import annotations

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Float64
from torch import Tensor

from ..linalg import (
    effective_ranks,
    filtering_singular_values,
    kernel_factors,
    routing_share,
    routing_singular_values,
    score_singular_values,
    split_factors,
)
from ..models.view import ModelView

PARTS = {
    "routing": routing_singular_values,
    "filtering": filtering_singular_values,
    "score": score_singular_values,
}


@torch.no_grad()
def kernel_readings(view: ModelView, lags: np.ndarray, mass: Float64[np.ndarray, "layer head lag"]) -> xr.Dataset:
    """Kernel shares and ranks of every head; under RoPE also at each of `lags` and averaged with attention's `mass`.

    Raises Refused for a model type without a row, or weights that are not plain numbers.
    """
    rows: dict[str, list[np.ndarray]] = {}
    for layer in range(view.n_layers):
        W_Q, W_K = view.weights.kernel(layer)
        T = kernel_factors(W_Q, W_K)
        readings = {"kernel_routing_share": routing_share(T)}
        for part, spectrum in PARTS.items():
            ranks = effective_ranks(spectrum(T))._asdict()
            readings |= {f"kernel_{part}_{name}": value for name, value in ranks.items()}
        routing, score = _energies_by_lag(T, _rotations(view, layer, lags))
        readings["kernel_routing_share_by_lag"] = routing / score
        weight = torch.from_numpy(mass[layer]).to(score)
        readings["kernel_routing_share_averaged"] = (weight * routing).sum(-1) / (weight * score).sum(-1)
        for name, value in readings.items():
            rows.setdefault(name, []).append(value.cpu().numpy())
    dims = {name: ("layer", "head", "lag")[: values[0].ndim + 1] for name, values in rows.items()}
    data = {name: (dims[name], np.stack(values)) for name, values in rows.items()}
    return xr.Dataset(data, coords={"lag": lags})


def _rotations(view: ModelView, layer: int, lags: np.ndarray) -> Float[Tensor, "lag d_head d_head"]:
    """R_lag of every lag, such that M(lag) = W_Q R_lag W_K^T; the identity in a layer without RoPE."""
    positions = torch.as_tensor(lags, device=view.device)
    cos, sin = view.weights.rotation(layer, torch.cat([positions, positions[:1] * 0]))
    unit = torch.eye(view.d_head, dtype=torch.float64, device=view.device).expand(len(cos), -1, -1)
    turned = view.weights.rotated(unit, cos.double()[:, None], sin.double()[:, None])
    return turned[:-1] @ turned[-1].mT


def _energies_by_lag(
    T: Float64[Tensor, "head row column"], R: Float[Tensor, "lag d_head d_head"]
) -> tuple[Float64[Tensor, "head lag"], Float64[Tensor, "head lag"]]:
    """‖S‖² and ‖M‖² of M = Q R K^T from traces of d_head x d_head products, one lag at a time."""
    Q, K = split_factors(T)
    qq, kk, kq = Q.mT @ Q, K.mT @ K, K.mT @ Q
    energies = []
    for rotation in R.to(T):
        score = (qq * (rotation @ kk @ rotation.mT)).sum((-2, -1))
        turned = kq @ rotation
        energies.append(((score - (turned * turned.mT).sum((-2, -1))) / 2, score))
    routing, score = (torch.stack(parts, -1) for parts in zip(*energies, strict=True))
    return routing.clamp(min=0), score
