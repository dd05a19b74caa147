"""Margins and hulls against linear programs, known answers, and the proposition on sinks."""

import numpy as np
import pytest
from scipy.optimize import linprog

from rheoscope.theory import half_space
from rheoscope.theory.half_space import distance_to_others, half_space_margin, hull_distance, represents_a_sink


def bilinear_form_exists(queries, sink, others):
    """Whether max t over |M_ab| <= 1 with q M (sink - other) >= t is above 0, by a linear program over all of M."""
    rows = [-np.outer(q, sink - k).ravel() for q in queries for k in others]
    size = len(rows[0])
    system = np.column_stack([np.array(rows), np.ones(len(rows))])
    result = linprog(
        np.append(np.zeros(size), -1.0),
        A_ub=system,
        b_ub=np.zeros(len(rows)),
        bounds=[(-1, 1)] * size + [(0, 1)],
        method="highs",
    )
    assert result.status == 0
    return -result.fun > 1e-7


def instance(rng):
    """Random queries and keys, shifted and placed so that all four cases of the proposition occur."""
    d, n = rng.integers(2, 5), rng.integers(3, 9)
    shift = rng.choice([0.0, 0.5, 1.5])
    queries = rng.standard_normal((n, d)) + shift
    others = rng.standard_normal((n, d))
    sink = others.mean(0) + rng.choice([0.0, 0.6, 2.0]) * rng.standard_normal(d)
    return queries, sink, others


def test_half_space_and_hull_decide_whether_a_sink_can_be_represented_on_300_random_instances():
    rng = np.random.default_rng(0)
    answers = []
    for _ in range(300):
        queries, sink, others = instance(rng)
        expected = bilinear_form_exists(queries, sink, others)
        assert represents_a_sink(queries, sink, others) == expected
        answers.append(expected)
    assert 60 < sum(answers) < 240


def test_the_margin_is_that_of_a_conic_program():
    cvxpy = pytest.importorskip("cvxpy")
    rng = np.random.default_rng(1)
    for shift in (0.3, 1.0, 3.0):
        x = rng.standard_normal((23, 5)) + shift
        unit = x / np.linalg.norm(x, axis=1, keepdims=True)
        a, t = cvxpy.Variable(5), cvxpy.Variable()
        problem = cvxpy.Problem(cvxpy.Maximize(t), [unit @ a >= t, cvxpy.norm(a) <= 1])
        problem.solve(solver="CLARABEL")
        assert half_space_margin(x) == pytest.approx(max(t.value, 0), abs=1e-6)


def test_distances_of_simple_hulls_are_known():
    square = np.array([[1.0, -1], [1, 1], [3, -1], [3, 1]])
    found = hull_distance(square)
    assert found.distance == pytest.approx(1)
    np.testing.assert_allclose(found.direction, [1, 0], atol=1e-9)
    assert hull_distance(square - [2, 0]).distance == 0
    assert half_space_margin(np.eye(7)) == pytest.approx(7**-0.5)
    assert distance_to_others(np.array([0.0, 2]), np.array([[-1.0, 0], [1, 0]])) == pytest.approx(2)


def test_the_distance_scales_with_the_points():
    points = np.random.default_rng(2).standard_normal((11, 4)) + 2
    assert hull_distance(points * 1e9).distance == pytest.approx(1e9 * hull_distance(points).distance)


def test_a_solver_that_does_not_converge_gives_no_number(monkeypatch):
    def stuck(system, target, maxiter):
        raise RuntimeError("Maximum number of iterations reached.")

    points = np.random.default_rng(3).standard_normal((7, 3)) + 2
    monkeypatch.setattr(half_space, "nnls", stuck)
    assert np.isnan(hull_distance(points).distance)
    monkeypatch.setattr(half_space, "nnls", lambda system, target, maxiter: (np.eye(7)[0], 0.0))
    assert np.isnan(hull_distance(points).distance)  # a point that the bound from below contradicts


def test_points_that_are_missing_infinite_or_zero_have_no_margin():
    assert np.isnan(hull_distance(np.zeros((0, 3))).distance)
    assert np.isnan(hull_distance(np.array([[np.inf, 1]])).distance)
    assert hull_distance(np.zeros((2, 3))).distance == 0
    assert np.isnan(half_space_margin(np.array([[0.0, 0], [1, 0]])))


@pytest.mark.parametrize("shift", [3.0, 1.0, 0.3])
@pytest.mark.parametrize("n", [41, 800])
def test_of_many_points_the_nearest_is_found_without_solving_for_all(n, shift, monkeypatch):
    rng = np.random.default_rng(n)
    points = rng.standard_normal((n, 7)) + shift * rng.standard_normal(7)
    solved = []
    at_once = half_space._nearest_of
    monkeypatch.setattr(half_space, "_nearest_of", lambda some: solved.append(len(some)) or at_once(some))
    found = hull_distance(points)
    assert len(solved) >= 1
    assert max(solved) < n
    size = np.linalg.norm(points, axis=1).max()
    whole = float(np.linalg.norm(at_once(points / size)[0])) * size
    assert found.distance == pytest.approx(whole, abs=1e-6 * size)
    assert found.gap <= half_space.GAP
