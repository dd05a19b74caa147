"""Which keys a query sees, against the masks that transformers makes."""

import numpy as np
import pytest
import torch

from rheoscope.models.view import ModelView
from rheoscope.theory.smoothing import mixed
from rheoscope.theory.visible import visible_keys
from tests.tiny import tiny

N = 24


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3_text", "bert", "modernbert", "gpt_oss"])
def test_visible_keys_are_those_of_the_model(name):
    view = ModelView(tiny(name))
    seen = {}

    def keep(layer, attention):
        seen[layer] = (attention.probs[0, 0] > 0).numpy()

    with torch.no_grad(), view.tapped({"attention": keep}):
        view.forward(torch.arange(3, 3 + N)[None])
    assert any(width for width in view.windows) or name in ("llama", "bert")
    for layer, width in enumerate(view.windows):
        first, stop = visible_keys(N, causal=view.causal, width=width)
        keys = np.arange(N)
        np.testing.assert_array_equal(seen[layer], (keys >= first[:, None]) & (keys < stop[:, None]))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("width", [None, 1, 5, N, 2 * N])
def test_even_attention_averages_what_is_visible(causal, width):
    u = torch.randn(2, N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first, stop = visible_keys(N, causal=causal, width=width)
    mean = torch.stack([u[:, a:b].mean(1) for a, b in zip(first, stop, strict=True)], 1)
    torch.testing.assert_close(mixed(u, 0.25, causal=causal, width=width), 0.75 * u + 0.25 * mean)
