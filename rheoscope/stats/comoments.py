"""Means and central products of several quantities over units, joined as in Chan, Golub and LeVeque (1983)."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64

from rheoscope.stats.estimates import quotient


class CoMoments(NamedTuple):
    """Number of units, sums, and products of deviations from the mean of `p` quantities, for every entry of a shape."""

    count: Int64[np.ndarray, "*shape"]
    sums: Float64[np.ndarray, " p *shape"]
    products: Float64[np.ndarray, "p p *shape"]

    @classmethod
    def empty(cls, p: int, shape: tuple[int, ...]) -> "CoMoments":
        return cls(np.zeros(shape, np.int64), np.zeros((p, *shape)), np.zeros((p, p, *shape)))

    @classmethod
    def of(cls, rows: Float64[np.ndarray, "row p *shape"], present: Bool[np.ndarray, " row *shape"]) -> "CoMoments":
        """Co-moments of the rows; entries that are not present do not count, whatever their value."""
        rows = np.where(present[:, None], rows, 0)
        count, sums = present.sum(0), rows.sum(0)
        deviations = np.where(present[:, None], rows - sums / np.maximum(count, 1), 0)
        return cls(count, sums, np.einsum("rp...,rq...->pq...", deviations, deviations))

    def joined(self, other: "CoMoments") -> "CoMoments":
        """Co-moments of both sets of units together."""
        count = self.count + other.count
        gap = self.sums / np.maximum(self.count, 1) - other.sums / np.maximum(other.count, 1)
        weight = self.count * (other.count / np.maximum(count, 1))
        products = self.products + other.products + gap[:, None] * gap[None, :] * weight
        return CoMoments(count, self.sums + other.sums, products)

    def means(self) -> Float64[np.ndarray, " p *shape"]:
        """Means over units; NaN where there is none."""
        return quotient(self.sums, np.broadcast_to(self.count, self.sums.shape))
