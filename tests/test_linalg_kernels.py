"""Kernels of the weights, static and by lag, against dense d_model x d_model matrices."""

import naive
import torch

from rheoscope import linalg


def weights(seed, heads=3):
    return torch.randn(heads, 37, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_spectrum(values, dense):
    """All singular values equal those of the dense matrix, which has no further nonzero ones."""
    expected = torch.linalg.svdvals(dense)
    values = torch.nn.functional.pad(values, (0, expected.shape[-1] - values.shape[-1]))
    assert ((values - expected).abs() < 1e-12 * expected[..., :1]).all()


def test_kernels_of_the_weights_equal_the_dense_ones():
    W_Q, W_K = weights(seed=0), weights(seed=1)
    T = linalg.kernel_factors(W_Q, W_K)
    W_QK = naive.kernel(W_Q, W_K)
    assert T.shape[-2:] == (12, 12)
    assert_spectrum(linalg.routing_singular_values(T), naive.skew(W_QK))
    assert_spectrum(linalg.score_singular_values(T), W_QK)
    expected = naive.energy(naive.skew(W_QK)) / naive.energy(W_QK)
    torch.testing.assert_close(linalg.routing_share(T), expected)


def test_kernels_by_lag_equal_the_rotated_dense_ones():
    W_Q, W_K = weights(seed=0), weights(seed=1)
    rotations = torch.stack([naive.rotation(lag, 6) for lag in (0, 1, 5, 31)])
    T = linalg.rotated_keys(linalg.kernel_factors(W_Q, W_K), rotations)
    assert T.shape == (3, 4, 12, 12)
    dense = W_Q[..., None, :, :] @ rotations @ W_K[..., None, :, :].mT
    torch.testing.assert_close(linalg.routing_share(T), naive.energy(naive.skew(dense)) / naive.energy(dense))
    assert_spectrum(linalg.routing_singular_values(T), naive.skew(dense))
    direct = linalg.kernel_factors(W_Q, W_K @ rotations[2].mT)
    torch.testing.assert_close(linalg.routing_share(T)[..., 2], linalg.routing_share(direct))


def test_tied_weights_route_only_at_a_lag():
    W_Q = weights(seed=2)
    rotations = torch.stack([naive.rotation(lag, 6) for lag in (0, 7)])
    share = linalg.routing_share(linalg.rotated_keys(linalg.kernel_factors(W_Q, W_Q), rotations))
    assert share[..., 0].max() < 1e-28
    assert share[..., 1].min() > 0.01


def test_key_heads_of_the_weights_are_repeated_for_their_groups():
    W_Q, W_K = weights(seed=3, heads=6), weights(seed=4, heads=2)
    W_QK = naive.kernel(W_Q, naive.repeated(W_K, 6))
    expected = naive.energy(naive.skew(W_QK)) / naive.energy(W_QK)
    torch.testing.assert_close(linalg.routing_share(linalg.kernel_factors(W_Q, W_K)), expected)
