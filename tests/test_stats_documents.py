"""Ratios over documents that come in pieces, their errors, and sums by lag."""

import math

import naive
import numpy as np
import pytest
import torch
from scipy.stats import bootstrap

from rheoscope import stats
from rheoscope.errors import RheoscopeError

WINDOWS = np.array([3, 1, 0, 4, 2, 1])  # windows per document; document 2 has none
SHAPE = (2, 3)


def rng(seed=0):
    return np.random.default_rng(seed)


def window_rows():
    """Documents, numerators and denominators of all windows, in the order of the text."""
    documents = np.repeat(np.arange(len(WINDOWS)), WINDOWS)
    size = (len(documents), *SHAPE)
    return documents, rng(0).normal(2, 1, size) + documents[:, None, None], rng(1).uniform(1, 5, size)


def fed(index):
    ratio = stats.RatioOfSums(SHAPE, windows_per_document=WINDOWS)
    ratio.update(*(rows[index] for rows in window_rows()))
    return ratio


def test_the_ratio_is_one_division_of_totals_and_not_a_mean_of_ratios():
    documents, n, d = window_rows()
    ratio = fed(np.arange(len(window_rows()[0]))).finalize()
    np.testing.assert_allclose(ratio.value, n.sum(0) / d.sum(0), rtol=1e-14)
    per_document = np.stack([n[documents == k].sum(0) / d[documents == k].sum(0) for k in np.unique(documents)])
    assert (abs(per_document.mean(0) / ratio.value - 1) > 1e-3).any()
    assert (ratio.n == 5).all()


