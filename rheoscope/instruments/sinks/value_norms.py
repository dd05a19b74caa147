"""Lengths of what heads write: ‖v W_O‖, from a small triangular factor of W_O in place of W_O itself."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from rheoscope.errors import Refused
from rheoscope.models.view import ModelView


class ValueNorms:
    """‖x W_O‖ of every head for x in its value space. With W_Oᵀ = Q R it is ‖R x‖, d_head x d_head per head.

    Before a norm that some families put on the sum of all heads (Gemma 2, OLMo 2).
    refused: why there are no output weights to read; "" where there are.
    """

    def __init__(self, view: ModelView):
        self.view, self.refused = view, ""
        self._factors: dict[int, Tensor] = {}
        try:
            self._factor(0)
        except Refused as reason:
            self.refused = str(reason)

    def of_values(
        self, layer: int, v: Float[Tensor, "batch kv_head key d_value"]
    ) -> Float[Tensor, "batch head key"] | None:
        """‖v_j W_O‖ of every query head: how much a key can write if it gets all attention. None where refused."""
        if self.refused:
            return None
        grouped = self._factor(layer).unflatten(0, (v.shape[1], -1)).to(v.device)
        wide = v.to(torch.promote_types(v.dtype, torch.float32))[:, :, None]
        return (wide @ grouped.mT).norm(dim=-1).flatten(1, 2)

    def reduced(self, layer: int, z: Float[Tensor, "head query d_value"]) -> Float[Tensor, "head query d_value"] | None:
        """z W_O in d_value coordinates that keep all lengths and angles. None where refused."""
        return None if self.refused else z.to(self._factor(layer)) @ self._factor(layer).mT

    def _factor(self, layer: int) -> Float[Tensor, "head d_value d_value"]:
        if layer not in self._factors:
            W_O = self.view.weights.W_O(layer)
            wide = W_O.to(torch.promote_types(W_O.dtype, torch.float32))
            self._factors[layer] = torch.linalg.qr(wide.mT, mode="r").R
        return self._factors[layer]
