"""What every instrument is, and what it is given: the sites of one layer for one batch of windows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import xarray as xr
from jaxtyping import Float
from torch import Tensor

from rheoscope.corpus import Batch, Corpus
from rheoscope.errors import RheoscopeError
from rheoscope.models.attention import Attention
from rheoscope.models.view import ModelView
from rheoscope.stats import state_of, take_in
from rheoscope.stats.kept import Law


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


@runtime_checkable
class Pass(Protocol):
    """One more forward pass over some text, read by the given instruments."""

    def __call__(self, corpus: Corpus, instruments: Sequence[Instrument], *, task: str) -> None: ...


class Instrument(ABC):
    """One reading of a model. Its state is made of mergeable accumulators; no tensor of a layer outlives that layer.

    Attributes:
        name: group of its dataset in a Run.
        Options: frozen dataclass of its choices, each with the default; recorded in the run.
        sites: what `observe` needs: names of LayerSites, plus `attn_probs` or `attn_mean` if it reads
            attention maps, or their mean over heads, on every window.
        reads_output: whether `observe_output` needs logits; the head is not run where nobody does.
        kept: what it gathers, attribute → law of merging, so that a run can be kept, resumed and shared out
            (`rheoscope.stats.kept`). Everything that changes between two batches must be in it.
    """

    name: ClassVar[str]
    Options: ClassVar[type]
    sites: ClassVar[frozenset[str]] = frozenset()
    reads_output: ClassVar[bool] = False
    kept: ClassVar[Mapping[str, Law]] = {}

    def __init__(self, view: ModelView, corpus: Corpus, options: Any = None):
        """Raises Refused where the model cannot be read this way, RheoscopeError for options that do not fit."""
        self.view, self.corpus = view, corpus
        self.options = options or self.Options()

    def observe(self, layer: int, sites: LayerSites, batch: Batch) -> None:  # noqa: B027 - reading layers is optional
        """Reduce what one layer did with one batch of windows."""

    def observe_output(self, output: Float[Tensor, "batch position out"], batch: Batch) -> None:  # noqa: B027
        """Reduce the model's output (logits) for one batch of windows."""

    def merge(self, other: Self) -> None:
        """Add what another has seen of the same corpus with the same options: other windows than this one."""
        alike = type(self) is type(other) and self.options == other.options
        if not alike or self.corpus.hash != other.corpus.hash:
            raise RheoscopeError(
                f"a merge of {self.name} of two texts or two sets of options was asked; measure them alike"
            )
        take_in(self, dict(state_of(other)))

    def kept_bytes(self) -> int:
        """Bytes of memory that this will keep at most, and take while it finalises."""
        return sum(array.nbytes for _, array in state_of(self))

    @abstractmethod
    def finalize(self) -> xr.Dataset:
        """The readings of the shared pass, labelled; variable names are rows of the catalogue."""

    @property
    def n_null(self) -> int:
        """Windows on which an untrained model is read, at least: the instruments of a run share one such pass."""
        return getattr(self.options, "n_null", 0)

    def null(self, few: Corpus) -> Self | None:
        """What reads an untrained model on a few windows of the text; None for nothing."""
        return None

    def with_nulls(self, data: xr.Dataset, null: Self | None, run_pass: Pass, seed: int) -> xr.Dataset:
        """The readings with what they would be by chance beside them.

        null: what `null` gave, after its pass. Further passes go through `run_pass`.
        """
        return data
