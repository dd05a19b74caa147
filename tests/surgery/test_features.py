"""Feature maps and the attention made of them, against the formula written out."""

import math

import pytest
import torch

from rheoscope.nets.linear import BLOCK, CHUNK
from rheoscope.surgery.features import FEATURES, feature_attention, feature_root

BATCH, HEADS, KEY_HEADS, N, D, D_VALUE = 2, 6, 2, 133, 5, 7  # more than two chunks, the last not full


def drawn(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((BATCH, HEADS, N, D), (BATCH, KEY_HEADS, N, D), (BATCH, KEY_HEADS, N, D_VALUE))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    valid = torch.ones(BATCH, N, dtype=torch.bool)
    valid[0, :11] = False
    return q, k, v, valid


def phi(feature, x):
    """One feature vector, number by number."""
    x = x.tolist()
    if feature == "elu":
        return [a + 1 if a > 0 else math.exp(a) for a in x]
    if feature == "softmax":
        total, below = sum(math.exp(a) for a in x), sum(math.exp(-a) for a in x)
        return [math.exp(a) / total for a in x] + [math.exp(-a) / below for a in x]
    return [1.0, *x, *(a * b / math.sqrt(2) for a in x for b in x)]


def literal(feature, q, k, v, valid, *, batch, head, query):
    """Σ φ(q)·φ(k_j) v_j / Σ φ(q)·φ(k_j) for one query."""
    own = phi(feature, q[batch, head, query])
    top, bottom = torch.zeros(D_VALUE, dtype=torch.float64), 0.0
    for j in range(query + 1):
        if valid[batch, j]:
            key_head = head // (HEADS // KEY_HEADS)
            weight = sum(a * b for a, b in zip(own, phi(feature, k[batch, key_head, j]), strict=True))
            top, bottom = top + weight * v[batch, key_head, j], bottom + weight
    return top / bottom if bottom else top


@pytest.mark.parametrize("feature", FEATURES)
def test_it_is_the_formula_written_out(feature):
    q, k, v, valid = drawn()
    z, _ = feature_attention(q, k, v, feature=feature, valid=valid)
    for batch, head, query in [(0, 0, 5), (0, 1, 11), (0, 4, 64), (1, 5, 132), (1, 2, 0)]:
        expected = literal(feature, q, k, v, valid, batch=batch, head=head, query=query)
        torch.testing.assert_close(z[batch, head, query], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("feature", FEATURES)
def test_in_parts_or_one_token_at_a_time_it_is_the_same(feature):
    q, k, v, valid = drawn()
    whole, last = feature_attention(q, k, v, feature=feature, valid=valid)
    state, parts = None, []
    for part in torch.arange(N).split([70, 1, 1, 1, 60]):
        here = (x[:, :, part] for x in (q, k, v))
        z, state = feature_attention(*here, feature=feature, valid=valid[:, part], state=state)
        parts.append(z)
    torch.testing.assert_close(torch.cat(parts, 2), whole, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(state, last, rtol=1e-9, atol=1e-10)
    assert state.shape[:2] == (BATCH, KEY_HEADS)


@pytest.mark.parametrize("feature", FEATURES)
def test_half_precision_is_summed_in_single(feature):
    q, k, v, valid = drawn(torch.bfloat16)
    z, state = feature_attention(q, k, v, feature=feature, valid=valid)
    exact, _ = feature_attention(*(x.double() for x in (q, k, v)), feature=feature, valid=valid)
    assert z.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    torch.testing.assert_close(z.double(), exact, rtol=2**-8, atol=1e-3)


def of_all_pairs(feature, q, k, v, valid):
    """The same from the whole matrix of weights, in float64."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    weights = (FEATURES[feature](q.double()) @ FEATURES[feature](k.double()).mT).tril() * valid[:, None, None, :]
    return weights @ v.double() / weights.sum(-1, keepdim=True).clamp_min(1e-300)


@pytest.mark.parametrize("shift", [0.0, -6.0])
@pytest.mark.parametrize("feature", ["elu", "softmax"])
def test_a_long_text_at_the_size_of_a_real_model_is_exact_in_single_and_half_precision(feature, shift):
    generator = torch.Generator().manual_seed(0)
    n = 2 * BLOCK + CHUNK + 3  # neither blocks nor chunks come out even
    q, k, v = (torch.randn((1, heads, n, 64), generator=generator) for heads in (9, 3, 3))
    q, k = q + shift, k + shift  # where elu + 1 keeps no digit in bfloat16
    valid = torch.arange(n)[None] >= 5
    exact = of_all_pairs(feature, q, k, v, valid)
    z, _ = feature_attention(q, k, v, feature=feature, valid=valid)
    torch.testing.assert_close(z.double(), exact, rtol=0, atol=1e-5)
    half = [x.bfloat16() for x in (q, k, v)]
    z, _ = feature_attention(*half, feature=feature, valid=valid)
    torch.testing.assert_close(z.double(), of_all_pairs(feature, *half, valid), rtol=2**-8, atol=1e-5)


def test_taylor_features_give_the_exponential_to_second_order():
    q, k, _, _ = drawn()
    a, b = (FEATURES["taylor"](x) for x in (q[0, 0], k[0, 0]))
    score = (q[0, 0] * k[0, 0]).sum(-1)
    torch.testing.assert_close((a * b).sum(-1), 1 + score + score**2 / 2)
    assert ((a @ b.T) > 0).all()


def test_the_scale_enters_where_it_is_asked_for():
    assert feature_root("elu", 0.25, scaled=False) == 1.0
    assert feature_root("softmax", 0.25, scaled=True) == 0.5
    assert feature_root("taylor", 0.25, scaled=False) == 0.5
