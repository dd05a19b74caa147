"""Attention that ends in a softmax, against the formulas in naive.py: forward and gradient in float64."""

import math

import pytest
import torch

from rheoscope.nets.attention import (
    causal_mask,
    diagonal_bias,
    eager_attention,
    key_biased_attention,
    lagged_keys,
    sd_attention,
    skew_pair,
)
from rheoscope.nets.gates import VARIANCE_FLOOR, log_gate

from . import naive

BATCH, HEADS, LENGTH, D_HEAD = 2, 3, 11, 5
SCALE = 1 / math.sqrt(D_HEAD)


@pytest.fixture
def parts():
    return draw(0)


def draw(seed, *, length=LENGTH):
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape):
        return torch.randn(BATCH, HEADS, *shape, generator=generator, dtype=torch.float64).requires_grad_()

    return leaf(length, D_HEAD), leaf(length, D_HEAD), leaf(length, D_HEAD), leaf(length)


def gradients(output, leaves):
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)
    return torch.autograd.grad((output * weights).sum(), leaves, retain_graph=True)


def assert_same_with_gradient(ours, literal, leaves):
    """Values and gradients agree to 1e-12: both are float64 sums of some dozen terms of order 1."""
    torch.testing.assert_close(ours, literal, rtol=0, atol=1e-12)
    for got, wanted in zip(gradients(ours, leaves), gradients(literal, leaves), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


def sd(q, k, v, damping, mask=None):
    return sd_attention(q, k, v, damping, mask=mask, scale=SCALE)


def eager(q, k, v, mask=None, bias=None):
    return eager_attention(None, q, k, v, mask, scaling=SCALE, position_bias=bias)[0].transpose(1, 2)


def test_skew_scores_are_skew_with_an_exact_zero_diagonal(parts):
    a, b = skew_pair(*parts[:2])
    scores = a @ b.mT
    torch.testing.assert_close(scores, -scores.mT, rtol=0, atol=1e-14)
    q, k = parts[:2]
    torch.testing.assert_close(scores, q @ k.mT - k @ q.mT, rtol=0, atol=1e-13)


def test_fused_sd_attention_equals_the_formula(parts):
    q, k, v, raw = parts
    damping = raw.exp()
    assert_same_with_gradient(sd(q, k, v, damping), naive.stacked(naive.sd, q, k, v, damping), parts)


def test_damping_as_a_bias_on_the_scores_equals_the_formula(parts):
    q, k, v, raw = parts
    damping = raw.exp()
    a, b = skew_pair(q, k)
    ours = eager(a, b, v, bias=diagonal_bias(damping, LENGTH))
    assert_same_with_gradient(ours, naive.stacked(naive.sd, q, k, v, damping), parts)


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 300.0])
def test_fused_sd_attention_is_exact_in_float32_for_weak_and_strong_damping(size):
    q, k, v, raw = draw(1)
    strong = 6.0  # scores of some hundred: e^{-d} and e^{S} both far outside float32
    q, k = q * strong, k * strong
    damping = size * raw.exp()
    wanted = eager(*skew_pair(q, k), v, bias=diagonal_bias(damping, LENGTH))
    got = sd(*(x.float() for x in (q, k, v, damping)))
    # Scores of 600 rounded to float32 are off by 3e-5, and so are the weights made of them.
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=5e-4)


def test_without_damping_the_first_token_sees_itself_and_so_it_does_with_any(parts):
    q, k, v, raw = parts
    for size in (0.0, 1e4):
        torch.testing.assert_close(sd(q, k, v, size * raw.exp())[:, :, 0], v[:, :, 0])


def test_later_queries_against_cached_keys_give_the_last_rows(parts):
    q, k, v, raw = parts
    _, b = skew_pair(q, k)
    whole = sd(q, k, v, raw.exp())
    for n in (1, 4):
        last = [x[:, :, -n:] for x in (q, k, v, raw.exp())]
        got = sd_attention(*last, mask=None, scale=SCALE, past=(b[:, :, :-n], v[:, :, :-n]))
        torch.testing.assert_close(got, whole[:, :, -n:], rtol=0, atol=1e-13)


