"""What the weights alone make of a score: shares and ranks of W_QK = W_Q W_K^T, static and at each lag under RoPE.

The gain of the norm before attention is folded in, and so are the gains of a QK-norm and the mean that it takes out of
each head; its division by a length, which is a positive number per token, is not. Biases are left out: they are no part
of a bilinear form in the input.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float64
from torch import Tensor

from rheoscope.instruments.routing.spectra import ranks_of_part, void_share
from rheoscope.linalg import (
    filtering_eigenvalues,
    kernel_factors,
    routing_energy_spectrum,
    routing_share,
    score_energy_spectrum,
    split_factors,
)
from rheoscope.models.view import ModelView


class _Turns(NamedTuple):
    """RoPE at some lags: R_lag = diag(cos) + J diag(sin), of row vectors, with cos and sin of every coordinate's pair.

    J is a signed permutation that is the same for all lags. Coordinates that are not turned have cos 1 and sin 0; those
    that are carry the gain that some kinds of RoPE give to queries and to keys, once for each.
    """

    cos: Float64[Tensor, "lag d_head"]
    sin: Float64[Tensor, "lag d_head"]
    J: Float64[Tensor, "d_head d_head"]


@torch.no_grad()
def kernel_readings(
    view: ModelView, lags: np.ndarray, mass: Float64[np.ndarray, "layer head signed_lag"]
) -> xr.Dataset:
    """Kernel shares and ranks of every head; under RoPE also at each of `lags` and averaged over all lags.

    mass: attention at each lag = query minus key from -(n - 1) to n - 1, the weights of the average.
    Raises Refused for a model type without a row, or weights that are not plain numbers.
    """
    rows: dict[str, list[np.ndarray]] = {}
    for layer in range(view.n_layers):
        W_Q, W_K = view.weights.kernel(layer)
        T = kernel_factors(W_Q, W_K)
        readings = {"kernel_routing_share": routing_share(T)}
        whole = score_energy_spectrum(T)
        parts = {"routing": routing_energy_spectrum(T), "filtering": filtering_eigenvalues(T).square(), "score": whole}
        for part, energies in parts.items():
            ranks = ranks_of_part(energies, whole, void=void_share(W_Q.dtype))._asdict()
            readings |= {f"kernel_{part}_{name}": value for name, value in ranks.items()}
        routing, score = _energies_by_lag(T, _turns(view, layer, mass.shape[-1] // 2))
        at_lags = routing / score
        readings["kernel_routing_share_by_lag"] = at_lags[:, lags + mass.shape[-1] // 2]
        weight = torch.from_numpy(mass[layer]).to(score)
        readings["kernel_routing_share_averaged"] = (weight * routing).sum(-1) / (weight * score).sum(-1)
        for name, value in readings.items():
            rows.setdefault(name, []).append(value.cpu().numpy())
    dims = {name: ("layer", "head", "lag")[: values[0].ndim + 1] for name, values in rows.items()}
    data = {name: (dims[name], np.stack(values)) for name, values in rows.items()}
    return xr.Dataset(data, coords={"lag": lags})


def _turns(view: ModelView, layer: int, longest: int) -> _Turns:
    """RoPE of a layer at every lag from -longest to longest; nothing is turned in a layer without it."""
    weights, unit = view.weights, torch.eye(view.d_head, dtype=torch.float64, device=view.device)
    cos, sin = (table.double() for table in weights.rotation(layer, torch.arange(longest + 1, device=view.device)))
    J = weights.rotated(unit, cos[:1] * 0, cos[:1] * 0 + 1) - weights.rotated(unit, cos[:1] * 0, cos[:1] * 0)
    ones = torch.ones_like(unit[:1]).expand(len(cos), -1)
    cos = weights.rotated(ones, cos, cos * 0)
    sin = weights.rotated(ones, sin * 0, sin) * J.sum(0)
    gain = cos[:1]  # at lag 0, of the key
    cos, sin = cos * gain, sin * gain
    return _Turns(torch.cat([cos[1:].flip(0), cos]), torch.cat([-sin[1:].flip(0), sin]), J)


def _energies_by_lag(
    T: Float64[Tensor, "head row column"], turns: _Turns
) -> tuple[Float64[Tensor, "head lag"], Float64[Tensor, "head lag"]]:
    """‖S‖² and ‖M‖² of M = Q R K^T at every lag.

    ‖M‖² = tr(Q^TQ R K^TK R^T) and tr(M²) = tr((K^TQ R)²) are quadratic forms in the cosines and sines of a lag.
    """
    cos, sin, J = (part.to(T) for part in turns)
    Q, K = split_factors(T)
    qq, kk, kq = Q.mT @ Q, K.mT @ K, K.mT @ Q

    def form(A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        """cos A cos + 2 sin B cos + sin C sin, per head and lag."""
        return ((cos @ A + 2 * sin @ B) * cos + (sin @ C) * sin).sum(-1)

    turned = kq @ J
    score = form(qq * kk, qq * (J @ kk), qq * (J @ kk @ J.mT))
    square = form(kq * kq.mT, turned.mT * kq, turned * turned.mT)
    return ((score - square) / 2).clamp(min=0), score
