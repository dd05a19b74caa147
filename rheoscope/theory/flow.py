"""The aggregation-steering flow: particles on the sphere that attract one another and are steered by a field.

du_i/dt = P_i [ κ Σ_j softmax_j(β u_i·u_j) u_j + a Φ(u_i) ]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64
from scipy.integrate import solve_ivp

from rheoscope.errors import RheoscopeError

Particles = Float64[np.ndarray, "particle d"]
Steering = Callable[[Particles], Particles]


@dataclass(frozen=True)
class Flow:
    """What moves the particles: attention of sharpness `beta` and strength `gain`, and a field of strength `steer`."""

    beta: float = 1.0
    gain: float = 1.0
    steer: float = 0.0
    field: Steering | None = None

    def velocity(self, u: Particles) -> Particles:
        """du/dt of particles on the sphere: exactly tangent."""
        weights = np.exp(self.beta * (u @ u.T - 1))
        pull = self.gain * (weights / weights.sum(1, keepdims=True)) @ u
        if self.field is not None and self.steer:
            pull = pull + self.steer * self.field(u)
        return pull - (pull * u).sum(1, keepdims=True) * u


def integrated(
    flow: Flow, start: Particles, times: Float64[np.ndarray, " time"], *, tolerance: float = 1e-9
) -> Float64[np.ndarray, "time particle d"]:
    """The particles at the given times, on the sphere, by an eighth-order Runge-Kutta method.

    The velocity is that of the nearest point of the sphere, so length drifts by integration errors only, and what is
    left of the drift is taken out at the end.
    """
    times = np.asarray(times, np.float64)
    if len(times) < 2 or (np.diff(times) <= 0).any():
        raise RheoscopeError(f"a flow at the times {times.tolist()} asked for: give two or more, rising")
    start = on_sphere(start)

    def velocity(_: float, flat: np.ndarray) -> np.ndarray:
        return flow.velocity(on_sphere(flat.reshape(start.shape))).ravel()

    solved = solve_ivp(
        velocity, times[[0, -1]], start.ravel(), method="DOP853", t_eval=times, rtol=tolerance, atol=tolerance
    )
    if not solved.success:
        raise RheoscopeError(f"the flow cannot be followed to time {times[-1]:g} ({solved.message}): take a milder one")
    return on_sphere(solved.y.T.reshape(len(times), *start.shape))


def on_sphere(x: Float64[np.ndarray, "*shape d"]) -> Float64[np.ndarray, "*shape d"]:
    """x / ‖x‖ along the last axis."""
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def diversity(u: Float64[np.ndarray, "*shape particle d"]) -> Float64[np.ndarray, "*shape"]:
    """D = 1 - ‖mean u‖²: 0 where all particles have met."""
    return 1 - (u.mean(-2) ** 2).sum(-1)


def diversity_bound(share: float, angle: float) -> float:
    """Least diversity when a share of the particles stays `angle` (radians) or more away from all others.

    2p(1 - p)(1 - cos θ): half the mean square distance of two particles, of which only the pairs across count.
    """
    return 2 * share * (1 - share) * (1 - np.cos(angle))


def steered_equilibrium(
    V: Float64[np.ndarray, "d d"], u: Float64[np.ndarray, " d"], push: Float64[np.ndarray, " d"]
) -> Float64[np.ndarray, " d"]:
    """First-order change of an equilibrium per unit of steering: -J⁻¹ P Φ(u), J = P(V - ρ)P on the tangent space.

    u: unit eigenvector of V (columns: V u = ρ u), the equilibrium without steering; push: Φ(u).
    """
    P = np.eye(len(u)) - np.outer(u, u)
    J = P @ (V - (u @ V @ u) * np.eye(len(u))) @ P
    return -np.linalg.pinv(J, rcond=1e-10) @ P @ push
