"""Estimates over documents, from the sums of each document.

Sums first, one division: never a mean of means. Documents are the units, because tokens of one document are not
independent. With fewer than two documents there is no standard error: NaN.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64, Shaped
from torch import Tensor

from rheoscope.errors import RheoscopeError

# What NumPy's arithmetic makes of an array: without dimensions, a scalar.
Numbers = np.ndarray | np.generic

# Weights of this many resampled documents are held at a time: 80 MB.
RESAMPLED_AT_ONCE = 10_000_000


class Estimate(NamedTuple):
    """A value, its standard error over documents, and the number of documents that it rests on."""

    value: Float64[Numbers, "*shape"]
    se: Float64[Numbers, "*shape"]
    n: Int64[Numbers, "*shape"]


class Interval(NamedTuple):
    """A value, its bootstrap standard error, and the ends of its percentile interval."""

    value: Float64[Numbers, "*shape"]
    se: Float64[Numbers, "*shape"]
    low: Float64[Numbers, "*shape"]
    high: Float64[Numbers, "*shape"]


def ratio_of_sums(
    numerators: Shaped[np.ndarray | Tensor, " document *shape"],
    denominators: Shaped[np.ndarray | Tensor, " ..."],
) -> Estimate:
    """Ratio Σn/Σd over documents, with the standard error of its linearisation.

    se = sqrt(m/(m - 1) Σ(n - R d)²) / |Σd|. Denominators have the shape of the numerators, or one value per document.
    A document whose sums are both 0 does not count. NaN where Σd = 0.
    """
    n, d = paired_rows(numerators, denominators)
    count = ((n != 0) | (d != 0)).sum(0)
    ratio = quotient(n.sum(0), d.sum(0))
    return Estimate(ratio, linearised_se(((n - ratio * d) ** 2).sum(0), d.sum(0), count), count)


def paired_difference(
    after: Shaped[np.ndarray | Tensor, " document *shape"],
    before: Shaped[np.ndarray | Tensor, " _ *shape"],
    *,
    denominators: Shaped[np.ndarray | Tensor, " ..."],
) -> Estimate:
    """Difference Σ(after - before)/Σd of two ratios over the same documents, with its standard error.

    Paired: what makes a document hard before and after an edit cancels. Loss: sums of nats, d the scored tokens.
    """
    if len(after) != len(before):
        raise RheoscopeError(
            f"a paired difference was asked of {len(after)} documents after and {len(before)} before; "
            "measure both on the same documents."
        )
    return ratio_of_sums(float64(after) - float64(before), denominators)


def bootstrap_ratio(
    numerators: Shaped[np.ndarray | Tensor, " document *shape"],
    denominators: Shaped[np.ndarray | Tensor, " ..."],
    *,
    generator: np.random.Generator,
    n_resamples: int = 1000,
    confidence: float = 0.95,
) -> Interval:
    """Ratio Σn/Σd with standard error and percentile interval from resampling whole documents.

    Keeps n_resamples values per entry of `shape`. Equal generators give equal intervals.
    """
    n, d = paired_rows(numerators, denominators)
    m = len(n)
    value = quotient(n.sum(0), d.sum(0))
    if m < 2:
        return Interval(value, *(np.full(value.shape, np.nan) for _ in range(3)))
    flat_n, flat_d = n.reshape(m, -1), d.reshape(m, -1)
    resampled = []
    for start in range(0, n_resamples, step := max(1, RESAMPLED_AT_ONCE // m)):
        size = min(step, n_resamples - start)
        weights = generator.multinomial(m, np.full(m, 1 / m), size=size).astype(np.float64)
        resampled.append(quotient(weights @ flat_n, weights @ flat_d))
    ratios = np.concatenate(resampled).reshape(n_resamples, *value.shape)
    tails = [(1 - confidence) / 2, (1 + confidence) / 2]
    return Interval(value, ratios.std(0, ddof=1), *np.quantile(ratios, tails, axis=0))


def paired_rows(
    numerators: Shaped[np.ndarray | Tensor, " row *shape"], denominators: Shaped[np.ndarray | Tensor, " ..."]
) -> tuple[Float64[np.ndarray, " row *shape"], Float64[np.ndarray, " row *shape"]]:
    """Numerators and denominators of one shape; one denominator per row serves the whole row."""
    n, d = float64(numerators), float64(denominators)
    if d.shape == n.shape[:1]:
        d = d.reshape(-1, *[1] * (n.ndim - 1))
    if d.ndim != n.ndim or any(extent not in (1, of_n) for extent, of_n in zip(d.shape, n.shape, strict=True)):
        raise RheoscopeError(
            f"a ratio was asked of numerators {n.shape} and denominators {d.shape}; "
            "pass one denominator per row, or one for every numerator."
        )
    return n, np.broadcast_to(d, n.shape)


def linearised_se(
    squares: Shaped[Numbers, "*shape"], total: Shaped[Numbers, "*shape"], count: Shaped[Numbers, "*shape"]
) -> Float64[Numbers, "*shape"]:
    """Standard error of Σn/Σd from Σ(n - R d)²; NaN for fewer than two documents."""
    spread = np.sqrt(np.maximum(squares, 0) * quotient(count, np.where(count > 1, count - 1, 0)))
    return quotient(spread, np.abs(total))


def quotient(numerator: Numbers | float, denominator: Numbers | float) -> Float64[Numbers, "..."]:
    """Quotient in float64, of shapes that broadcast; NaN where the denominator is 0, whatever the numerator."""
    denominator = np.asarray(denominator, np.float64)
    return np.asarray(numerator, np.float64) / np.where(denominator == 0, np.nan, denominator)


def float64(values: Shaped[np.ndarray | Tensor, "*shape"]) -> Float64[np.ndarray, "*shape"]:
    """The values as a float64 array on the CPU."""
    if isinstance(values, Tensor):
        return values.detach().cpu().double().numpy()
    return np.asarray(values, np.float64)
