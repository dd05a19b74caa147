"""Sums over pairs at one distance equal the literal loops, on both sides of the diagonal."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rheoscope.instruments.routing.lags import lag_grid, pair_energies, signed_lag_sums
from tests import naive

EXACT = {"rtol": 1e-12, "atol": 1e-12}  # float64 sums of at most 13 terms


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("n", [1, 2, 7, 13])
def test_signed_sums_run_from_the_last_key_ahead_to_the_first_key_behind(n):
    A = random(2, 3, n, n)
    sums = signed_lag_sums(A, n=n)
    assert sums.shape == (2, 3, 2 * n - 1)
    for place, lag in enumerate(range(1 - n, n)):
        expected = sum((A[..., i, i - lag] for i in range(n) if 0 <= i - lag < n), torch.zeros(2, 3).double())
        torch.testing.assert_close(sums[..., place], expected, **EXACT)


@pytest.mark.parametrize("size", [1, 3, 5, 13])
def test_sums_of_blocks_of_rows_with_the_keys_they_see_add_up_to_those_of_the_map(size):
    A = random(2, 13, 13).tril()
    blocks = [A[:, i : i + size, : i + size] for i in range(0, 13, size)]
    sums = sum(signed_lag_sums(block, n=13, first=i * size) for i, block in enumerate(blocks))
    torch.testing.assert_close(sums, signed_lag_sums(A, n=13), **EXACT)


def test_a_map_with_all_its_mass_at_one_lag_peaks_there():
    ahead, behind = torch.zeros(2, 29, 29)
    behind[torch.arange(17, 29), torch.arange(12)] = 1
    ahead[torch.arange(12), torch.arange(17, 29)] = 1
    assert signed_lag_sums(behind, n=29).argmax() - 28 == 17
    assert signed_lag_sums(ahead, n=29).argmax() - 28 == -17


@pytest.mark.parametrize("n", [1, 2, 13])
def test_pair_energies_are_those_of_the_dense_diagonals(n):
    Q, K = random(2, 3, n, 5), random(2, 3, n, 5, seed=1)
    M = naive.scores(Q, K, 1.0)
    S = naive.skew(M)
    routing, score = pair_energies(Q, K, np.arange(n))
    for lag in range(n):
        pairs = [(i, j) for i in range(n) for j in range(n) if abs(i - j) == lag]
        torch.testing.assert_close(routing[..., lag], sum(S[..., i, j] ** 2 for i, j in pairs), **EXACT)
        torch.testing.assert_close(score[..., lag], sum(M[..., i, j] ** 2 for i, j in pairs), **EXACT)
    torch.testing.assert_close(routing.sum(-1), naive.energy(S), **EXACT)
    torch.testing.assert_close(score.sum(-1), naive.energy(M), **EXACT)


@settings(max_examples=50)
@given(window=st.integers(2, 5000))
def test_the_grid_has_every_short_lag_once_and_ends_at_the_longest(window):
    grid = lag_grid(window)
    assert grid[0] == 0
    assert grid[-1] == window - 1
    assert (np.diff(grid) > 0).all()
    assert set(range(min(window, 4))) <= set(grid.tolist())
    assert (grid[1:] <= 1.5 * grid[:-1] + 1).all()  # three to an octave, rounded


def test_scores_beyond_the_range_of_half_precision_are_read_all_the_same():
    Q, K = (300 * random(1, 1, 7, 5, seed=seed) for seed in (0, 1))  # products of 1e5; float16 ends at 65504
    halves = pair_energies(Q.half(), K.half(), np.arange(7))
    for half, exact in zip(halves, pair_energies(Q, K, np.arange(7)), strict=True):
        torch.testing.assert_close(half, exact, rtol=0.02, atol=0)  # of inputs known to 5e-4
