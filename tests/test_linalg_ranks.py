"""Effective ranks and fixed-sign decompositions: known answers and laws."""

import math

import naive
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import subspace_angles

from rheoscope import linalg
from rheoscope.errors import RheoscopeError


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], (1, 1, 1, 1.0, 1.0)),
        ([1.0] * 10, (9, 10, 10, 10.0, 10.0)),
        ([1.0, 1.0, 0.0, 0.0], (2, 2, 2, 2.0, 2.0)),
        ([3.0, 1.0], (1, 2, 2, math.exp(-0.9 * math.log(0.9) - 0.1 * math.log(0.1)), 1 / 0.82)),
        ([0.0, 0.0], (math.nan,) * 5),
    ],
)
def test_effective_ranks_of_known_spectra(values, expected):
    ranks = torch.stack(linalg.effective_ranks(torch.tensor(values, dtype=torch.float64)))
    torch.testing.assert_close(ranks, torch.tensor(expected, dtype=torch.float64), equal_nan=True)


spectra = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=12).filter(lambda x: max(x) > 1e-6)


@given(spectra, st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_ranks_grow_with_the_share_and_match_counting_up(values, one, other):
    low, high = sorted((one, other))
    sigma = torch.tensor(values, dtype=torch.float64)
    ranks = [linalg.rank_at_share(sigma, share).item() for share in (low, high)]
    assert 1 <= ranks[0] <= ranks[1] <= len(values)
    assert ranks[1] == naive.rank_at_share(values, high)


@given(spectra, st.floats(-100, 100))
def test_effective_ranks_do_not_know_the_scale(values, exponent):
    sigma = torch.tensor(values, dtype=torch.float64)
    sigma = sigma.where(sigma > 1e-6 * sigma.max(), 0)
    once, scaled = (torch.stack(linalg.effective_ranks(x)) for x in (sigma, sigma * 2.0 ** round(exponent)))
    assert torch.equal(once, scaled)


@given(spectra)
def test_effective_ranks_lie_between_one_and_the_number_of_values(values):
    sigma = torch.tensor(values, dtype=torch.float64)
    participation, entropy = linalg.participation_ratio(sigma).item(), linalg.entropy_rank(sigma).item()
    assert 1 - 1e-12 <= participation <= entropy * (1 + 1e-12)
    assert entropy <= torch.count_nonzero(sigma).item() * (1 + 1e-12)


@pytest.mark.parametrize("share", [0.0, 1.01, -0.5])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(RheoscopeError, match="above 0, and at most at 1"):
        linalg.rank_at_share(torch.ones(3), share)


def test_svd_signs_are_fixed_and_the_matrix_comes_back():
    A = torch.randn(5, 13, 7, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    U, values, Vh = linalg.svd_fixed_signs(A)
    torch.testing.assert_close(U * values[..., None, :] @ Vh, A)
    assert (U.gather(-2, U.abs().argmax(-2, keepdim=True)) > 0).all()
    mirrored = linalg.svd_fixed_signs(A * torch.tensor(-1.0))[0]
    torch.testing.assert_close(mirrored, U)


def test_eigenvectors_come_in_descending_order_with_fixed_signs():
    A = naive.symmetric(torch.randn(3, 7, 7, generator=torch.Generator().manual_seed(7), dtype=torch.float64))
    values, V = linalg.eigh_fixed_signs(A)
    assert (values.diff() <= 0).all()
    torch.testing.assert_close(A @ V, V * values[..., None, :])
    assert (V.gather(-2, V.abs().argmax(-2, keepdim=True)) > 0).all()


def test_subspaces_compare_where_vectors_cannot():
    basis = torch.linalg.qr(torch.randn(17, 5, generator=torch.Generator().manual_seed(8), dtype=torch.float64))[0]
    turned = basis[:, :2] @ torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    assert linalg.principal_angles(basis[:, :2], turned).max() < 1e-14
    angles = linalg.principal_angles(basis[:, :2], basis[:, 1:3])
    torch.testing.assert_close(angles, torch.tensor([math.pi / 2, 0.0], dtype=torch.float64))
    A, B = basis[:, :3], basis[:, 1:] + 0.1
    np.testing.assert_allclose(linalg.principal_angles(A, B).numpy(), subspace_angles(A.numpy(), B.numpy()))
