"""The formulas of one step on the sphere: known answers, laws, and what happens where they are not defined."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rheoscope.instruments.steering.steps import (
    angle,
    deficit,
    radial_share,
    spherical_diversity,
    step_readings,
    sums_over,
    tangential,
)

seeds = st.integers(0, 2**31)
lengths = st.floats(1e-3, 1e3)


def drawn(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def literal_deficit(part, x, after):
    """1 - cos(P_x part, P_x Δu), every projector a matrix."""
    u, turned = x / x.norm(), after / after.norm()
    P = torch.eye(len(x), dtype=x.dtype) - torch.outer(u, u)
    a, b = P @ part, P @ (turned - u)
    return 1 - a @ b / (a.norm() * b.norm())


@given(seeds, lengths, lengths)
def test_the_deficit_is_its_definition(seed, of_x, of_A):
    x, A, F = drawn(seed, 3, 7)
    x, A = of_x * x, of_A * A
    expected = literal_deficit(A, x, x + A + F)
    assert abs(deficit(A, A + F, x) - expected) < 1e-9


@given(seeds, lengths)
def test_the_full_field_has_no_deficit(seed, length):
    x, A, F = drawn(seed, 3, 5, 7)
    readings = step_readings(length * x[None], (A + F)[None], torch.zeros_like(F)[None], parallel=False)
    assert readings["angular_deficit"].max() <= 1e-12
    single = step_readings(*(v[None].float() for v in (length * x, A + F, 0 * F)), parallel=False)
    assert single["angular_deficit"].max() <= 1e-6


@given(seeds, lengths)
def test_readings_of_inner_products_are_those_of_the_vectors(seed, length):
    x, A, F = drawn(seed, 3, 2, 5, 7)
    x = length * x
    readings = step_readings(x, A, F, parallel=False)
    expected = {
        "angular_deficit": deficit(A, A + F, x),
        "ffn_deficit": deficit(F, A + F, x),
        "attention_radial_share": radial_share(A, x),
        "ffn_radial_share": radial_share(F, x + A),
        "turning": angle(x, x + A + F),
        "turning_attention": angle(x, x + A),
        "turning_ffn": angle(x + A, x + A + F),
        "ffn_norm": F.norm(dim=-1),
    }
    for name, values in expected.items():
        assert torch.allclose(readings[name], values, rtol=1e-6, atol=1e-8), name


def test_without_ffn_the_deficit_and_the_chord_are_those_of_the_pure_attention_step():
    x, A = drawn(1, 2, 1, 5, 7)
    readings = step_readings(x, A, torch.zeros_like(A), parallel=False)
    assert readings["angular_deficit"].max() < 1e-15
    for t in range(5):
        u, after = x[0, t] / x[0, t].norm(), (x + A)[0, t] / (x + A)[0, t].norm()
        P = torch.eye(7, dtype=torch.float64) - torch.outer(u, u)
        chord = 1 - (P @ A[0, t]) @ (after - u) / ((P @ A[0, t]).norm() * (after - u).norm())
        assert abs(readings["angular_deficit_chord"][0, t] - chord) < 1e-12
    assert readings["ffn_deficit"].isnan().all()
    assert readings["turning_attention"].equal(readings["turning"])


def test_attention_against_the_ffn_has_a_deficit_of_two():
    x, A = torch.tensor([1.0, 0, 0]), torch.tensor([0.0, 1, 0])
    assert deficit(A, A - 3 * A, x) == 2
    assert deficit(A, torch.tensor([0.0, 0, 1]), x) == 1


def test_the_null_is_the_deficit_when_ffn_and_attention_are_at_right_angles():
    x, A, F = (torch.tensor(v)[None, None] for v in ([2.0, 0, 0], [0.5, 3, 0], [-0.5, 0, 4]))
    readings = step_readings(x, A, F, parallel=False)
    assert readings["angular_deficit_null_orthogonal"].item() == pytest.approx(1 - 3 / 5, abs=1e-6)
    assert readings["angular_deficit"].item() == pytest.approx(1 - 3 / 5, abs=1e-6)


@given(seeds)
def test_tangential_and_radial_parts_add_up_and_are_at_right_angles(seed):
    v, x = drawn(seed, 2, 5, 7)
    tangent = tangential(v, x)
    assert torch.linalg.vecdot(tangent, x).abs().max() < 1e-12
    share = (v - tangent).square().sum(-1) / v.square().sum(-1)
    assert (radial_share(v, x) - share).abs().max() < 1e-12
    assert ((tangent.square().sum(-1) / v.square().sum(-1)) + share - 1).abs().max() < 1e-12


@given(seeds, st.integers(2, 9))
def test_diversity_is_one_less_the_mean_cosine(seed, n):
    x = drawn(seed, 1, n, 7)
    u = x[0] / x[0].norm(dim=-1, keepdim=True)
    cosines = (u @ u.mT)[~torch.eye(n, dtype=torch.bool)]
    expected = (n - 1) / n * (1 - cosines.mean())
    assert abs(spherical_diversity(x, torch.ones(1, n, dtype=torch.bool)) - expected) < 1e-10


def test_diversity_of_one_direction_is_zero_and_of_opposites_one():
    x = torch.tensor([[[1.0, 0], [3, 0], [-1, 0], [-7, 0]]])
    counted = torch.tensor([[True, True, False, False]])
    assert spherical_diversity(x, counted).item() == 0
    assert spherical_diversity(x, torch.ones(1, 4, dtype=torch.bool)).item() == 1
    assert spherical_diversity(x, torch.zeros(1, 4, dtype=torch.bool)).isnan()


@pytest.mark.parametrize("degrees", [1e-5, 1e-3, 30, 90, 179.999])
def test_angles_are_exact_small_and_large(degrees):
    turn = math.radians(degrees)
    u = torch.tensor([1.0, 0], dtype=torch.float64)
    v = 7 * torch.tensor([math.cos(turn), math.sin(turn)], dtype=torch.float64)
    assert angle(u, v).item() == pytest.approx(degrees, rel=1e-9)


def test_what_is_not_defined_is_nan_and_does_not_count():
    x, A = torch.ones(1, 3, 7), torch.zeros(1, 3, 7)
    A[0, 1, 0] = 2.0
    A[0, 2] = 3.0  # along x: no turn at all
    readings = step_readings(x, A, torch.zeros_like(A), parallel=False)
    assert readings["angular_deficit"].isnan().tolist() == [[True, False, True]]
    sums, counts = sums_over(readings["angular_deficit"], torch.ones(1, 3, dtype=torch.bool))
    assert (sums.tolist(), counts.tolist()) == ([0.0], [1.0])
