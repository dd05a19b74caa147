"""Routing on the data equals its definition: dense matrices of every window, by plain transformers."""

from functools import cache

import numpy as np
import pytest

from rheoscope.instruments.measure import measure
from rheoscope.instruments.routing.routing import Routing
from rheoscope.models.view import ModelView
from tests.tiny import Float64Throughout, tiny

from . import plain
from .texts import random_corpus

FAMILIES = ("gpt2", "llama", "gpt_neox", "gemma2", "qwen3", "bert", "modernbert", "gpt_oss")
N_SPECTRA, N_LAG = 9, 5  # of 12 windows, so that the samples leave some out
# Both sides are float64 of the same q and k. What a reduced spectrum, or traces, may lose: 1e-9 (docs/equations).
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
CORPUS = random_corpus()


@cache
def measured(family):
    """The routing dataset of one family, without nulls of the data."""
    options = {"routing": Routing.Options(n_spectra=N_SPECTRA, n_lag=N_LAG, n_null=0)}
    view = ModelView(tiny(family))
    with Float64Throughout():
        return measure(view, CORPUS, instruments=["routing"], options=options, batch_size=5)["routing"]


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@cache
def attention_calls(family):
    """Attention of every window alone: [window][layer]."""
    return plain.every_window(tiny(family), CORPUS)[0]


@cache
def dense_spectra(family):
    """Readings and eigenvalues of the sampled windows: [layer][sampled window]."""
    calls = attention_calls(family)
    return [[plain.spectra_of(calls[window][layer]) for window in sampled(N_SPECTRA)] for layer in range(3)]


def sampled(n):
    """Windows spread evenly over the text, first and last included."""
    return sorted({round(i * (CORPUS.n_windows - 1) / (n - 1)) for i in range(n)})


def assert_same(reading, name, value, error, **where):
    np.testing.assert_allclose(reading[name].sel(**where), value, err_msg=name, **CLOSE)
    np.testing.assert_allclose(reading[f"{name}_se"].sel(**where), error, err_msg=f"{name}_se", **CLOSE)


def test_shares_and_their_errors_are_those_of_dense_scores(family):
    for layer in range(3):
        sums = [plain.sums_of(window[layer]) for window in attention_calls(family)]
        for name in ("routing_share", "diagonal_share", "gauge_share"):
            numerators, denominators = (np.stack([window[name][part].numpy() for window in sums]) for part in (0, 1))
            value, error = plain.ratio(numerators, denominators, CORPUS.documents)
            assert_same(measured(family), name, value, error, layer=layer)


def test_ranks_stability_and_their_errors_are_those_of_dense_spectra(family):
    for layer, windows in enumerate(dense_spectra(family)):
        spectra = [readings for readings, _ in windows]
        assert len(spectra[0]) == 23
        for name in spectra[0]:
            values = np.stack([window[name].numpy() for window in spectra])
            value, error = plain.ratio(values, np.ones_like(values), CORPUS.documents[sampled(N_SPECTRA)])
            assert_same(measured(family), name, value, error, layer=layer)


def test_layer_summaries_are_medians_over_heads_and_sampled_windows(family):
    medians = [np.median([readings["routing_k90"] for readings, _ in windows]) for windows in dense_spectra(family)]
    np.testing.assert_array_equal(measured(family).routing_k90_median, medians)
    assert measured(family).minimal_rank_share == np.mean([median == 2 for median in medians])


def test_eigenvalues_are_those_of_the_first_sampled_window(family):
    for layer, windows in enumerate(dense_spectra(family)):
        dense = windows[0][1].numpy()
        ours = measured(family).sel(layer=layer)
        ours = ours.eigenvalues_re.values + 1j * ours.eigenvalues_im.values
        # in pairs of nearest, for neither side has an order; eigenvalues of a non-normal matrix, so 1e-8 of the largest
        distance = np.abs(ours[:, :, None] - dense[:, None, :])
        scale = np.abs(dense).max(1)[:, None]
        assert (distance.min(1) < 1e-8 * scale).all()
        assert (distance.min(2) < 1e-8 * scale).all()


def test_shares_by_lag_and_their_errors_are_those_of_the_diagonals(family):
    calls = attention_calls(family)
    chosen, lags = sampled(N_LAG), measured(family).lag.values.tolist()
    assert lags[0] == 0
    assert lags[-1] == 28
    for layer in range(3):
        sums = np.stack([plain.sums_by_lag(calls[window][layer], lags) for window in chosen])
        with np.errstate(invalid="ignore", divide="ignore"):
            value, error = plain.ratio(sums[:, 0], sums[:, 1], CORPUS.documents[chosen])
        error = np.where(np.isfinite(error), error, np.nan)
        assert_same(measured(family), "routing_share_by_lag", value, error, layer=layer)
