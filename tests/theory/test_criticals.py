"""Critical directions that are known: all of them are found, each is of the right kind, and chance is told apart."""

from itertools import product

import numpy as np
import pytest
import torch

from rheoscope.theory.criticals import (
    find_criticals,
    jacobian,
    kind_of,
    stability,
    tangent_basis,
    zero_score,
)

SEEDS = range(3)


def random_rows(n, d, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def symmetric(eigenvalues, seed=0):
    Q, _ = torch.linalg.qr(random_rows(len(eigenvalues), len(eigenvalues), seed))
    return Q @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ Q.mT, Q


@pytest.mark.parametrize("seed", SEEDS)
def test_a_linear_field_has_its_eigenvectors_both_ways_and_nothing_else(seed):
    M, Q = symmetric([4.0, 2.5, 1.0, -1.5, -3.0], seed)
    found = find_criticals(lambda u: u @ M, random_rows(120, 5, seed + 10), aim=1e-9)
    cosines = found.u @ torch.cat([Q, -Q], 1)
    assert len(found.u) == 10
    assert sorted(cosines.argmax(1).tolist()) == list(range(10))
    assert (1 - cosines.amax(1)).max() < 1e-12
    kinds = stability(lambda u: u @ M, found.u).kinds
    for kind, column in zip(kinds, cosines.argmax(1) % 5, strict=True):
        assert kind == {0: "attractor", 4: "repeller"}.get(int(column), "saddle")


def test_the_spectrum_of_a_linear_field_is_the_gaps_to_its_eigenvalue():
    eigenvalues = [4.0, 2.5, 1.0, -1.5, -3.0]
    M, Q = symmetric(eigenvalues)
    spectrum = stability(lambda u: u @ M, Q[:, 1][None]).eigenvalues[0]
    assert torch.allclose(spectrum.real.sort().values, torch.tensor([-5.5, -4.0, -1.5, 1.5], dtype=torch.float64))
    assert spectrum.imag.abs().max() < 1e-12


def test_a_quadratic_field_has_all_its_critical_directions_found_and_classified():
    """F(u) = u∘u: ±1_S/√|S| for every set S of axes; eigenvalues 1/√s on S and -1/√s off it, times the sign."""
    expected = {}
    for members in product([0.0, 1.0], repeat=4):
        size = int(sum(members))
        for sign in (1, -1) if size else ():
            kind = "attractor" if size == 1 else "repeller" if size == 4 else "saddle"
            flipped = {"attractor": "repeller", "repeller": "attractor"}.get(kind, kind)
            expected[tuple(sign * m / np.sqrt(size) for m in members)] = kind if sign == 1 else flipped
    found = find_criticals(torch.square, random_rows(600, 4), aim=1e-9)
    assert len(found.u) == len(expected) == 30
    points = torch.tensor(list(expected), dtype=torch.float64)
    nearest = (found.u @ points.mT).max(1)
    assert (1 - nearest.values).max() < 1e-9
    for kind, place in zip(stability(torch.square, found.u).kinds, nearest.indices, strict=True):
        assert kind == list(expected.values())[place]


def test_following_the_flow_would_have_missed_the_saddles():
    M, Q = symmetric([4.0, 2.5, 1.0, -1.5, -3.0])
    near = Q[:, 2][None] + 0.02 * random_rows(1, 5)
    assert (find_criticals(lambda u: u @ M, near).u @ Q[:, 2]).abs() > 0.999
    u = near
    for _ in range(400):
        u = u + 0.1 * u @ M
        u = u / u.norm()
    assert (u @ Q[:, 0]).abs() > 0.999


def test_rotation_is_told_from_its_absence():
    M = torch.block_diag(torch.tensor([[3.0]]), torch.tensor([[1.0, 2.0], [-2.0, 1.0]])).double()
    e = torch.tensor([[1.0, 0, 0]], dtype=torch.float64)
    turning = stability(lambda u: u @ M, e)
    assert turning.rotational.tolist() == [True]
    assert turning.kinds == ("attractor",)
    assert stability(lambda u: u @ torch.diag(torch.tensor([3.0, 2, 1]).double()), e).rotational.tolist() == [False]


@pytest.mark.parametrize(
    ("real", "kind"),
    [
        ([-1, -2], "attractor"),
        ([1, 2], "repeller"),
        ([1, -2], "saddle"),
        ([0, -2], "degenerate"),
        ([0, 1e-9], "degenerate"),
        ([1e-6, 3, -3], "saddle"),
    ],
)
def test_kinds_go_by_the_signs_that_are_beyond_rounding(real, kind):
    assert kind_of(torch.tensor(real, dtype=torch.complex128)) == kind


def test_mixed_signs_are_what_chance_gives_in_many_dimensions():
    M = random_rows(40, 40)
    assert set(stability(lambda u: u @ M, random_rows(10, 40) / 6).kinds) == {"saddle"}


def test_the_jacobian_is_the_derivative_of_the_flow():
    u = random_rows(1, 5)[0]
    u, M = u / u.norm(), random_rows(5, 5, 3)

    def field(v):
        return torch.tanh(v @ M) + v.square()

    E, step = tangent_basis(u), 1e-6
    assert torch.allclose(E.mT @ E, torch.eye(4, dtype=torch.float64), atol=1e-14)
    assert (E.mT @ u).abs().max() < 1e-15

    def flow(v):
        v = v / v.norm()
        F = field(v[None])[0]
        return F - (F @ v) * v

    columns = [(flow(u + step * E[:, k]) - flow(u - step * E[:, k])) / (2 * step) for k in range(4)]
    assert torch.allclose(jacobian(field, u), E.mT @ torch.stack(columns, 1), atol=1e-8)


def test_the_score_is_zero_where_the_field_is_radial_and_one_where_it_is_tangential():
    u = torch.tensor([[1.0, 0.0]])
    assert zero_score(torch.tensor([[-3.0, 0.0]]), u).item() == 0
    assert zero_score(torch.tensor([[0.0, 2.0]]), u).item() == pytest.approx(1)
    assert zero_score(torch.tensor([[0.0, 0.0]]), u).item() == 0


def test_a_field_without_critical_directions_gives_none():
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    found = find_criticals(lambda u: u @ turn, random_rows(7, 2))
    assert (len(found.u), found.n_converged, found.n_starts) == (0, 0, 7)
