"""Spectra, shares and ranks of scores against dense N x N matrices, known answers and laws."""

import math

import naive
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rheoscope import linalg
from rheoscope.errors import RheoscopeError
from rheoscope.linalg.factors import triangular_factor

SCALE = 0.37
# Backward-stable algorithms of this size err by 1e-15 to 1e-14 of the largest singular value; five digits of room.
TOLERANCE = 1e-9


def heads(n, d_head, *, batch=(2, 3), seed=0, mean=1.5):
    """Queries and keys with a common direction, columns of very different length, and correlated with each other."""
    generator = torch.Generator().manual_seed(seed)
    Q, K = (torch.randn(*batch, n, d_head, generator=generator, dtype=torch.float64) for _ in range(2))
    lengths = torch.logspace(-2, 1, d_head, dtype=torch.float64)
    return (Q + mean) * lengths, (K + 0.3 * Q - mean) * lengths.flip(0)


def largest_error(values, dense):
    """Largest difference over all singular values, relative to the largest of each matrix; missing ones count as 0."""
    values = torch.nn.functional.pad(values, (0, dense.shape[-1] - values.shape[-1]))
    return ((values - dense).abs().amax(-1) / dense[..., 0]).max().item()


@pytest.mark.parametrize(("n", "d_head"), [(97, 7), (15, 7), (14, 7), (13, 7), (5, 7), (2, 3), (1, 3)])
def test_singular_values_equal_those_of_the_dense_matrices(n, d_head):
    Q, K = heads(n, d_head)
    T = linalg.score_factors(Q, K, scale=SCALE)
    M = naive.scores(Q, K, SCALE)
    assert T.shape[-2:] == (min(n, 2 * d_head + 1), 2 * d_head)
    assert largest_error(linalg.score_singular_values(T), torch.linalg.svdvals(M)) < TOLERANCE
    assert largest_error(linalg.filtering_singular_values(T), torch.linalg.svdvals(naive.symmetric(M))) < TOLERANCE
    if n > 1:
        assert largest_error(linalg.routing_singular_values(T), torch.linalg.svdvals(naive.skew(M))) < TOLERANCE


@pytest.mark.parametrize(("n", "d_head"), [(97, 7), (15, 7), (14, 7), (8, 7), (7, 7), (2, 3), (1, 3)])
def test_energy_spectra_are_the_squares_of_the_singular_values(n, d_head):
    T = linalg.score_factors(*heads(n, d_head), scale=SCALE)
    for factors in (T, linalg.centred_factors(T)) if n > 1 else (T,):
        routing, score = linalg.routing_energy_spectrum(factors), linalg.score_energy_spectrum(factors)
        unit = linalg.score_singular_values(T).square().max()
        torch.testing.assert_close(
            routing / unit, linalg.routing_singular_values(factors).square() / unit, rtol=0, atol=1e-14
        )
        torch.testing.assert_close(
            score / unit, linalg.score_singular_values(factors).square() / unit, rtol=0, atol=1e-14
        )
        assert torch.cat([routing, score], -1).min() >= 0


@pytest.mark.parametrize(("n", "d_head"), [(97, 7), (15, 7), (13, 7), (5, 7)])
def test_gauge_removed_spectra_equal_those_of_the_dense_matrix_less_its_gauge_part(n, d_head):
    Q, K = heads(n, d_head)
    T = linalg.score_factors(Q, K, scale=SCALE)
    S = naive.skew(naive.scores(Q, K, SCALE))
    rest = S - naive.gauge_part(S)
    values = linalg.routing_singular_values(linalg.centred_factors(T))
    assert largest_error(values, torch.linalg.svdvals(rest)) < TOLERANCE
    torch.testing.assert_close(linalg.gauge_share(T), 1 - naive.energy(rest) / naive.energy(S), rtol=1e-12, atol=1e-12)


def test_removing_the_gauge_is_centring_queries_and_keys():
    Q, K = heads(31, 5)
    H = torch.eye(31, dtype=torch.float64) - 1 / 31
    S = naive.skew(naive.scores(Q, K, SCALE))
    centred = naive.skew(naive.scores(Q - Q.mean(-2, keepdim=True), K - K.mean(-2, keepdim=True), SCALE))
    torch.testing.assert_close(S - naive.gauge_part(S), H @ S @ H)
    torch.testing.assert_close(H @ S @ H, centred)


