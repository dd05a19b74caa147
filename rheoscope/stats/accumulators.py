"""Sums over data that can be split, merged, stored and resumed.

The laws: `merge` is associative and commutative, and splitting the data anywhere changes nothing, to rounding. State is
float64 (or whole numbers) and goes to plain arrays and back. Rows come first in everything that is fed: [row, *shape].
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool, Float64, Shaped
from torch import Tensor

from rheoscope.errors import RheoscopeError
from rheoscope.stats.comoments import CoMoments
from rheoscope.stats.estimates import Estimate, Numbers, float64, paired_rows, quotient

A = TypeVar("A", bound="Accumulator")


class Accumulator(ABC):
    """What every accumulator can do. A subclass names its arrays and says how it takes in another one."""

    arrays: ClassVar[tuple[str, ...]]

    def merge(self: A, other: A) -> A:
        """Accumulator of the data of both; neither is changed. Raises RheoscopeError unless they fit each other."""
        if type(self) is not type(other) or self._layout() != other._layout():
            raise RheoscopeError(
                f"a merge was asked of a {type(self).__name__} and a {type(other).__name__} that do not fit; "
                "merge only accumulators of one kind, made with the same arguments."
            )
        merged = self.from_state(self.state())
        merged._take_in(other)
        return merged

    def state(self) -> dict[str, np.ndarray]:
        """Everything it holds, as arrays under fixed names."""
        return {name: np.array(getattr(self, name)) for name in self.arrays}

    @classmethod
    def from_state(cls: type[A], state: dict[str, np.ndarray]) -> A:
        """Accumulator with the given state, ready to go on."""
        if state.keys() != set(cls.arrays):
            raise RheoscopeError(
                f"a {cls.__name__} was to be resumed from {sorted(state)}; its state consists of {sorted(cls.arrays)}."
            )
        accumulator = cls.__new__(cls)
        for name in cls.arrays:
            setattr(accumulator, name, np.array(state[name]))
        return accumulator

    @abstractmethod
    def _layout(self) -> tuple:
        """What two accumulators must share to be merged."""

    @abstractmethod
    def _take_in(self: A, other: A) -> None:
        """Add the data of another accumulator of the same layout."""


class Mean(Accumulator):
    """Weighted mean over all rows, pooled: Σwx/Σw. It knows no documents and has no standard error."""

    arrays = ("total", "weight")

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.total, self.weight = np.zeros(shape), np.zeros(shape)

    def update(
        self,
        values: Shaped[np.ndarray | Tensor, " row *shape"],
        weights: Shaped[np.ndarray | Tensor, " ..."] | None = None,
    ) -> None:
        """Add rows. Weights: one per row or one per value; None: all 1."""
        values, weights = paired_rows(values, np.ones(len(values)) if weights is None else weights)
        self.total += (values * weights).sum(0)
        self.weight += weights.sum(0)

    def finalize(self) -> Float64[Numbers, "*shape"]:
        """The mean; NaN where the weight is 0."""
        return quotient(self.total, self.weight)

    def _layout(self) -> tuple:
        return self.total.shape

    def _take_in(self: A, other: A) -> None:
        self.total += other.total
        self.weight += other.weight


class Moments(Accumulator):
    """Mean and variance of what is read once per document, such as an effective rank on a sampled window.

    One row is one document. For sums over the tokens of a document take RatioOfSums.
    """

    arrays = ("count", "sums", "products")

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count, self.sums, self.products = CoMoments.empty(1, shape)

    def update(
        self,
        values: Shaped[np.ndarray | Tensor, " document *shape"],
        *,
        present: Bool[np.ndarray, " document *shape"] | None = None,
    ) -> None:
        """Add documents. Where `present` is False the value does not count; a NaN that counts makes the mean NaN."""
        values = float64(values)
        present = np.ones(values.shape, bool) if present is None else present
        self._join(CoMoments.of(values[:, None], present))

    def finalize(self) -> Estimate:
        """Mean over documents, its standard error (NaN below two documents), and their number."""
        mean = quotient(self.sums[0], self.count)
        return Estimate(mean, np.sqrt(quotient(self.variance(), self.count)), self.count.copy())

    def variance(self) -> Float64[Numbers, "*shape"]:
        """Unbiased variance over documents; NaN below two."""
        return quotient(self.products[0, 0], np.maximum(self.count - 1, 0))

    def _join(self, other: CoMoments) -> None:
        self.count, self.sums, self.products = CoMoments(self.count, self.sums, self.products).joined(other)

    def _layout(self) -> tuple:
        return self.count.shape

    def _take_in(self: A, other: A) -> None:
        self._join(CoMoments(other.count, other.sums, other.products))


class HistogramCounts(NamedTuple):
    """Weight in every bin, below the first edge, from the last edge on, and of NaN."""

    counts: Float64[np.ndarray, "*shape bin"]
    below: Float64[np.ndarray, "*shape"]
    above: Float64[np.ndarray, "*shape"]
    undefined: Float64[np.ndarray, "*shape"]


class Histogram(Accumulator):
    """Histogram with fixed edges for every entry of a shape; a bin holds edge <= value < next edge."""

    arrays = ("edges", "counts")

    def __init__(self, edges: Shaped[np.ndarray, " edge"], shape: tuple[int, ...] = ()) -> None:
        self.edges = np.array(edges, np.float64)
        if len(self.edges) < 2 or not (np.diff(self.edges) > 0).all():
            raise RheoscopeError(
                f"a histogram was asked with edges {self.edges.tolist()}; they must rise, two at least."
            )
        self.counts = np.zeros((*shape, len(self.edges) + 2))

    def update(
        self,
        values: Shaped[np.ndarray | Tensor, " row *shape"],
        weights: Shaped[np.ndarray | Tensor, " ..."] | None = None,
    ) -> None:
        """Add rows. Weights: one per row or one per value; None: all 1."""
        values, weights = paired_rows(values, np.ones(len(values)) if weights is None else weights)
        bins = np.where(np.isnan(values), len(self.edges) + 1, np.searchsorted(self.edges, values, side="right"))
        width = self.counts.shape[-1]
        entry = np.arange(self.counts.size // width).reshape(self.counts.shape[:-1])
        flat = np.bincount((entry * width + bins).ravel(), weights.ravel(), minlength=self.counts.size)
        self.counts += flat.reshape(self.counts.shape)

    def finalize(self) -> HistogramCounts:
        """The counts, with what fell outside the edges kept apart."""
        below, counts, above, undefined = np.split(self.counts, [1, len(self.edges), len(self.edges) + 1], axis=-1)
        return HistogramCounts(counts, below[..., 0], above[..., 0], undefined[..., 0])

    def _layout(self) -> tuple:
        return (*self.edges.tolist(), *self.counts.shape)

    def _take_in(self: A, other: A) -> None:
        self.counts += other.counts
