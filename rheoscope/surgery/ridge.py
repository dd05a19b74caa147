"""Ridge regression from streamed second moments: what the outputs of a linear map should be, given new inputs.

Weights are shrunk towards those that are there, not towards 0: a direction of the inputs that the text hardly shows
keeps what the model has learned for it. The strength is chosen on rows that were not fitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from rheoscope.errors import RheoscopeError

STRENGTHS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # times the mean square of an input coordinate


@dataclass
class Moments:
    """Sums over rows (x, y) in float64: mergeable, and of a size that does not depend on the number of rows."""

    xx: Float64[Tensor, "inputs inputs"]
    xy: Float64[Tensor, "inputs outputs"]
    x: Float64[Tensor, " inputs"]
    y: Float64[Tensor, " outputs"]
    yy: float = 0.0
    n: int = 0

    @classmethod
    def empty(cls, inputs: int, outputs: int) -> Moments:
        shapes = ((inputs, inputs), (inputs, outputs), (inputs,), (outputs,))
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))

    def update(self, X: Float[Tensor, "row inputs"], Y: Float[Tensor, "row outputs"]) -> None:
        """Add rows."""
        X, Y = X.detach().cpu().double(), Y.detach().cpu().double()
        self.xx += X.T @ X
        self.xy += X.T @ Y
        self.x += X.sum(0)
        self.y += Y.sum(0)
        self.yy += float(Y.square().sum())
        self.n += len(X)

    def joined(self, other: Moments) -> Moments:
        """The sums over the rows of both."""
        parts = ("xx", "xy", "x", "y", "yy", "n")
        return Moments(*(getattr(self, part) + getattr(other, part) for part in parts))

    def error(self, W: Float64[Tensor, "inputs outputs"], b: Float64[Tensor, " outputs"]) -> float:
        """Σ ‖y - x W - b‖² over all rows."""
        product = float((W * (self.xx @ W - 2 * self.xy)).sum())
        return self.yy + product + 2 * float(b @ (self.x @ W - self.y)) + self.n * float(b @ b)

    def relative_error(self, W: Float64[Tensor, "inputs outputs"], b: Float64[Tensor, " outputs"]) -> float:
        """The same over Σ ‖y - mean y‖²; NaN where y does not vary."""
        spread = self.yy - float(self.y @ self.y) / max(self.n, 1)
        return self.error(W, b) / spread if spread > 0 else float("nan")


@dataclass(frozen=True)
class Fitted:
    """W and b of one ridge regression. strength: times the mean square of an input; infinite: nothing was changed."""

    W: Float64[Tensor, "inputs outputs"]
    b: Float64[Tensor, " outputs"]
    strength: float


class Ridge:
    """All regressions on the same moments: one eigenvalue decomposition, then a product for each strength.

    W0, b0: what weights are shrunk towards. with_bias: b is free (it is never shrunk); else b0 stays.
    """

    def __init__(self, moments: Moments, W0: Tensor, b0: Tensor, *, with_bias: bool):
        if moments.n == 0:
            raise RheoscopeError("a ridge regression asked for on no rows: give calibration text")
        self.moments, self.with_bias = moments, with_bias
        self.W0, self.b0 = (x.detach().cpu().double() for x in (W0, b0))
        n, x, y = moments.n, moments.x, moments.y
        if with_bias:
            gram = moments.xx - torch.outer(x, x) / n
            against = moments.xy - torch.outer(x, y) / n
        else:
            gram, against = moments.xx, moments.xy - torch.outer(x, self.b0)
        self.scale = float(gram.diagonal().mean())
        values, self.vectors = torch.linalg.eigh(gram)
        self.values = values.clamp(min=0)
        self.residual = self.vectors.T @ (against - gram @ self.W0)

    def fitted(self, strength: float) -> Fitted:
        """W with Σ ‖y - x W - b‖² + strength · scale · ‖W - W0‖² least."""
        if not strength > 0:
            raise RheoscopeError(f"a ridge of strength {strength} asked for: give a number above 0")
        penalty = strength * self.scale
        W = self.W0
        if self.scale > 0 and penalty < float("inf"):
            W = W + self.vectors @ (self.residual / (self.values + penalty)[:, None])
        if not self.with_bias:
            return Fitted(W, self.b0, strength)
        return Fitted(W, (self.moments.y - self.moments.x @ W) / self.moments.n, strength)


class Choice(NamedTuple):
    """A regression on all rows, and the relative errors on held-out rows without it and when fitted on the others."""

    fitted: Fitted
    before: float
    after: float


def chosen_ridge(
    fit: Moments,
    held_out: Moments,
    W0: Tensor,
    b0: Tensor,
    *,
    with_bias: bool,
    strengths: tuple[float, ...] = STRENGTHS,
) -> Choice:
    """The regression on all rows, with the strength that errs least on held-out rows when fitted on the others.

    Where no strength does better there than W0 and b0 themselves, they stay, at infinite strength.
    """
    ridge = Ridge(fit, W0, b0, with_bias=with_bias)
    before = held_out.relative_error(ridge.W0, ridge.b0)
    tried = [ridge.fitted(strength) for strength in strengths]
    errors = [held_out.relative_error(one.W, one.b) for one in tried]
    best = min(range(len(tried)), key=errors.__getitem__)
    if not errors[best] < before:
        return Choice(Fitted(ridge.W0, ridge.b0, float("inf")), before, before)
    whole = Ridge(fit.joined(held_out), W0, b0, with_bias=with_bias)
    return Choice(whole.fitted(strengths[best]), before, errors[best])
