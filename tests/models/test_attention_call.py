"""One call of attention by itself: masks, windows, blocks of queries, replaced inputs, memory, half precision."""

import numpy as np
import pytest
import torch

from rheoscope.models.attention import Attention, Workspace
from rheoscope.models.blockwise import BLOCK, blockwise
from tests.models.views import tokens_of, view_of
from tests.tiny import LENGTH, VARIANTS, WINDOW


@pytest.fixture
def attention():
    """One call with two key heads for six query heads and a window, from fixed random numbers."""
    generator = torch.Generator().manual_seed(1)
    shapes = ((2, 6, LENGTH, 7), (2, 2, LENGTH, 7), (2, 2, LENGTH, 5))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    lag = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    return Attention(q, k, v, scale=0.4, mask=((lag >= 0) & (lag < WINDOW)).expand(2, 1, -1, -1))


@torch.no_grad()
def test_an_additive_mask_means_the_same_as_a_boolean_one(attention):
    hidden = (~attention.mask).double() * torch.finfo(torch.float64).min
    additive = Attention(attention.q, attention.k, attention.v, scale=0.4, mask=hidden)
    assert torch.equal(additive.allowed.expand_as(attention.mask), attention.mask)
    torch.testing.assert_close(additive.probs, attention.probs, rtol=0, atol=1e-14)


@torch.no_grad()
def test_some_windows_of_a_call_are_the_call_on_those_windows(attention):
    rows = np.array([1])
    torch.testing.assert_close(attention.of_rows(rows).probs, attention.probs[1:], rtol=0, atol=1e-14)
    attention.bias = torch.arange(2 * LENGTH, dtype=torch.float64).reshape(2, 1, 1, LENGTH)
    attention.scores = attention.scores + 1e-3 * torch.arange(LENGTH)
    torch.testing.assert_close(attention.of_rows(rows).probs, attention.probs[1:], rtol=0, atol=1e-14)


def joined(attention, size):
    """The whole map out of the maps of blocks, 0 at the keys that a block leaves out."""
    whole = torch.zeros(*attention.q.shape[:3], attention.k.shape[2], dtype=attention.q.dtype)
    for queries, block in attention.blocks(size):
        whole[:, :, queries, : block.k.shape[2]] = block.probs
        assert block.v.shape[2] == block.k.shape[2] <= whole.shape[3]
    return whole


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 3, LENGTH, 2 * LENGTH])
def test_blocks_of_queries_are_the_rows_of_the_call(attention, size):
    causal = Attention(attention.q, attention.k, attention.v, scale=0.4)
    both_ways = Attention(attention.q, attention.k, attention.v, scale=0.4, causal=False)
    for call in (attention, causal, both_ways):
        torch.testing.assert_close(joined(call, size), call.probs, rtol=0, atol=1e-14)
        torch.testing.assert_close(joined(call, size), call.probs, rtol=0, atol=0)  # read off the map that is there now
    causal.bias = torch.arange(LENGTH, dtype=torch.float64).reshape(1, 1, 1, LENGTH).expand(2, -1, -1, -1) / 10
    causal.scores = causal.scores + 1e-3 * torch.arange(LENGTH)
    torch.testing.assert_close(joined(causal, size), causal.probs, rtol=0, atol=1e-14)


@torch.no_grad()
@pytest.mark.parametrize(("size", "every"), [(1, 2), (3, 5), (64, 3)])
def test_blocks_of_some_queries_are_their_rows(attention, size, every):
    causal = Attention(attention.q, attention.k, attention.v, scale=0.4)
    for call in (attention, causal):
        rows = []
        for queries, block in call.blocks(size, every=every):
            rows += range(LENGTH)[queries]
            expected = call.probs[:, :, queries, : block.k.shape[2]]
            torch.testing.assert_close(block.probs, expected, rtol=0, atol=1e-14)
        assert rows == list(range(0, LENGTH, every))


@pytest.mark.parametrize("name", VARIANTS)
def test_blocks_of_every_family_are_the_rows_of_its_maps(name):
    view = view_of(name)
    found = []
    with view.tapped({"attention": lambda layer, call: found.append((joined(call, 5), call.probs.clone()))}):
        view.forward(tokens_of(view))
    for blocks, whole in found:
        torch.testing.assert_close(blocks, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("replaced", [False, True])
def test_the_scores_of_one_head_are_those_of_all(attention, replaced):
    if replaced:
        attention.scores = attention.scores.tanh()
    for head in range(6):
        torch.testing.assert_close(attention.scores_of_head(head), attention.scores[:, head], rtol=0, atol=1e-14)


def test_replacing_an_input_computes_everything_after_it_anew(attention):
    probs, z = attention.probs.clone(), attention.z.clone()
    attention.replace_input("v", attention.v * 2)
    torch.testing.assert_close(attention.z, 2 * z)
    attention.replace_input("q", attention.q * 0)
    assert not torch.allclose(attention.probs, probs)
    uniform = attention.mask.double() / attention.mask.sum(-1, keepdim=True)
    torch.testing.assert_close(attention.probs, uniform.expand_as(probs), rtol=0, atol=1e-15)


def test_with_gradients_no_map_lives_in_the_workspace(attention):
    attention.workspace = Workspace()
    assert attention.probs.isfinite().all()
    assert attention.workspace.buffer is None


@torch.no_grad()
def test_one_workspace_serves_all_layers_and_grows_when_it_must():
    workspace = Workspace()
    first = workspace.empty((2, 3), torch.zeros(1))
    assert workspace.empty((6,), torch.zeros(1)).data_ptr() == first.data_ptr()
    assert workspace.empty((7,), torch.zeros(1)).numel() == 7
    assert workspace.empty((2, 3), torch.zeros(1, dtype=torch.float64)).dtype == torch.float64


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_softmax_in_half_precision_is_taken_in_float32(attention, dtype):
    q, k, v = (x.to(dtype) for x in (attention.q, attention.k, attention.v))
    half = Attention(q, k, v, scale=0.4, mask=attention.mask)
    half.scores = half.scores  # rounded once, for both
    hidden = ~half.allowed
    exact = half.scores.double().masked_fill(hidden, -torch.inf).softmax(-1)
    assert half.probs.dtype == dtype
    # of the same scores: the result alone is rounded to half precision, neither exponentials nor their sum
    seen = ~hidden.all(-1, keepdim=True).expand(exact.shape)
    torch.testing.assert_close(half.probs.double()[seen], exact[seen], rtol=0.51 * torch.finfo(dtype).eps, atol=1e-7)


@torch.no_grad()
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_attention_by_blocks_is_attention(causal, length):
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(2, heads, length, 8, generator=generator).double() * 20 for heads in (6, 2, 2))
    found = blockwise(q, k, v, scale=0.5, causal=causal)
    whole = Attention(q, k, v, scale=0.5, causal=causal)
    scores = whole.scores if whole.allowed is None else whole.scores.masked_fill(~whole.allowed, -torch.inf)
    torch.testing.assert_close(found.mean, whole.probs.mean(1), rtol=0, atol=1e-13)
    torch.testing.assert_close(found.z, whole.z, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.normaliser, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)
