"""Entries of attention maps in half precision and with scores far apart, against the maps in float64."""

import pytest
import torch

from rheoscope.instruments.sinks.map_entries import map_entries
from rheoscope.models.attention import Attention


def half_precision_call(dtype, size):
    """Attention in a low precision, with scores of some size, and its maps in float64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 40, 16, generator=generator) for _ in range(3))
    q, k = ((part * size**0.5).to(dtype) for part in (q, k))
    scores = q.double() @ k.double().mT / 4
    probs = scores.masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    return Attention(q, k, v.to(dtype), scale=0.25), probs


@torch.no_grad()
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_entries_in_any_precision_are_those_of_the_exact_map_of_its_queries_and_keys(dtype, fused, monkeypatch):
    monkeypatch.setattr(Attention, "_on_cpu_kernel", lambda self: fused)
    attention, probs = half_precision_call(dtype, size=12)  # scores of 100: future keys far above those that are seen
    entries = map_entries(attention)
    every = torch.arange(40).expand(2, 2, -1)
    close = {"rtol": 1e-3, "atol": 1e-4, "check_dtype": False}  # fused normalisers in bfloat16 are this exact
    torch.testing.assert_close(entries.columns(every).mT, probs, **close)
    torch.testing.assert_close(entries.diagonal(0), probs.diagonal(dim1=2, dim2=3), **close)
    torch.testing.assert_close(entries.rows(torch.arange(40)[None]), probs, **close)


@torch.no_grad()
def test_maps_of_a_model_in_bfloat16_are_averaged_in_float32():
    attention, probs = half_precision_call(torch.bfloat16, size=12)
    assert attention.mean_probs.dtype == torch.float32
    torch.testing.assert_close(attention.mean_probs, probs.mean(1), rtol=1e-4, atol=1e-5, check_dtype=False)
