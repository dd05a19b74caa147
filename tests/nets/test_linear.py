"""Linear attention against the formulas in naive.py, and the laws of its state."""

import math

import pytest
import torch

from rheoscope.nets.attention import skew_pair
from rheoscope.nets.linear import causal_sums, elu_attention, elu_feature, sd_linear_attention

from . import naive
from .test_attention import D_HEAD, HEADS, LENGTH, SCALE, assert_same_with_gradient, draw


def sd_linear(q, k, v, damping, **options):
    return sd_linear_attention(*skew_pair(q, k), v, damping, scale=SCALE, **options)


def test_elu_attention_equals_the_formula():
    q, k, v, _ = draw(0)
    assert_same_with_gradient(elu_attention(q, k, v)[0], naive.stacked(naive.elu, q, k, v), [q, k, v])


def test_elu_attention_on_skew_pairs_equals_the_formula():
    q, k, v, _ = draw(1)
    assert_same_with_gradient(elu_attention(*skew_pair(q, k), v)[0], naive.stacked(naive.sd_elu, q, k, v), [q, k, v])


def test_sd_linear_attention_equals_the_formula():
    parts = q, k, v, raw = draw(2)
    ours, _ = sd_linear(q, k, v, raw.exp())
    assert_same_with_gradient(ours, naive.stacked(naive.sd_linear, q, k, v, raw.exp()), parts)


@pytest.mark.parametrize("chunk", [1, 2, 7, 11, 64])
def test_the_size_of_a_chunk_changes_nothing(chunk):
    q, k, v, _ = draw(3)
    whole, state = causal_sums(q, k, v, chunk=LENGTH)
    sums, last = causal_sums(q, k, v, chunk=chunk)
    torch.testing.assert_close(sums, whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(last, state, rtol=0, atol=1e-12)


def test_splitting_the_tokens_and_carrying_the_state_changes_nothing():
    q, k, v, raw = draw(4)
    whole, _ = elu_attention(q, k, v)
    whole_sd, _ = sd_linear(q, k, v, raw.exp())
    for cut in (1, 5, 10):
        first, state = elu_attention(q[:, :, :cut], k[:, :, :cut], v[:, :, :cut])
        rest, _ = elu_attention(q[:, :, cut:], k[:, :, cut:], v[:, :, cut:], state=state)
        torch.testing.assert_close(torch.cat([first, rest], 2), whole, rtol=0, atol=1e-12)
        first, state = sd_linear(*(x[:, :, :cut] for x in (q, k, v, raw.exp())))
        seen = torch.full((2, 1), cut)
        rest, _ = sd_linear(*(x[:, :, cut:] for x in (q, k, v, raw.exp())), state=state, seen=seen)
        torch.testing.assert_close(torch.cat([first, rest], 2), whole_sd, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("start", "stop"), [(0, 6), (5, LENGTH), (0, 1)])
def test_padded_keys_leave_state_normaliser_and_place_numbers(start, stop):
    q, k, v, raw = draw(5)
    valid = torch.zeros(2, LENGTH, dtype=torch.bool)
    valid[:, start:stop] = True
    inner = [x[:, :, start:stop] for x in (q, k, v, raw.exp())]
    padded, state = elu_attention(q, k, v, valid=valid)
    alone, alone_state = elu_attention(*inner[:3])
    assert padded.isfinite().all()
    torch.testing.assert_close(padded[:, :, start:stop], alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, alone_state, rtol=0, atol=1e-12)
    padded, state = sd_linear(q, k, v, raw.exp(), valid=valid)
    alone, alone_state = sd_linear(*inner)
    torch.testing.assert_close(padded[:, :, start:stop], alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, alone_state, rtol=0, atol=1e-12)


def test_the_feature_map_keeps_its_digits_where_elu_plus_one_cancels():
    x = torch.tensor([-6.0], dtype=torch.bfloat16)
    exact = math.exp(-6)
    assert abs(elu_feature(x).item() / exact - 1) < 0.004  # half a unit in the last of 8 binary digits
    assert abs((torch.nn.functional.elu(x) + 1).item() / exact - 1) > 0.5


def test_the_feature_map_has_a_finite_gradient_at_large_arguments():
    x = torch.tensor([-1e4, -1.0, 0.0, 1e4], requires_grad=True)
    elu_feature(x).sum().backward()
    assert x.grad.isfinite().all()


def test_half_precision_is_summed_in_float32():
    n = 4096  # ones added in bfloat16 stick at 256
    ones = torch.ones(1, 1, n, 1, dtype=torch.bfloat16)
    _, state = elu_attention(ones, ones, ones)
    assert state.dtype == torch.float32
    assert state[0, 0, 0, 1].item() == 2 * n


def test_attention_of_a_constant_is_that_constant():
    q, k, _, _ = draw(6)
    z, _ = elu_attention(q, k, torch.ones(2, HEADS, LENGTH, D_HEAD, dtype=torch.float64))
    torch.testing.assert_close(z, torch.ones_like(z))
