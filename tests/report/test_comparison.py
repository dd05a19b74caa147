"""The page of two runs says where its errors come from, and its rows add up."""

import numpy as np
import pytest
import xarray as xr

from rheoscope.report.comparison import compared
from rheoscope.report.comparison_page import comparison_html, pairing
from rheoscope.report.figures_steering_ablation import _rank_correlation
from rheoscope.run import Run


def a_run(nll, text="a", **more):
    loss = xr.Dataset({"nll_mean": np.mean(nll), "nll_mean_se": 0.1, "nll": ("document", nll)}, **more)
    loss["tokens"] = ("document", np.full(len(nll), 10))
    return Run.of({"loss": loss}, {"text": {"hash": text}})


@pytest.mark.parametrize(
    ("runs", "paired", "sentence"),
    [
        ((a_run([1.0, 2.0, 3.0]), a_run([1.5, 2.6, 3.4])), True, "losses are paired by document"),
        ((a_run([1.0]), a_run([1.5])), False, "without losses of several documents to pair"),
        ((a_run([1.0, 2.0]), a_run([1.5, 2.1], "b")), False, "The runs read different texts"),
    ],
)
def test_losses_are_said_to_be_paired_only_where_they_are(runs, paired, sentence):
    comparison = compared(*runs)
    assert comparison.paired == paired
    assert sentence in pairing(comparison)
    assert pairing(comparison) in comparison_html(comparison)


def test_means_are_over_the_places_that_both_runs_have():
    first, second = np.array([[1.0, np.nan, 3.0]]), np.array([[2.0, 50.0, np.inf]])
    runs = [Run.of({"sinks": xr.Dataset({"share": (("layer", "head"), values)})}, {}) for values in (first, second)]
    (one,) = compared(*runs).differences
    assert (one.before, one.after, one.change, one.n_places) == (1.0, 2.0, 1.0, 1)
    (one,) = compared(runs[0], runs[0]).differences
    assert (one.before, one.change, one.n_places) == (2.0, 0.0, 2)


def test_equal_values_share_their_ranks():
    tied, rising = np.array([1.0, 1.0, 1.0, 2.0]), np.arange(4.0)
    assert _rank_correlation(tied, rising) == pytest.approx(_rank_correlation(tied, rising[[1, 2, 0, 3]]), abs=1e-12)
    assert _rank_correlation(tied, rising) == pytest.approx(0.7745966692414834)  # 3 / sqrt(15), by hand from mean ranks
    assert np.isnan(_rank_correlation(np.ones(4), rising))
