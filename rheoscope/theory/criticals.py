"""Critical directions of a field F on the sphere: unit u with F(u) = ρ u, where the flow du/dt = P_u F stands still.

Found by Levenberg-Marquardt on ‖P_u F‖² from many starts at once, which finds saddles too; following the flow finds
attractors only. A field is any differentiable map of rows [direction d_model] to rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Complex, Float
from torch import Tensor

from rheoscope.models.field import derivative

Field = Callable[[Float[Tensor, "direction d_model"]], Float[Tensor, "direction d_model"]]

ZERO_SCORE = 0.05  # largest zero score of a critical direction: the paper's
SAME = 0.99  # cosine above which two directions are one
EPSILON = 1e-12
SIGN = 1e-4  # a real part below this share of the largest eigenvalue has no sign
ROTATION = 0.1  # share of the largest eigenvalue above which an imaginary part makes a direction rotational
KINDS = ("attractor", "repeller", "saddle", "degenerate")
CG_STEPS = 24  # of the inner least-squares problem; the outer steps make up for what is left
_UP, _DOWN, _LEAST, _MOST = 4.0, 0.3, 1e-10, 1e12  # damping: factors after a worse and a better step, and its bounds


@dataclass(frozen=True)
class Criticals:
    """Critical directions that differ, with the score and the start that led to each first."""

    u: Float[Tensor, "direction d_model"]
    score: Float[Tensor, " direction"]
    start: Tensor
    n_starts: int
    n_converged: int


@dataclass(frozen=True)
class Stability:
    """Eigenvalues of the linearised flow on the tangent space, and what they say."""

    eigenvalues: Complex[Tensor, "direction tangent"]
    kinds: tuple[str, ...]
    rotational: Bool[Tensor, " direction"]


def zero_score(F: Float[Tensor, "direction d_model"], u: Float[Tensor, "direction d_model"]) -> Tensor:
    """z = ‖P_u F‖ / (‖F‖ + ε), in [0, 1]: 0 where the field does not turn u."""
    return _tangent(F, u).norm(dim=-1) / (F.norm(dim=-1) + EPSILON)


@torch.no_grad()
def find_criticals(
    field: Field, starts: Float[Tensor, "start d_model"], *, n_steps: int = 40, aim: float = 1e-3
) -> Criticals:
    """Directions with a zero score of at most ZERO_SCORE, reached from the starts; u and -u differ.

    n_steps: Levenberg-Marquardt steps; a start that has a score below `aim` rests.
    """
    u = _unit(starts)
    damping = torch.full_like(u[:, 0], 1e-2) * field(u).norm(dim=-1).square().clamp(min=EPSILON)
    for _ in range(n_steps):
        active = torch.nonzero(zero_score(field(u), u) > aim)[:, 0]
        if not len(active):
            break
        u[active], damping[active] = _step(field, u[active], damping[active])
    score = zero_score(field(u), u)
    converged = torch.nonzero(score <= ZERO_SCORE)[:, 0]
    kept = _distinct(u[converged][score[converged].argsort()])
    order = converged[score[converged].argsort()][kept]
    return Criticals(u[order], score[order], order, len(u), len(converged))


@torch.no_grad()
def jacobian(field: Field, u: Float[Tensor, " d_model"]) -> Float[Tensor, "tangent tangent"]:
    """P(DF - ρI) on the tangent space at u, in an orthonormal basis of it: the flow linearised at u."""
    E = tangent_basis(u)
    value = field(u[None])[0]
    columns = torch.func.vmap(lambda v: derivative(field, u[None], v[None])[1][0], chunk_size=64)(E.mT.contiguous())
    return E.mT @ columns.mT - (u @ value) * torch.eye(E.shape[1], dtype=u.dtype, device=u.device)


def stability(field: Field, u: Float[Tensor, "direction d_model"]) -> Stability:
    """Spectra of the linearised flow at the given directions, whether critical or not, and the kind of each."""
    eigenvalues = torch.stack([torch.linalg.eigvals(jacobian(field, row)) for row in u])
    size = eigenvalues.abs().amax(-1)
    kinds = tuple(kind_of(row) for row in eigenvalues)
    return Stability(eigenvalues, kinds, eigenvalues.imag.abs().amax(-1) > ROTATION * size)


def kind_of(eigenvalues: Complex[Tensor, " tangent"]) -> str:
    """Attractor, repeller or saddle by the signs of the real parts; degenerate where one without a sign decides."""
    least = SIGN * eigenvalues.abs().max()
    rising, falling = eigenvalues.real > least, eigenvalues.real < -least
    if rising.any() and falling.any():
        return "saddle"
    if not (rising | falling).all():
        return "degenerate"
    return "repeller" if rising.all() else "attractor"


def tangent_basis(u: Float[Tensor, " d_model"]) -> Float[Tensor, "d_model tangent"]:
    """Orthonormal columns at right angles to u: those of the reflection that takes the first axis to u, but one."""
    v = u.clone()
    v[0] += torch.where(u[0] >= 0, 1.0, -1.0).to(u)
    reflection = torch.eye(len(u), dtype=u.dtype, device=u.device) - 2 * torch.outer(v, v) / (v @ v)
    return reflection[:, 1:]


def _step(field: Field, u: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """One damped least-squares step of every direction, kept where it lowers ‖P_u F‖."""
    residual = _tangent(field(u), u)
    moved = _unit(u + _damped_step(field, u, residual, damping))
    better = _tangent(field(moved), moved).norm(dim=-1) < residual.norm(dim=-1)
    factor = torch.where(better, _DOWN, _UP).to(damping)
    return torch.where(better[:, None], moved, u), (damping * factor).clamp(_LEAST, _MOST)


def _damped_step(field: Field, u: Tensor, residual: Tensor, damping: Tensor) -> Tensor:
    """Tangent δ that minimises ‖Jδ + residual‖² + damping ‖δ‖² by conjugate gradients, for every direction at once."""
    rho = torch.linalg.vecdot(field(u), u)[:, None]
    _, pull_back = torch.func.vjp(field, u)

    def forward(w: Tensor) -> Tensor:
        return _tangent(derivative(field, u, w)[1], u) - rho * w

    def backward(w: Tensor) -> Tensor:
        return _tangent(pull_back(w)[0], u) - rho * w

    delta = torch.zeros_like(u)
    gap = -residual
    slope = backward(gap)
    direction, before = slope, slope.square().sum(-1, keepdim=True)
    for _ in range(CG_STEPS):
        image = forward(direction)
        curvature = image.square().sum(-1, keepdim=True) + damping[:, None] * direction.square().sum(-1, keepdim=True)
        length = before / curvature.clamp(min=torch.finfo(u.dtype).tiny)
        delta, gap = delta + length * direction, gap - length * image
        slope = backward(gap) - damping[:, None] * delta
        after = slope.square().sum(-1, keepdim=True)
        direction, before = slope + after / before.clamp(min=torch.finfo(u.dtype).tiny) * direction, after
    return delta


def _distinct(u: Tensor) -> list[int]:
    """Rows that are not near an earlier one."""
    kept: list[int] = []
    for row in range(len(u)):
        if not kept or float((u[kept] @ u[row]).max()) <= SAME:
            kept.append(row)
    return kept


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def _tangent(v: Tensor, u: Tensor) -> Tensor:
    return v - torch.linalg.vecdot(v, u)[:, None] * u