def test_a_pure_key_bias_is_all_gauge_and_zero_mean_vectors_have_none():
    Q, K = heads(29, 5, mean=0.0)
    constant = torch.ones_like(Q)
    assert linalg.gauge_share(linalg.score_factors(constant, K, scale=1.0)).sub(1).abs().max() < 1e-14
    Q, K = (X - X.mean(-2, keepdim=True) for X in (Q, K))
    assert linalg.gauge_share(linalg.score_factors(Q, K, scale=1.0)).max() < 1e-25


@pytest.mark.parametrize("n", [97, 9])
def test_skew_singular_values_come_in_exactly_equal_pairs(n):
    values = linalg.routing_singular_values(linalg.score_factors(*heads(n, 7), scale=SCALE))
    planes = values.shape[-1] // 2
    assert torch.equal(values[..., 0 : 2 * planes : 2], values[..., 1 : 2 * planes : 2])
    assert (values[..., 2 * planes :] == 0).all()


def test_one_plane_has_rank_two_at_every_share():
    generator = torch.Generator().manual_seed(1)
    Q, K = (torch.randn(41, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    values = linalg.routing_singular_values(linalg.score_factors(Q, K, scale=1.0))
    ranks = linalg.effective_ranks(values)
    torch.testing.assert_close(torch.stack(ranks), torch.full((5,), 2.0, dtype=torch.float64))


def test_planted_singular_values_are_found():
    basis = torch.linalg.qr(torch.randn(53, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64))[0]
    planted = torch.tensor([5.0, 3.0, 1e-4], dtype=torch.float64)
    T = linalg.score_factors(2 * basis[:, :3] * planted, basis[:, 3:], scale=1.0)
    expected = planted.repeat_interleave(2)
    torch.testing.assert_close(linalg.routing_singular_values(T), expected, rtol=1e-11, atol=0)
    torch.testing.assert_close(linalg.filtering_singular_values(T), expected, rtol=1e-11, atol=0)
    torch.testing.assert_close(linalg.score_singular_values(T), 2 * planted, rtol=1e-11, atol=0)


def test_small_singular_values_survive_where_the_gram_matrix_is_too_ill_conditioned():
    generator = torch.Generator().manual_seed(9)
    Q, K = (torch.randn(83, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    Q[:, 1] = Q[:, 0] + 3e-8 * Q[:, 1]
    X = torch.cat([Q, K], -1)
    dense = torch.linalg.svdvals(naive.skew(naive.scores(Q, K, 1.0)))
    by_gram = torch.linalg.cholesky_ex(X.mT @ X)[0].mT
    ours = linalg.score_factors(Q, K, scale=1.0)
    assert largest_error(linalg.routing_singular_values(ours), dense) < 1e-14
    assert largest_error(linalg.routing_singular_values(by_gram), dense) > 1e-10


def test_the_triangular_factor_is_chosen_item_by_item():
    Q, K = heads(61, 5, batch=(4,))
    X = torch.cat([Q, K], -1)
    X[1, :, 5:] = X[1, :, :5]
    X[2] = 0
    R = triangular_factor(X)
    torch.testing.assert_close(R.mT @ R, X.mT @ X)
    for item in range(4):
        torch.testing.assert_close(R[item].abs(), triangular_factor(X[item]).abs(), rtol=1e-12, atol=1e-10)


def test_tied_queries_and_keys_do_not_route():
    Q, _ = heads(67, 7)
    T = linalg.score_factors(Q, Q, scale=SCALE)
    energies = linalg.score_energies(Q, Q, scale=SCALE)
    assert linalg.routing_share(T).max() < 1e-28
    assert (energies.routing / energies.score).max() < 1e-12
    assert linalg.routing_singular_values(T).max() < 1e-14 * linalg.score_singular_values(T).max()


def test_the_share_of_a_factor_resolves_what_traces_cannot():
    Q, K = heads(67, 7)
    K = Q + 1e-9 * K
    S = 0.5 * 1e-9 * (Q @ heads(67, 7)[1].mT - heads(67, 7)[1] @ Q.mT)
    expected = naive.energy(S) / naive.energy(naive.scores(Q, K, 1.0))
    share = linalg.routing_share(linalg.score_factors(Q, K, scale=1.0))
    torch.testing.assert_close(share, expected, rtol=1e-3, atol=0)
    energies = linalg.score_energies(Q, K, scale=1.0)
    assert ((energies.routing / energies.score - expected).abs() > expected).any()


@pytest.mark.parametrize(("n", "d_head"), [(97, 7), (5, 7), (1, 3)])
def test_energies_from_traces_equal_the_literal_sums(n, d_head):
    Q, K = heads(n, d_head)
    M = naive.scores(Q, K, SCALE)
    S, F = naive.skew(M), naive.symmetric(M)
    expected = {
        "score": naive.energy(M),
        "routing": naive.energy(S),
        "filtering": naive.energy(F),
        "diagonal": (M.diagonal(dim1=-2, dim2=-1) ** 2).sum(-1),
        "gauge": naive.energy(naive.gauge_part(S)),
    }
    energies = linalg.score_energies(Q, K, scale=SCALE)._asdict()
    assert energies.keys() == expected.keys()
    for name, literal in expected.items():
        unit = float(naive.energy(M).max())
        torch.testing.assert_close(energies[name], literal, rtol=1e-11, atol=1e-13 * unit)


def test_float32_products_err_far_less_than_documents_differ():
    Q, K = heads(211, 16, mean=0.5)
    exact = linalg.score_energies(Q, K, scale=SCALE)
    rounded = linalg.score_energies(Q.float(), K.float(), scale=SCALE)
    for ours, reference in zip(rounded, exact, strict=True):
        assert ours.dtype == torch.float64
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=0)
    torch.testing.assert_close(rounded.score, exact.score, rtol=2e-6, atol=0)


def test_half_precision_is_raised_before_it_can_overflow():
    Q = torch.full((1, 2, 64, 4), 300.0, dtype=torch.float16)
    energies = linalg.score_energies(Q, Q, scale=1.0)
    torch.testing.assert_close(energies.score, torch.full((1, 2), (64 * 4 * 300.0**2) ** 2, dtype=torch.float64))


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_key_heads_are_repeated_for_their_groups(kv_heads):
    Q, _ = heads(43, 5, batch=(2, 6))
    _, K = heads(43, 5, batch=(2, kv_heads), seed=3)
    full = naive.repeated(K, 6)
    torch.testing.assert_close(
        linalg.routing_singular_values(linalg.score_factors(Q, K, scale=SCALE)),
        linalg.routing_singular_values(linalg.score_factors(Q, full, scale=SCALE)),
    )
    M = naive.scores(Q, full, SCALE)
    energies = linalg.score_energies(Q, K, scale=SCALE)
    torch.testing.assert_close(energies.routing, naive.energy(naive.skew(M)))
    torch.testing.assert_close(energies.gauge, naive.energy(naive.gauge_part(naive.skew(M))))
    torch.testing.assert_close(energies.diagonal, (M.diagonal(dim1=-2, dim2=-1) ** 2).sum(-1))


def test_tiling_the_key_heads_would_be_seen():
    Q, _ = heads(43, 5, batch=(1, 6))
    _, K = heads(43, 5, batch=(1, 2), seed=3)
    tiled = linalg.score_energies(Q, K.repeat(1, 3, 1, 1), scale=SCALE)
    assert not torch.allclose(tiled.routing, linalg.score_energies(Q, K, scale=SCALE).routing, rtol=1e-2)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side):
    Q, K = heads(23, 4)
    pad = (0, 0, 6, 0) if side == "left" else (0, 0, 0, 6)
    valid = torch.nn.functional.pad(torch.ones(2, 1, 23, dtype=torch.bool), pad[2:])
    Q_padded, K_padded = (torch.nn.functional.pad(X, pad, value=math.nan) for X in (Q, K))
    alone = linalg.score_energies(Q, K, scale=SCALE)
    for ours, expected in zip(linalg.score_energies(Q_padded, K_padded, scale=SCALE, valid=valid), alone, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=0)
    T = linalg.score_factors(Q, K, scale=SCALE)
    T_padded = linalg.score_factors(Q_padded, K_padded, scale=SCALE, valid=valid)
    for values in (linalg.routing_singular_values, linalg.score_singular_values, linalg.gauge_share):
        torch.testing.assert_close(values(T_padded), values(T), rtol=1e-9, atol=1e-12)


def test_a_window_without_valid_positions_has_no_ranks():
    Q, K = heads(23, 4)
    T = linalg.score_factors(Q, K, scale=SCALE, valid=torch.zeros(2, 1, 23, dtype=torch.bool))
    assert torch.stack(linalg.effective_ranks(linalg.routing_singular_values(T))).isnan().all()
    assert linalg.routing_share(T).isnan().all()


def test_eigenvalues_are_the_nonzero_ones_of_the_scores():
    Q, K = heads(61, 5, batch=(3,))
    ours = linalg.score_eigenvalues(linalg.score_factors(Q, K, scale=SCALE))
    dense = torch.linalg.eigvals(naive.scores(Q, K, SCALE))
    for few, many in zip(ours, dense, strict=True):
        kept = many[many.abs().argsort(descending=True)][:5]
        distance = (few[:, None] - kept[None, :]).abs()
        assert distance.amin(0).max() < 1e-9 * kept.abs().max()
        assert distance.amin(1).max() < 1e-9 * kept.abs().max()


def test_stability_counts_nonzero_eigenvalues_only():
    eigenvalues = torch.tensor([[-2 + 1j, -2 - 1j, 1e-14, 0.5], [0, 0, 0, 0], [-1, -1, -1, -1]], dtype=torch.complex128)
    max_re, share = linalg.stability(eigenvalues)
    torch.testing.assert_close(max_re, torch.tensor([0.5, math.nan, -1.0], dtype=torch.float64), equal_nan=True)
    torch.testing.assert_close(share, torch.tensor([1 / 3, math.nan, 0.0], dtype=torch.float64), equal_nan=True)


def test_a_negative_tie_is_stable_and_a_positive_one_is_not():
    Q, _ = heads(61, 5)
    for sign in (-1, 1):
        eigenvalues = linalg.score_eigenvalues(linalg.score_factors(Q, sign * Q, scale=SCALE))
        assert (linalg.stability(eigenvalues).share_positive == (sign > 0)).all()


def test_independent_gaussians_route_half_of_their_energy():
    Q, K = (torch.randn(8, 400, 32, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in (4, 5))
    share = linalg.routing_share(linalg.score_factors(Q, K, scale=1.0))
    # tr(M²)/‖M‖² has mean 1/N and deviation of order sqrt(2)/(sqrt(d_head) N)... below 0.01 for the mean of eight.
    assert (share.mean() - 0.5).abs() < 0.01


def test_reruns_are_bit_equal():
    Q, K = heads(97, 7)
    first, second = (linalg.routing_singular_values(linalg.score_factors(Q, K, scale=SCALE)) for _ in range(2))
    assert torch.equal(first, second)


def test_values_that_are_not_finite_are_refused():
    Q, K = heads(23, 4)
    K[0, 0, 3, 1] = math.inf
    with pytest.raises(RheoscopeError, match="float16"):
        linalg.score_factors(Q, K, scale=SCALE)


@pytest.mark.parametrize("shape", [(2, 2, 23, 4), (2, 6, 23, 4), (1, 3, 23, 4), (3, 23, 4)])
def test_queries_and_keys_that_do_not_fit_are_refused(shape):
    Q, _ = heads(23, 4)
    with pytest.raises(RheoscopeError, match="divides the query heads"):
        linalg.score_energies(Q, torch.zeros(shape, dtype=torch.float64), scale=SCALE)


@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_routing_and_filtering_share_the_energy(n, d_head, seed):
    Q, K = heads(n, d_head, batch=(), seed=seed)
    T = linalg.score_factors(Q, K, scale=SCALE)
    skew, symmetric, score = (
        values(T).square().sum(-1)
        for values in (linalg.routing_singular_values, linalg.filtering_singular_values, linalg.score_singular_values)
    )
    torch.testing.assert_close(skew + symmetric, score, rtol=1e-12, atol=0)
    torch.testing.assert_close(skew / score, linalg.routing_share(T), rtol=1e-9, atol=1e-15)
