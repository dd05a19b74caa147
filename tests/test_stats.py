"""Accumulators against literal formulas, their laws, and documents that come in pieces."""

import math
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rheoscope import stats
from rheoscope.errors import RheoscopeError

SHAPE = (2, 3)
WINDOWS = np.array([3, 1, 0, 4, 2, 1])  # windows per document; document 2 has none


def rng(seed=0):
    return np.random.default_rng(seed)


def window_rows(seed=0):
    """Documents, numerators and denominators of all windows, in the order of the text."""
    documents = np.repeat(np.arange(len(WINDOWS)), WINDOWS)
    size = (len(documents), *SHAPE)
    return documents, rng(seed).normal(2, 1, size) + documents[:, None, None], rng(seed + 1).uniform(1, 5, size)


class Kind:
    """An accumulator with rows to feed it."""

    def __init__(self, new, rows):
        self.new, self.rows = new, rows

    def fed(self, index):
        accumulator = self.new()
        if len(index):
            accumulator.update(**{name: values[index] for name, values in self.rows.items()})
        return accumulator


def kinds():
    documents, n, d = window_rows()
    pair = {"numerators": n, "denominators": d}
    return {
        "mean": Kind(lambda: stats.Mean(SHAPE), {"values": n, "weights": d}),
        "moments": Kind(lambda: stats.Moments(SHAPE), {"values": n, "present": d > 2}),
        "histogram": Kind(lambda: stats.Histogram(np.linspace(0, 6, 5), SHAPE), {"values": n}),
        "ratio": Kind(lambda: stats.RatioOfSums(SHAPE, windows_per_document=WINDOWS), {"documents": documents, **pair}),
        "per document": Kind(
            lambda: stats.PerDocument(("n", "d"), SHAPE, windows_per_document=WINDOWS),
            {"documents": documents, "n": n, "d": d},
        ),
    }


KINDS = kinds()
N_ROWS = int(WINDOWS.sum())


def outcome(accumulator):
    """Everything that finalize says, as a list of arrays."""
    result = accumulator.finalize()
    if isinstance(result, stats.DocumentSums):
        return [result.documents, result.complete, *result.sums.values()]
    return [result] if isinstance(result, np.ndarray) else list(result)


