"""The three laws of the aggregation-steering flow, and that its integrator keeps to the sphere."""

import numpy as np
import pytest
import torch

from rheoscope.errors import RheoscopeError
from rheoscope.theory.criticals import find_criticals
from rheoscope.theory.flow import Flow, diversity, diversity_bound, integrated, on_sphere, steered_equilibrium


def particles(n=12, d=4, seed=0):
    return on_sphere(np.random.default_rng(seed).standard_normal((n, d)))


def two_wells(axis, sharpness=4.0):
    """A field that drives particles to the nearer end of an axis."""
    return lambda u: np.tanh(sharpness * (u @ axis))[:, None] * axis


def test_velocities_are_exactly_tangent():
    u = particles()
    velocity = Flow(beta=3.0, steer=2.0, field=two_wells(u[0])).velocity(u)
    assert np.abs((velocity * u).sum(1)).max() < 1e-15


def test_the_integrator_keeps_to_the_sphere_and_its_error_follows_the_tolerance():
    flow, times = Flow(beta=2.0), np.array([0.0, 3.0])
    exact = integrated(flow, particles(), times, tolerance=1e-13)[-1]
    errors = [np.abs(integrated(flow, particles(), times, tolerance=t)[-1] - exact).max() for t in (1e-4, 1e-8)]
    assert np.abs(np.linalg.norm(exact, axis=1) - 1).max() < 1e-15
    assert errors[0] < 1e-3
    assert errors[1] < 1e-7 < 10 * errors[0]


@pytest.mark.parametrize("beta", [0.5, 2.0, 5.0])
def test_attention_alone_gathers_all_particles(beta):
    spread = diversity(integrated(Flow(beta=beta), particles(), np.linspace(0, 400, 9)))
    assert (np.diff(spread) < 1e-12).all()
    assert spread[0] > 0.5
    assert spread[-1] < 1e-6


def test_steering_keeps_diversity_above_the_bound():
    axis = np.eye(4)[0]
    start = particles(seed=1)
    path = integrated(Flow(beta=1.0, steer=3.0, field=two_wells(axis)), start, np.linspace(0, 40, 21))
    ahead = path[-1] @ axis > 0  # some change sides on the way
    share = ahead.mean()
    for u in path:
        angle = np.arccos(np.clip((u[ahead] @ u[~ahead].T).max(), -1, 1))
        assert diversity(u) >= diversity_bound(share, angle) - 1e-12
    settled = np.arccos(np.clip((path[-1][ahead] @ path[-1][~ahead].T).max(), -1, 1))
    assert diversity_bound(share, settled) > 0.3
    alone = integrated(Flow(beta=1.0), start, np.array([0.0, 400.0]))[-1]
    assert diversity(alone) < 1e-6


def test_the_bound_is_met_by_two_points():
    theta = 1.1
    u = np.array([[1.0, 0.0]] * 3 + [[np.cos(theta), np.sin(theta)]] * 5)
    assert diversity(u) == pytest.approx(diversity_bound(3 / 8, theta), abs=1e-15)


def test_a_steered_equilibrium_moves_as_first_order_theory_says_with_an_error_of_second_order():
    generator = np.random.default_rng(2)
    Q, _ = np.linalg.qr(generator.standard_normal((5, 5)))
    V = Q @ np.diag([3.0, 1.5, 1.0, -0.5, -2.0]) @ Q.T
    W, u0 = torch.tensor(generator.standard_normal((5, 5))), Q[:, 0]
    start, linear = torch.tensor(u0)[None], torch.tensor(V)

    def steering(u):
        return torch.tanh(u @ W)

    shift = steered_equilibrium(V, u0, steering(start)[0].numpy())
    strengths = np.geomspace(1e-3, 1e-1, 7)
    errors = []
    for a in strengths:
        found = find_criticals(lambda u, a=a: u @ linear + a * steering(u), start, aim=1e-13)
        errors.append(np.linalg.norm(found.u[0].numpy() - on_sphere(u0 + a * shift)))
    order = np.polyfit(np.log(strengths), np.log(errors), 1)[0]
    assert order == pytest.approx(2, abs=0.1)
    assert abs(shift @ u0) < 1e-12


def test_times_that_do_not_rise_are_refused():
    with pytest.raises(RheoscopeError, match="give two or more, rising"):
        integrated(Flow(), particles(), np.array([1.0, 0.5]))
