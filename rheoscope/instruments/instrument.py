"""What every instrument is, and what it is given: the sites of one layer for one batch of windows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import xarray as xr
from jaxtyping import Float
from torch import Tensor

from ..corpus import Batch
from ..models.attention import Attention


@dataclass
class LayerSites:
    """The tapped sites of one layer during one forward pass; None where no instrument asked.

    Valid only inside `observe`: the next layer reuses the memory of the maps. Copy what must be kept.
    """

    resid_pre: Float[Tensor, "batch position d_model"] | None = None
    attn_in: Float[Tensor, "batch position d_model"] | None = None
    attention: Attention | None = None
    attn_out: Float[Tensor, "batch position d_model"] | None = None
    resid_mid: Float[Tensor, "batch position d_model"] | None = None
    ffn_in: Float[Tensor, "batch position d_model"] | None = None
    ffn_out: Float[Tensor, "batch position d_model"] | None = None
    resid_post: Float[Tensor, "batch position d_model"] | None = None


class Instrument(ABC):
    """One reading of a model. Its state is made of mergeable accumulators; no tensor of a layer outlives that layer.

    Attributes:
        name: group of its dataset in a Run.
        sites: what `observe` needs, names of LayerSites plus `attn_probs` if it reads attention maps on every window.
        extra_passes: forward passes over the whole text beyond the shared one.
    """

    name: ClassVar[str]
    sites: ClassVar[frozenset[str]] = frozenset()
    extra_passes: float = 0.0

    def observe(self, layer: int, sites: LayerSites, batch: Batch) -> None:  # noqa: B027 - reading layers is optional
        """Reduce what one layer did with one batch of windows."""

    def observe_output(self, output: Float[Tensor, "batch position out"], batch: Batch) -> None:  # noqa: B027
        """Reduce the model's output (logits) for one batch of windows."""

    @abstractmethod
    def finalize(self) -> xr.Dataset:
        """The readings, labelled; variable names are rows of the catalogue."""
