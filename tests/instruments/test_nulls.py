"""The nulls of routing: what fresh models of the same shape give, and what unrelated queries and keys give."""

from functools import cache

import numpy as np
import pytest
import torch

from rheoscope.instruments.measure import measure
from rheoscope.instruments.routing.routing import Routing
from rheoscope.instruments.routing.spectra import gaussian_readings
from rheoscope.models.view import ModelView
from tests.tiny import tiny

from . import plain
from .texts import random_corpus

CORPUS = random_corpus(lengths=(29,) * 9, documents=range(9))
N_NULL, SEEDS = 3, 6
SHARES = ("routing_share", "diagonal_share", "gauge_share")
SPECTRAL = ("routing_entropy_rank", "score_participation", "stability_max_re", "stability_share_positive")


@cache
def measured(family):
    """The routing dataset under each seed."""
    view = ModelView(tiny(family))
    options = {"routing": Routing.Options(n_spectra=9, n_lag=1, n_null=N_NULL)}
    runs = [measure(view, CORPUS, instruments=["routing"], options=options, seed=seed) for seed in range(SEEDS)]
    return [run["routing"] for run in runs]


def over_heads_of_a_fresh_model(family, seed):
    """Mean over heads of every reading of a model built anew, on the windows that the null is given."""
    trained = tiny(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 + seed)
        fresh = type(trained)._from_config(trained.config, attn_implementation="eager").double().eval()
    windows = [plain.calls_of(fresh, CORPUS.tokens[window])[0] for window in (0, 4, 8)]
    readings = {}
    for name in SHARES:
        sums = [[plain.sums_of(call)[name] for call in calls] for calls in windows]
        numerators, denominators = (sum(torch.stack([layer[i] for layer in window]) for window in sums) for i in (0, 1))
        readings[name] = float((numerators / denominators).mean())
    spectra = [plain.spectra_of(call)[0] for calls in windows for call in calls]
    return readings | {name: float(torch.stack([one[name] for one in spectra]).mean()) for name in SPECTRAL}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_untrained_null_is_distributed_like_models_built_anew(family):
    fresh = [over_heads_of_a_fresh_model(family, seed) for seed in range(SEEDS)]
    for name in (*SHARES, *SPECTRAL):
        ours = np.array([float(run[f"{name}_null"].mean()) for run in measured(family)])
        theirs = np.array([model[name] for model in fresh])
        error = np.sqrt((ours.var(ddof=1) + theirs.var(ddof=1)) / SEEDS)
        # Student's t of ten degrees of freedom passes 6 once in 10,000
        assert abs(ours.mean() - theirs.mean()) < 6 * error, name
    trained = measured(family)[0].stability_max_re
    ours = [float(run.stability_max_re_null.mean()) for run in measured(family)]
    assert abs(float(trained.mean()) - np.mean(ours)) > 20 * np.std(ours)  # a model that is not fresh would show


def test_the_untrained_null_has_errors_and_summaries_of_its_own():
    routing = measured("llama")[0]
    for name in ("routing_share", "routing_k90", "routing_share_by_lag"):
        assert routing[f"{name}_null"].dims == routing[name].dims
        assert f"{name}_null_se" in routing
    assert {"routing_k90_median_null", "minimal_rank_share_null"} <= set(routing)
    assert not [name for name in routing if str(name).startswith(("kernel", "capacity", "eigen")) and "null" in name]


def test_the_gaussian_null_of_growth_is_matched_to_the_size_of_each_head():
    routing = measured("llama")[0]
    calls = plain.every_window(tiny("llama"), CORPUS)[0]
    value, error = gaussian_readings(29, 10, seed=0)["stability_max_re"]
    for layer in range(3):
        norms = [(call.scale * call.K.mT @ call.Q).square().sum((-2, -1)).sqrt() for call in (w[layer] for w in calls)]
        size = torch.stack(norms).mean(0).numpy()
        null = routing.sel(layer=layer)
        # in the model's own float64 with norms in float32
        np.testing.assert_allclose(null.stability_max_re_null_gaussian, value * size, rtol=1e-5)
        np.testing.assert_allclose(null.stability_max_re_null_gaussian_se, error * size, rtol=1e-5)
    assert float(routing.routing_share_null_gaussian) == gaussian_readings(29, 10, seed=0)["routing_share"][0]


def test_without_null_windows_there_are_no_nulls():
    options = {"routing": Routing.Options(n_spectra=1, n_lag=1, n_null=0)}
    routing = measure(ModelView(tiny("llama")), CORPUS, instruments=["routing"], options=options)["routing"]
    assert not [name for name in routing if "null" in str(name)]
