"""Readings of a spectrum equal dense ones, and the Gaussian null what a simulation of dense matrices gives."""

from functools import cache

import numpy as np
import pytest
import torch

from rheoscope.instruments.routing.spectra import gaussian_readings, head_spectra
from rheoscope.linalg import score_energies
from tests import naive

from . import plain

N, D_HEAD, DRAWS = 29, 5, 200


def gaussian(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def n_threads(request):
    """This many threads, and afterwards as many as before: the order of float sums in other tests depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("n_threads", [1, 3], indirect=True)
@pytest.mark.parametrize("n", [3, 7, 29])  # fewer positions than d_head, than 2 d_head, and more
def test_heads_read_in_any_number_of_threads_equal_dense_spectra(n, n_threads):
    Q, K = gaussian(2, 4, n, D_HEAD, seed=0), gaussian(2, 2, n, D_HEAD, seed=1)
    readings, eigenvalues = head_spectra(Q, K, scale=0.3, valid=torch.ones(2, n, dtype=torch.bool))
    repeated = naive.repeated(K, 4)
    for batch in range(2):
        call = plain.Call(Q[batch], repeated[batch], 0.3, torch.zeros(0))
        expected, dense = plain.spectra_of(call)
        for name, value in expected.items():
            torch.testing.assert_close(readings[name][batch], value, rtol=1e-9, atol=1e-11, msg=name)
        largest = eigenvalues[batch].abs().amax(-1)
        torch.testing.assert_close(largest, dense.abs().amax(-1), rtol=1e-9, atol=0)
    assert torch.get_num_threads() == n_threads


def test_a_head_without_any_score_has_no_ranks_and_no_stability():
    Q, K = gaussian(1, 2, 29, D_HEAD, seed=0), gaussian(1, 2, 29, D_HEAD, seed=1)
    Q[:, 1] = 0
    readings, _ = head_spectra(Q, K, scale=1.0, valid=torch.ones(1, 29, dtype=torch.bool))
    for name in readings.keys() - {"growth_scale"}:
        assert readings[name][0, 0].isfinite(), name
        assert readings[name][0, 1].isnan(), name


@pytest.mark.parametrize("part", ["routing", "filtering"])
def test_a_part_that_is_only_rounding_has_no_rank(part):
    Q = gaussian(2, 3, 29, 2 * D_HEAD, seed=0)
    K = Q.clone()
    if part == "filtering":  # [q k] and [k -q]: M is skew, whatever q and k
        K = torch.cat([Q[..., D_HEAD:], -Q[..., :D_HEAD]], -1)
    readings, _ = head_spectra(Q, K, scale=0.3, valid=torch.ones(2, 29, dtype=torch.bool))
    for name, value in readings.items():
        void = name.startswith(part) or (part == "routing" and name == "utilisation")
        assert value.isnan().all() if void else value.isfinite().all(), name


def test_routing_that_is_only_a_key_bias_has_no_rank_once_that_is_removed():
    bias, one = gaussian(1, 1, 29, 1, seed=2), torch.ones(1, 1, 29, 1, dtype=torch.float64)
    readings, _ = head_spectra(one, bias, scale=1.0, valid=torch.ones(1, 29, dtype=torch.bool))  # M_ij = b_j
    assert float(readings["routing_k99"]) == 2
    assert readings["routing_k99_gauge_removed"].isnan()


@cache
def simulated():
    """Readings of heads of independent standard normal queries and keys, from dense N x N scores: [draw]."""
    Q, K = gaussian(2, DRAWS, N, D_HEAD, seed=11)
    call = plain.Call(Q, K, D_HEAD**-0.5, torch.zeros(0))
    readings = plain.spectra_of(call)[0]
    shares = {name: numerator / whole for name, (numerator, whole) in plain.sums_of(call).items()}
    readings["stability_max_re"] /= (D_HEAD**-0.5 * K.mT @ Q).square().sum((-2, -1)).sqrt()
    return readings | shares


def test_the_gaussian_null_is_what_dense_random_heads_give():
    null = gaussian_readings(N, D_HEAD, seed=0)
    assert null.keys() == simulated().keys()
    for name, values in simulated().items():
        mean, error = null[name]
        spread = float(values.std() / DRAWS**0.5)
        # two independent samples; four standard errors of their difference, 26 comparisons
        assert abs(mean - float(values.mean())) <= 4 * np.hypot(error, spread), name
        # the error of 32 draws is itself known to an eighth
        assert error * 32**0.5 == pytest.approx(float(values.std()), rel=0.5), name


def test_unrelated_queries_and_keys_route_half_less_the_diagonal():
    Q, K = gaussian(2, 4000, N, D_HEAD, seed=5)
    energies = score_energies(Q, K, scale=1.0)
    share = energies.routing.sum() / energies.score.sum()
    # E S_ij² is half of E M_ij² off the diagonal and 0 on it; 4000 draws of a share that spreads by 0.03
    assert float(share) == pytest.approx(0.5 * (1 - 1 / N), abs=4 * 0.03 / 4000**0.5)


def test_the_null_is_the_same_for_the_same_seed_and_another_for_another():
    assert gaussian_readings(N, D_HEAD, seed=3) == gaussian_readings(N, D_HEAD, seed=3)
    assert gaussian_readings(N, D_HEAD, seed=3) != gaussian_readings(N, D_HEAD, seed=4)
