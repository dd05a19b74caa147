"""Leading planes and directions against dense singular values of the whole table, and what they do to other vectors."""

import pytest
import torch

from rheoscope.linalg.planes import kept_directions, kept_planes, leading_directions, leading_planes
from rheoscope.surgery.calibration import skew_form, symmetric_form

CASES = [(97, 5), (23, 5), (10, 5), (7, 5)]  # vectors, d_head: the last two leave directions of [q; k] unseen


def vectors(n, d_head, *, seed=0):
    """[q; k] with columns of very different length and a common direction, two heads."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, n, 2 * d_head, generator=generator, dtype=torch.float64)
    return (x + 1.5) * torch.logspace(-2, 1, 2 * d_head, dtype=torch.float64)


def tables(x, form):
    return x @ form @ x.mT


def best(table, rank):
    """The best approximation of a rank in the Frobenius norm, by a dense singular value decomposition."""
    U, values, Vh = torch.linalg.svd(table)
    return (U[..., :rank] * values[..., None, :rank]) @ Vh[..., :rank, :]


@pytest.mark.parametrize(("n", "d_head"), CASES)
@pytest.mark.parametrize("rank", [0, 2, 4, 6])
def test_kept_planes_are_the_best_approximation_of_the_dense_skew_table(n, d_head, rank):
    x, form = vectors(n, d_head), skew_form(d_head)
    leading = leading_planes(x.mT @ x, form)
    S = tables(x, form)
    kept = tables(x, kept_planes(leading, rank // 2))
    assert (kept - best(S, rank)).abs().max() < 1e-10 * S.abs().max()
    assert torch.equal(kept_planes(leading, rank // 2), -kept_planes(leading, rank // 2).mT)


@pytest.mark.parametrize(("n", "d_head"), CASES)
@pytest.mark.parametrize("rank", [0, 1, 2, 5])
def test_kept_directions_are_the_best_approximation_of_the_dense_symmetric_table(n, d_head, rank):
    x, form = vectors(n, d_head), symmetric_form(d_head)
    F = tables(x, form)
    kept = tables(x, kept_directions(leading_directions(x.mT @ x, form), rank))
    assert (kept - best(F, rank)).abs().max() < 1e-10 * F.abs().max()


@pytest.mark.parametrize(("n", "d_head"), CASES)
def test_all_planes_and_all_directions_are_the_table_itself(n, d_head):
    x = vectors(n, d_head)
    gram = x.mT @ x
    for form, kept in (
        (skew_form(d_head), kept_planes(leading_planes(gram, skew_form(d_head)), d_head)),
        (symmetric_form(d_head), kept_directions(leading_directions(gram, symmetric_form(d_head)), 2 * d_head)),
    ):
        assert (tables(x, kept) - tables(x, form)).abs().max() < 1e-10 * tables(x, form).abs().max()
        if n > 2 * d_head:  # every direction of [q; k] was seen, so it is the form on any vector
            assert (kept - form).abs().max() < 1e-8


def test_values_are_the_singular_values_of_the_dense_tables():
    x = vectors(23, 5)
    values = leading_planes(x.mT @ x, skew_form(5)).values
    dense = torch.linalg.svdvals(tables(x, skew_form(5)))
    assert (values - dense[:, :10:2]).abs().max() < 1e-10 * dense.max()
    signed = leading_directions(x.mT @ x, symmetric_form(5)).values
    dense = torch.linalg.svdvals(tables(x, symmetric_form(5)))
    assert (signed.abs() - dense[:, :10]).abs().max() < 1e-10 * dense.max()
    assert (signed < 0).any()
    assert (signed > 0).any()
