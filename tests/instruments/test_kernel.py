"""The weights' own scores equal W_Q R_lag W_K^T written out, static, at each lag and over the lags attended."""

from functools import cache

import numpy as np
import pytest
import torch

from rheoscope.instruments.measure import measure
from rheoscope.instruments.routing.kernel import kernel_readings
from rheoscope.instruments.routing.routing import Routing
from rheoscope.models.view import ModelView
from tests import naive
from tests.tiny import Float64Throughout, tiny

from . import plain, plain_kernel
from .texts import random_corpus

FAMILIES = ("gpt2", "llama", "gpt_neox", "gemma2", "qwen3", "bert", "modernbert", "gpt_oss")
CORPUS = random_corpus()
LAG_WINDOWS = (0, 4, 7, 11)
# Float64 throughout; transformers computes its angles in float32, so cosines agree to 29 * 6e-8 at the longest lag.
CLOSE, TURNED = {"rtol": 1e-9}, {"rtol": 1e-5}


@cache
def measured(family):
    options = {"routing": Routing.Options(n_spectra=1, n_lag=len(LAG_WINDOWS), n_null=0)}
    view = ModelView(tiny(family))
    with Float64Throughout():
        return measure(view, CORPUS, instruments=["routing"], options=options)["routing"]


@pytest.mark.parametrize("family", FAMILIES)
def test_static_shares_and_ranks_are_those_of_the_dense_kernel(family):
    model = tiny(family)
    for layer in range(3):
        W_Q, W_K = plain_kernel.weights_of(family, model, layer)
        kernel = torch.stack([naive.kernel(Q, K) for Q, K in zip(W_Q, W_K, strict=True)])
        readings = plain.ranks_of(kernel, "kernel_", gauge=False)
        readings["kernel_routing_share"] = naive.energy(naive.skew(kernel)) / naive.energy(kernel)
        assert len(readings) == 16
        for name, value in readings.items():
            np.testing.assert_allclose(measured(family)[name].sel(layer=layer), value, err_msg=name, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_share_at_a_lag_is_that_of_the_kernel_with_its_keys_turned(family):
    model = tiny(family)
    for layer in range(3):
        weights = plain_kernel.weights_of(family, model, layer)
        angles = plain_kernel.angles_of(family, model, layer)
        for lag in measured(family).lag.values.tolist():
            R = plain_kernel.rotation(lag, angles, weights[0].shape[-1])
            skew, whole = plain_kernel.energies(*weights, R)
            ours = measured(family).kernel_routing_share_by_lag.sel(layer=layer, lag=lag)
            np.testing.assert_allclose(ours, skew / whole, **TURNED)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_averaged_share_weighs_every_signed_lag_by_the_attention_it_gets(family):
    model = tiny(family)
    calls = plain.every_window(model, CORPUS.of_windows(np.array(LAG_WINDOWS)))[0]
    for layer in range(3):
        weights = plain_kernel.weights_of(family, model, layer)
        angles = plain_kernel.angles_of(family, model, layer)
        mass = sum(plain.attention_by_lag(window[layer], CORPUS.window) for window in calls)
        skew, whole = np.zeros(6), np.zeros(6)
        for place, lag in enumerate(range(-28, 29)):
            R = plain_kernel.rotation(lag, angles, weights[0].shape[-1])
            at_lag = plain_kernel.energies(*weights, R)
            skew += mass[:, place] * at_lag[0].numpy()
            whole += mass[:, place] * at_lag[1].numpy()
        ours = measured(family).kernel_routing_share_averaged.sel(layer=layer)
        np.testing.assert_allclose(ours, skew / whole, **TURNED)


def test_a_gain_of_the_turned_coordinates_counts_for_queries_and_for_keys():
    """Long RoPE scales what it turns: with part of a head turned, that part weighs more, by the gain squared."""
    long = {"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.5, "factor": 64.0}
    long |= {"short_factor": [1.0] * 2, "long_factor": [1.5] * 2, "original_max_position_embeddings": 31}
    view = ModelView(tiny("phi3", rope_parameters=long, hidden_size=32, num_attention_heads=4, num_key_value_heads=2))
    weights, lags = view.weights, np.array([0, 3, 20])
    cos, _ = weights.rotation(0, torch.arange(1))
    assert cos.max() > 1.2
    found = kernel_readings(view, lags, np.ones((view.n_layers, view.n_heads, 2 * 29 - 1)))
    W_Q, W_K = (part.detach().double() for part in weights.kernel(0))

    def turned(W, place):
        tables = (table.double() for table in weights.rotation(0, torch.tensor([place])))
        return weights.rotated(W, *tables)

    for lag in lags.tolist():
        M = turned(W_Q, lag) @ turned(W_K, 0).mT
        share = ((M - M.mT) / 2).square().sum((1, 2)) / M.square().sum((1, 2))
        np.testing.assert_allclose(found.kernel_routing_share_by_lag.sel(lag=lag)[0], share, rtol=1e-5)
