"""The closed form of oversmoothing against cosines that are averaged pair by pair."""

import numpy as np
import pytest
import torch

from rheoscope.theory.smoothing import MIXING, mean_cosine, mixed, predicted_cosine, smoothing_conditions


def exact_cosine(y):
    """Mean over all ordered pairs of different tokens, from the matrix of cosines."""
    unit = y / y.norm(dim=-1, keepdim=True)
    cosines = unit @ unit.T
    n = len(y)
    return float((cosines.sum() - cosines.diagonal().sum()) / (n * (n - 1)))


def synthetic(*, n=512, d=192, seed=0, scale=0.6):
    """Tokens about a common mean, and a value map. Lengths differ by a part of order 1/sqrt(d)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64) + 0.7
    W = scale * torch.randn(d, d, generator=generator, dtype=torch.float64) / d**0.5
    return x, W


def attention(n, a, *, causal=False):
    """A_a as a matrix."""
    even = torch.ones(n, n, dtype=torch.float64)
    even = even.tril() if causal else even
    return (1 - a) * torch.eye(n, dtype=torch.float64) + a * even / even.sum(1, keepdim=True)


@pytest.mark.parametrize("seed", range(5))
def test_the_closed_form_is_within_a_thousandth_of_the_exact_cosine_at_512_tokens(seed):
    x, W = synthetic(seed=seed)
    bias = 0.1 * torch.randn(192, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    predicted = predicted_cosine(x, x @ W, bias=bias)
    exact = [exact_cosine(x + bias + attention(512, a) @ x @ W) for a in MIXING]
    np.testing.assert_allclose(predicted, exact, atol=1e-3)


def test_the_closed_form_is_exact_for_tokens_of_equal_length():
    x, _ = synthetic(n=31)
    x = x / x.norm(dim=-1, keepdim=True)
    predicted = predicted_cosine(x, torch.zeros_like(x), mixing=(0.0,))
    assert float(predicted) == pytest.approx(exact_cosine(x), abs=1e-12)


@pytest.mark.parametrize(("n", "error"), [(512, 0.003), (32, 0.03)])
def test_causal_uniform_attention_comes_near_the_closed_form(n, error):
    worst = 0.0
    for seed in range(5):
        x, W = synthetic(n=n, seed=seed)
        predicted = predicted_cosine(x, x @ W)
        exact = [exact_cosine(x + attention(n, a, causal=True) @ x @ W) for a in MIXING]
        worst = max(worst, float(np.abs(predicted.numpy() - exact).max()))
    assert worst < error


def test_the_sign_of_the_first_condition_decides_whether_dense_smooths_more_than_sparse():
    signs = []
    for seed in range(40):
        x, W = synthetic(seed=seed, n=64, d=12)
        W = W - (seed % 2) * 0.9 * torch.eye(12, dtype=torch.float64)
        sparse, dense = predicted_cosine(x, x @ W, attended_mean=(x @ W).mean(0), mixing=(0.0, 1.0))
        conditions = smoothing_conditions(x, x @ W)
        C = (x - x.mean(0)).T @ (x - x.mean(0)) / len(x)
        literal = (2 * torch.trace(W.T @ C) + torch.trace(W.T @ C @ W)) / torch.trace(C)
        assert float(conditions.dense_gain) == pytest.approx(float(literal))
        assert (float(dense) > float(sparse)) == (float(conditions.dense_gain) > 0)
        signs.append(float(literal) > 0)
    assert 5 < sum(signs) < 35


def test_the_second_condition_decides_whether_a_uniform_step_smooths_relative_to_its_input():
    signs = []
    for seed in range(40):
        x, W = synthetic(seed=seed, n=64, d=12)
        W = W - (seed % 3) * 0.3 * torch.eye(12, dtype=torch.float64)
        before = predicted_cosine(x, torch.zeros_like(x), mixing=(0.0,))
        after = predicted_cosine(x, x @ W, mixing=(1.0,))
        gain = float(smoothing_conditions(x, x @ W).mean_gain)
        assert gain == pytest.approx(float((x.mean(0) @ (torch.eye(12) + W)).norm() / x.mean(0).norm()))
        assert (float(after) > float(before)) == (gain > 1)
        signs.append(gain > 1)
    assert 5 < sum(signs) < 35


@pytest.mark.parametrize("causal", [False, True])
def test_mixing_is_multiplication_by_the_matrix(causal):
    x, _ = synthetic(n=13, d=5)
    for a in MIXING:
        torch.testing.assert_close(mixed(x, a, causal=causal), attention(13, a, causal=causal) @ x)


def test_the_mean_cosine_counts_real_tokens_only():
    x, _ = synthetic(n=11, d=5)
    padded = torch.cat([x, torch.full((4, 5), 7.0)])[None]
    counted = (torch.arange(15) < 11)[None]
    assert float(mean_cosine(padded, counted)) == pytest.approx(exact_cosine(x), abs=1e-12)
    assert torch.isnan(mean_cosine(x[None, :1]))