def assert_equal(one, other):
    for a, b in zip(outcome(one), outcome(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@settings(max_examples=30)
@given(data=st.data())
def test_splitting_the_data_changes_nothing(kind, data):
    order = data.draw(st.permutations(range(N_ROWS)))
    part_of = np.array(data.draw(st.lists(st.integers(0, 3), min_size=N_ROWS, max_size=N_ROWS)))
    batches = [np.array([row for row in order if part_of[row] == part], int) for part in range(4)]
    whole = kind.fed(np.arange(N_ROWS))
    one_after_the_other = kind.new()
    for batch in batches:
        if len(batch):
            one_after_the_other.update(**{name: values[batch] for name, values in kind.rows.items()})
    assert_equal(one_after_the_other, whole)
    assert_equal(reduce(lambda a, b: a.merge(b), map(kind.fed, batches)), whole)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@settings(max_examples=20)
@given(cuts=st.tuples(st.integers(0, N_ROWS), st.integers(0, N_ROWS)).map(sorted))
def test_merge_is_associative_and_commutative(kind, cuts):
    a, b, c = (kind.fed(np.arange(*ends)) for ends in ((0, cuts[0]), cuts, (cuts[1], N_ROWS)))
    assert_equal(a.merge(b).merge(c), a.merge(b.merge(c)))
    assert_equal(a.merge(b), b.merge(a))
    assert_equal(a.merge(kind.new()), a)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_merge_leaves_its_arguments_alone(kind):
    a, b = kind.fed(np.arange(4)), kind.fed(np.arange(4, N_ROWS))
    before = [x.state() for x in (a, b)]
    a.merge(b).update(**{name: values[:0] for name, values in kind.rows.items()})
    for accumulator, state in zip((a, b), before, strict=True):
        for name, array in accumulator.state().items():
            np.testing.assert_array_equal(array, state[name])


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_run_resumes_from_stored_arrays_to_the_same_bits(kind, tmp_path):
    straight = kind.fed(np.arange(5))
    np.savez(tmp_path / "state.npz", **straight.state())
    with np.load(tmp_path / "state.npz", allow_pickle=False) as stored:
        resumed = type(straight).from_state(dict(stored))
    for accumulator in (straight, resumed):
        accumulator.update(**{name: values[5:] for name, values in kind.rows.items()})
    for a, b in zip(outcome(straight), outcome(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_tensors_of_any_precision_are_taken(kind):
    rows = {name: values.round() if values.dtype == float else values for name, values in kind.rows.items()}
    tensors = {name: torch.tensor(values) if name != "present" else values for name, values in rows.items()}
    halves = {name: x.bfloat16() if name not in ("present", "documents") else x for name, x in tensors.items()}
    from_arrays, from_halves = kind.new(), kind.new()
    from_arrays.update(**rows)
    from_halves.update(**halves)
    assert_equal(from_arrays, from_halves)


def test_mean_pools_all_weights():
    mean = stats.Mean(())
    mean.update(np.array([1.0, 2.0]), np.array([1.0, 0.0]))
    mean.update(np.array([4.0]), np.array([2.0]))
    assert mean.finalize() == 3.0
    assert np.isnan(stats.Mean(()).finalize())


def test_moments_equal_those_of_numpy():
    values = rng().normal(1e6, 1e-2, (17, *SHAPE))
    moments = stats.Moments(SHAPE)
    for part in np.array_split(values, 5):
        moments.update(part)
    mean, se, n = moments.finalize()
    np.testing.assert_allclose(mean, values.mean(0), rtol=1e-15)
    # Sums of squares would lose sixteen digits here; differences from the mean of 1e6 still hold eight.
    np.testing.assert_allclose(moments.variance(), values.var(0, ddof=1), rtol=1e-7)
    np.testing.assert_allclose(se, values.std(0, ddof=1) / math.sqrt(17), rtol=1e-7)
    assert (n == 17).all()


def test_absent_values_do_not_count_and_nan_is_never_hidden():
    values = np.array([[1.0, math.nan], [3.0, 2.0], [math.nan, 2.0]])
    moments = stats.Moments((2,))
    moments.update(values, present=np.array([[True, True], [True, True], [False, True]]))
    mean, _, n = moments.finalize()
    np.testing.assert_array_equal(mean, [2.0, math.nan])
    np.testing.assert_array_equal(n, [2, 3])


def test_fewer_than_two_documents_have_no_standard_error():
    moments = stats.Moments(())
    assert all(np.isnan(x) for x in moments.finalize()[:2])
    moments.update(np.array([5.0]))
    assert moments.finalize().value == 5
    assert np.isnan(moments.finalize().se)
    ratio = stats.RatioOfSums((), windows_per_document=np.array([2]))
    ratio.update(np.array([0, 0]), np.array([1.0, 2.0]), np.array([2.0, 2.0]))
    assert ratio.finalize().value == 0.75
    assert np.isnan(ratio.finalize().se)
    one = np.ones(1)
    assert np.isnan(stats.ratio_of_sums(one, one).se)
    assert np.isnan(stats.bootstrap_ratio(one, one, generator=rng())[1:]).all()


def test_histogram_counts_equal_those_of_numpy():
    values = rng().normal(0, 2, (200, 3))
    values[5, 1] = math.nan
    edges = np.array([-2.0, -1.0, 0.5, 3.0])
    histogram = stats.Histogram(edges, (3,))
    histogram.update(values)
    counts, below, above, undefined = histogram.finalize()
    for entry in range(3):
        np.testing.assert_array_equal(counts[entry], np.histogram(values[:, entry], edges)[0])
    np.testing.assert_array_equal(below, (values < -2).sum(0))
    np.testing.assert_array_equal(above, (values >= 3).sum(0))
    np.testing.assert_array_equal(undefined, [0, 1, 0])


def test_histogram_bins_hold_their_lower_edge():
    histogram = stats.Histogram(np.array([0.0, 1.0, 2.0]))
    histogram.update(np.array([0.0, 1.0, 2.0]), np.array([5.0, 7.0, 11.0]))
    counts, _, above, _ = histogram.finalize()
    np.testing.assert_array_equal(counts, [5.0, 7.0])
    assert above == 11.0


@pytest.mark.parametrize("edges", [[1.0], [0.0, 0.0], [1.0, 0.0]])
def test_edges_that_do_not_rise_are_refused(edges):
    with pytest.raises(RheoscopeError, match="must rise"):
        stats.Histogram(np.array(edges))


def test_accumulators_that_do_not_fit_are_refused():
    for one, other in (
        (stats.Mean((2,)), stats.Mean((3,))),
        (stats.Mean((2,)), stats.Moments((2,))),
        (stats.Histogram(np.array([0.0, 1.0])), stats.Histogram(np.array([0.0, 2.0]))),
    ):
        with pytest.raises(RheoscopeError, match="do not fit"):
            one.merge(other)
    with pytest.raises(RheoscopeError, match="its state consists of"):
        stats.Moments.from_state(stats.Mean(()).state())