def test_the_streamed_standard_error_is_that_of_the_whole_documents():
    documents, n, d = window_rows()
    kept = np.unique(documents)
    sums = [np.stack([x[documents == k].sum(0) for k in kept]) for x in (n, d)]
    expected = stats.ratio_of_sums(*sums)
    streamed = fed(np.arange(len(window_rows()[0]))).finalize()
    for a, b in zip(streamed, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_the_unit_of_the_error_is_the_document_and_not_the_window():
    n = np.repeat(rng().normal(5, 1, 8), 4)
    as_documents = stats.RatioOfSums((), windows_per_document=np.full(8, 4))
    as_documents.update(np.repeat(np.arange(8), 4), n, np.ones(32))
    as_windows = stats.RatioOfSums((), windows_per_document=np.ones(32, int))
    as_windows.update(np.arange(32), n, np.ones(32))
    assert as_documents.finalize().se == pytest.approx(n[::4].std(ddof=1) / math.sqrt(8))
    assert as_documents.finalize().se > 1.9 * as_windows.finalize().se


def test_linearised_and_left_out_errors_agree():
    d = rng(1).uniform(50, 150, 200)
    n = d * rng(2).normal(3, 0.2, 200)
    assert stats.ratio_of_sums(n, d).se == pytest.approx(naive.jackknife_ratio_se(n, d), rel=0.01)


def test_the_linearised_error_covers_the_truth_as_often_as_it_says():
    generator, hits = rng(3), 0
    for _ in range(400):
        d = generator.uniform(50, 150, 40)
        value, se, _ = stats.ratio_of_sums(d * 3 + generator.normal(0, 10, 40), d)
        hits += abs(value - 3) < 1.96 * se
    assert 0.91 < hits / 400 < 0.975  # 0.95 less a small-sample loss, with three deviations of 0.011


def test_documents_without_such_a_lag_do_not_count():
    ratio = stats.RatioOfSums((2,), windows_per_document=np.ones(3, int))
    ratio.update(np.arange(3), np.array([[1.0, 0.0], [2.0, 4.0], [3.0, 0.0]]), np.array([[1, 0], [1, 2], [1, 0]]))
    value, se, n = ratio.finalize()
    np.testing.assert_array_equal(value, [2.0, 2.0])
    np.testing.assert_array_equal(n, [3, 1])
    assert np.isnan(se[1])
    assert se[0] > 0


def test_an_interrupted_reading_counts_open_documents_as_they_stand():
    documents, n, d = window_rows()
    partial = fed(np.arange(6))
    assert partial.open_documents.tolist() == [3]
    assert (partial.finalize().n == 3).all()
    np.testing.assert_allclose(partial.finalize().value, n[:6].sum(0) / d[:6].sum(0))
    partial.update(documents[6:], n[6:], d[6:])
    for a, b in zip(partial.finalize(), fed(np.arange(len(documents))).finalize(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_memory_does_not_grow_with_the_number_of_documents():
    n_documents = 500
    ratio = stats.RatioOfSums((4,), windows_per_document=np.full(n_documents, 2))
    for start in range(0, 2 * n_documents, 3):
        documents = np.arange(start, min(start + 3, 2 * n_documents)) // 2
        ratio.update(documents, np.ones((len(documents), 4)), np.ones(len(documents)))
        assert len(ratio.open_documents) <= 1
    assert (ratio.finalize().n == n_documents).all()


def test_a_document_takes_a_byte_of_an_accumulator_and_shares_the_rest():
    few, many = (stats.windows_of_documents(np.repeat(np.arange(n), 2)) for n in (100, 10_100))
    ratios = [stats.RatioOfSums((4,), windows_per_document=many) for _ in range(3)]
    assert all(np.shares_memory(ratio.windows, many) for ratio in ratios)
    size = sum(array.nbytes for array in stats.RatioOfSums((4,), windows_per_document=few).state().values())
    assert sum(array.nbytes for array in ratios[0].state().values()) - size == 2 * 10_000  # with the shared numbers
    large = stats.RatioOfSums((), windows_per_document=np.array([300, 1]))
    large.update(np.zeros(256, int), np.ones(256), np.ones(256))
    large.update(np.zeros(44, int), np.ones(44), np.ones(44))
    assert int(large.finalize().n) == 1


def test_windows_counted_twice_are_refused():
    part = fed(np.arange(4))
    with pytest.raises(RheoscopeError, match="counted twice"):
        part.merge(part)
    with pytest.raises(RheoscopeError, match="6 windows of document 0"):
        stats.PerDocument((), windows_per_document=WINDOWS).update(np.zeros(6, int))


def test_documents_beyond_the_corpus_are_refused():
    with pytest.raises(RheoscopeError, match="number documents from 0"):
        stats.RatioOfSums((), windows_per_document=WINDOWS).update(np.array([6]), np.ones(1), np.ones(1))


def test_denominators_that_do_not_fit_are_refused():
    with pytest.raises(RheoscopeError, match="one denominator per row"):
        stats.ratio_of_sums(np.ones((4, 3)), np.ones(3))
    with pytest.raises(RheoscopeError, match="one denominator per row"):
        stats.ratio_of_sums(np.ones((4, 3)), np.ones((4, 2)))


def test_one_denominator_serves_the_whole_row_even_in_a_square():
    n, d = rng().normal(size=(3, 3)), np.array([1.0, 2.0, 4.0])
    np.testing.assert_allclose(stats.ratio_of_sums(n, d).value, n.sum(0) / 7)


def test_per_document_sums_say_which_documents_are_complete():
    table = stats.PerDocument(("nll", "tokens"), windows_per_document=WINDOWS)
    table.update(np.array([0, 0, 1]), nll=np.array([1.0, 2.0, 4.0]), tokens=np.array([3.0, 3.0, 5.0]))
    documents, complete, sums = table.finalize()
    assert documents.tolist() == [0, 1]
    assert complete.tolist() == [False, True]
    assert sums["nll"].tolist() == [3.0, 4.0]
    with pytest.raises(RheoscopeError, match="are kept"):
        table.update(np.array([1]), nll=np.ones(1))


def test_bootstrap_agrees_with_scipy_and_with_the_linearisation():
    d = rng(4).uniform(50, 150, 60)
    n = d * 3 + rng(5).normal(0, 20, 60)
    ours = stats.bootstrap_ratio(n, d, generator=rng(6), n_resamples=4000)
    theirs = bootstrap(
        (n, d),
        lambda n, d, axis: n.sum(axis) / d.sum(axis),
        paired=True,
        n_resamples=4000,
        method="percentile",
        rng=rng(7),
    )
    # The standard error of a bootstrap standard error is 1/sqrt(2 x 4000) = 1.1 %.
    assert ours.se == pytest.approx(theirs.standard_error, rel=0.05)
    assert ours.se == pytest.approx(stats.ratio_of_sums(n, d).se, rel=0.06)
    assert ours.low == pytest.approx(theirs.confidence_interval.low, abs=0.2 * ours.se)
    assert ours.high == pytest.approx(theirs.confidence_interval.high, abs=0.2 * ours.se)


def test_bootstrap_is_repeatable_whatever_is_held_at_a_time(monkeypatch):
    n, d = rng().normal(size=(9, 2)), np.ones(9)
    whole = stats.bootstrap_ratio(n, d, generator=rng(1), n_resamples=100)
    monkeypatch.setattr(stats.estimates, "RESAMPLED_AT_ONCE", 70)
    for a, b in zip(whole, stats.bootstrap_ratio(n, d, generator=rng(1), n_resamples=100), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13)


def test_a_paired_difference_is_sharper_than_two_separate_errors():
    tokens = rng(8).integers(100, 200, 50).astype(float)
    before = tokens * rng(9).normal(3, 0.5, 50)
    after = before + tokens * rng(10).normal(0.02, 0.01, 50)
    difference = stats.paired_difference(after, before, denominators=tokens)
    assert difference.value == pytest.approx((after.sum() - before.sum()) / tokens.sum())
    assert difference.se < 0.1 * stats.ratio_of_sums(before, tokens).se
    assert abs(difference.value - 0.02) < 4 * difference.se
    with pytest.raises(RheoscopeError, match="same documents"):
        stats.paired_difference(after[1:], before, denominators=tokens)


@pytest.mark.parametrize("n_lags", [1, 4, 7, 11])
def test_lag_sums_equal_the_literal_diagonals(n_lags):
    A = torch.randn(2, 3, 7, 7, generator=torch.Generator().manual_seed(0))
    sums = stats.lag_sums(A, n_lags=n_lags)
    expected = [[naive.lag_sums(head, n_lags) for head in window] for window in A]
    torch.testing.assert_close(sums, torch.tensor(expected))
    torch.testing.assert_close(stats.lag_sums(A[1, 1:], n_lags=n_lags), sums[1, 1:])


def test_all_mass_at_one_lag_is_found_at_that_lag():
    A = torch.zeros(1, 29, 29)
    A[0].diagonal(-17).fill_(1.0)
    counts = stats.lag_counts(torch.tensor([29]), n_lags=29)
    ratio = stats.RatioOfSums((29,), windows_per_document=np.array([1]))
    ratio.update(np.array([0]), stats.lag_sums(A, n_lags=29), counts)
    value = ratio.finalize().value
    assert value.argmax() == 17
    assert value[17] == 1.0
    assert value.sum() == 1.0


def test_pairs_per_lag_end_with_the_window():
    counts = stats.lag_counts(torch.tensor([5, 2]), n_lags=4)
    assert counts.tolist() == [[5, 4, 3, 2], [2, 1, 0, 0]]