def test_padded_keys_are_invisible_and_padded_queries_finite(parts):
    q, k, v, raw = parts
    for start, stop in ((3, LENGTH), (0, 7)):
        valid = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.bool)
        valid[..., start:stop] = True
        mask = causal_mask(LENGTH, LENGTH, q.device) & valid
        inner = [x[:, :, start:stop] for x in parts]
        padded = sd(q, k, v, raw.exp(), mask=mask)
        alone = sd(*inner[:3], inner[3].exp())
        assert padded.isfinite().all()
        torch.testing.assert_close(padded[:, :, start:stop], alone, rtol=0, atol=1e-13)


@pytest.mark.parametrize("causal", [True, False])
def test_energy_gated_attention_equals_the_formula(parts, causal):
    q, k, v, energy = parts
    slope = torch.tensor([2.0, 0.5, -1.0], dtype=torch.float64, requires_grad=True)
    threshold = torch.tensor([0.0, 0.3, -0.2], dtype=torch.float64, requires_grad=True)
    bias = log_gate(energy, slope, threshold, causal=causal)
    fused = key_biased_attention(q, k, v, bias, mask=None, scale=SCALE)
    heads = [
        [naive.gates(energy[b, h], slope[h], threshold[h], causal=causal, floor=VARIANCE_FLOOR) for h in range(HEADS)]
        for b in range(BATCH)
    ]
    gate = torch.stack([torch.stack([torch.stack(head) for head in document]) for document in heads])
    literal = naive.stacked(naive.ega, q, k, v, gate)
    assert_same_with_gradient(fused, literal, [*parts, slope, threshold])
    as_bias = eager(q, k, v, bias=bias[:, :, None])
    torch.testing.assert_close(as_bias, literal, rtol=0, atol=1e-12)


def test_the_causal_gate_does_not_see_the_future_and_the_published_one_does():
    energy = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    other = energy.clone()
    other[..., 32:] += 1.0
    slope, threshold = torch.full((2,), 2.0, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    before, after = (log_gate(x, slope, threshold)[..., :32] for x in (energy, other))
    assert torch.equal(before, after)
    before, after = (log_gate(x, slope, threshold, causal=False)[..., :32] for x in (energy, other))
    assert (before - after).abs().min() > 1e-3


def test_padding_does_not_enter_the_gates_statistics():
    energy = torch.randn(1, 2, 20, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    valid = torch.ones(1, 20, dtype=torch.bool)
    valid[:, :3], valid[:, 17:] = False, False
    slope, threshold = torch.full((2,), 2.0, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for causal in (True, False):
        alone = log_gate(energy[..., 3:17], slope, threshold, causal=causal)
        padded = log_gate(energy, slope, threshold, valid=valid, causal=causal)
        torch.testing.assert_close(padded[..., 3:17], alone, rtol=0, atol=1e-13)
        assert padded.isfinite().all()


def test_lagged_keys_equal_the_formula(parts):
    q, k, v, _ = parts
    logits = torch.randn(HEADS, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    ours = eager(q, lagged_keys(k, logits.softmax(-1), None), v)
    literal = torch.stack(
        [
            torch.stack([naive.lag_conv(q[b, h], k[b, h], v[b, h], logits[h]) for h in range(HEADS)])
            for b in range(BATCH)
        ]
    )
    assert_same_with_gradient(ours, literal, [q, k, v, logits])


def test_padded_keys_leave_their_neighbours_lags(parts):
    weights = torch.full((HEADS, 5), 0.2, dtype=torch.float64)
    valid = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    valid[:, :4] = False
    padded = lagged_keys(parts[1], weights, valid)[:, :, 4:]
    torch.testing.assert_close(padded, lagged_keys(parts[1][:, :, 4:], weights, None))


def test_eager_softmax_equals_the_formula(parts):
    q, k, v, _ = parts
    assert_same_with_gradient(eager(q, k, v), naive.stacked(naive.softmax, q, k, v), [q, k, v])
