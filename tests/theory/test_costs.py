"""Least norms of patterns: closed forms, slopes, copying, and what has no solution."""

import cvxpy
import numpy as np
import pytest

from rheoscope.errors import RheoscopeError
from rheoscope.theory import costs
from rheoscope.theory.costs import (
    NORMS,
    backcopy_pattern,
    closed_form,
    copy_pattern,
    diagonal_pattern,
    least_copying_norm,
    least_norm,
    sink_pattern,
    slope,
)

PATTERNS = {"sink": sink_pattern, "diagonal": diagonal_pattern}
SIZES = (8, 12, 16, 24, 32)


def nuclear(M):
    return np.linalg.svd(M, compute_uv=False).sum()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("n", [2, 5, 11])
def test_programs_have_the_closed_forms_over_orthonormal_tokens(pattern, norm, n):
    x = np.linalg.qr(np.random.default_rng(n).standard_normal((n, n)))[0]
    found = least_norm(PATTERNS[pattern](x), norm, margin=1.7)
    assert found.status == "optimal"
    assert found.value == pytest.approx(closed_form(pattern, norm, n, margin=1.7), rel=1e-3)
    for p in PATTERNS[pattern](x):
        assert p.query @ found.matrix @ (p.key - p.other) > 1.7 - 1e-3


def test_a_sink_takes_one_direction_and_a_diagonal_all_but_one():
    x = np.eye(9)
    for pattern, rank in ((sink_pattern, 1), (diagonal_pattern, 8)):
        values = np.linalg.svd(least_norm(pattern(x)).matrix, compute_uv=False)
        assert (values > 1e-2 * values[0]).sum() == rank


def test_the_nuclear_cost_of_a_diagonal_grows_faster_than_that_of_a_sink_by_half_a_power():
    slopes = {
        name: slope(SIZES, [least_norm(pattern(np.eye(n))).value for n in SIZES]) for name, pattern in PATTERNS.items()
    }
    assert slopes["diagonal"].value - slopes["sink"].value == pytest.approx(0.5, abs=0.05)
    for fit in slopes.values():
        assert fit.low < fit.value < fit.high


def test_the_least_factors_charge_twice_the_nuclear_norm():
    M = least_norm(diagonal_pattern(np.eye(5))).matrix
    U, S, V = np.linalg.svd(M)
    W_Q, W_K = U * np.sqrt(S), V.T * np.sqrt(S)
    np.testing.assert_allclose(W_Q @ W_K.T, M, atol=1e-12)
    assert (W_Q**2).sum() + (W_K**2).sum() == pytest.approx(2 * nuclear(M))
    generator = np.random.default_rng(0)
    for _ in range(20):
        change = np.eye(5) + 0.3 * generator.standard_normal((5, 5))
        other = (W_Q @ change, W_K @ np.linalg.inv(change).T)
        assert (other[0] ** 2).sum() + (other[1] ** 2).sum() >= 2 * nuclear(M) - 1e-9


@pytest.mark.parametrize("off", ["sink", "diagonal"])
def test_backcopy_looks_back_after_a_trigger_and_is_off_elsewhere(off):
    n = 6
    M = least_norm(backcopy_pattern(n, off)).matrix
    for trigger in range(n):
        x = np.hstack([np.eye(n), np.tile([1.0, 0], (n, 1))])
        if trigger:
            x[trigger, n:] = 0, 1
        scores = np.where(np.tril(np.ones((n, n))) > 0, x @ M @ x.T, -np.inf)
        expected = np.zeros(n) if off == "sink" else np.arange(n)
        if trigger:
            expected[trigger] = trigger - 1
        np.testing.assert_array_equal(scores.argmax(1), expected)


def test_backcopy_is_dearer_by_the_diagonal_than_by_the_sink():
    found = {off: [least_norm(backcopy_pattern(n, off)).value for n in (4, 8, 12)] for off in PATTERNS}
    assert all(np.greater(found["diagonal"], found["sink"]))
    assert slope((4, 8, 12), found["diagonal"]).value > slope((4, 8, 12), found["sink"]).value


def test_looking_back_costs_nearly_one_a_token():
    values = [least_norm(copy_pattern(n, offset=1)).value for n in (6, 12)]
    assert 0.85 < (values[1] - values[0]) / 6 < 1


@pytest.mark.parametrize(("norm", "power"), [("nuclear", 1.0), ("frobenius", 0.5)])
def test_copying_costs_the_gain_times_the_tokens_or_their_root(norm, power):
    n, gain = 6, 1.3
    x = np.eye(n + 1)
    sink = least_copying_norm(x[1:], gain * np.eye(n), x[:1], norm)
    assert sink.value == pytest.approx(gain * n**power, rel=1e-3)
    np.testing.assert_allclose(x[0] @ sink.matrix, 0, atol=1e-4)


def test_values_that_must_vanish_where_the_head_is_off_cost_more_than_values_that_are_harmless_there():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((9, 12)) + 0.8
    targets = rng.standard_normal((4, 12))
    sink = least_copying_norm(x[1:5], targets, x[:1])
    vanish = least_copying_norm(x[1:5], targets, x[5:])
    harmless = least_copying_norm(x[1:5], targets, x[:0])
    assert harmless.value < sink.value < vanish.value


def test_a_pattern_that_no_score_shows_has_no_cost_and_says_so():
    x = np.array([[1.0, 0], [0, 1], [0.5, 0.5]])
    found = least_norm(sink_pattern(x, sink=2))
    assert np.isnan(found.value)
    assert found.matrix is None
    assert "infeasible" in found.status
    copied_twice = least_copying_norm(np.ones((2, 3)), np.eye(2), np.zeros((0, 3)))
    assert np.isnan(copied_twice.value)


def test_a_solver_that_does_not_converge_gives_no_cost(monkeypatch):
    def stuck(self, **_):
        raise cvxpy.SolverError("no progress")

    monkeypatch.setattr(cvxpy.Problem, "solve", stuck)
    found = least_norm(sink_pattern(np.eye(3)))
    assert np.isnan(found.value)
    assert found.status == "did not converge: no progress"


def test_a_solver_that_stops_early_gives_no_cost(monkeypatch):
    monkeypatch.setattr(costs, "ITERATIONS", 1)
    found = least_norm(diagonal_pattern(np.eye(7)))
    assert np.isnan(found.value)
    assert found.status != "optimal"


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: least_norm(sink_pattern(np.eye(3)), "spectral"), "norm 'spectral' asked for"),
        (lambda: least_copying_norm(np.eye(2), np.eye(2), np.eye(2)[:0], "spectral"), "norm 'spectral'"),
        (lambda: least_norm([]), "without preferences"),
        (lambda: backcopy_pattern(4, "elsewhere"), "off state 'elsewhere'"),
        (lambda: closed_form("previous", "nuclear", 4), "closed form of 'previous'"),
        (lambda: slope([4], [1.0]), "at least two"),
    ],
)
def test_what_has_no_meaning_is_refused(ask, message):
    with pytest.raises(RheoscopeError, match=message):
        ask()


def test_two_sizes_give_a_slope_without_an_error():
    fit = slope([2, 8], [3.0, 6.0])
    assert fit.value == pytest.approx(0.5)
    assert np.isnan(fit.se)
