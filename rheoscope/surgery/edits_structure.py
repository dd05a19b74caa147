"""Edits of what a layer consists of: no attention, attention beside the feed-forward network, narrower scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rheoscope.models.interface import Tap
from rheoscope.models.view import ModelView
from rheoscope.surgery.edits import Edit
from rheoscope.surgery.edits_steering import ParallelFFN


@dataclass(frozen=True)
class DropAttention(Edit):
    """Layers whose heads write nothing. What the layer's output bias, and a norm after it, add stays."""

    def taps(self, view: ModelView) -> Mapping[str, Tap]:
        def tap(_layer: int, z: Tensor) -> Tensor:
            return torch.zeros_like(z)

        return {"z": tap}


@dataclass(frozen=True)
class Parallelize(ParallelFFN):
    """`ParallelFFN`, to be kept: x + A + Φ(x + A) becomes x + A + Φ(x).

    fused: in the saved model one norm and one product make queries, keys, values and what enters the feed-forward
    network, and one product makes what both write. The same numbers by fewer and larger products.
    """

    fused: bool = False
