"""The decomposition: planted ranks and powers come back, and eigenvalues are those of a PCA."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from rheoscope.instruments.fields.ensemble import _jackknife, balanced_groups
from rheoscope.instruments.fields.entries import Entries
from rheoscope.instruments.fields.pod import (
    LEVELS,
    centred_gram,
    h_star,
    held_out,
    lag_grams,
    lag_window,
    modes,
    power_law,
    spectrum,
    subset_spectrum,
)

ENTRIES = Entries(23, causal=True, skip_rows=3, sink="separate")
BANDS = (4.0, 7.0, math.inf)


def maps(n=17, *, window=23, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(n, window, window, generator=generator, dtype=torch.float64)
    scores = scores.masked_fill(torch.ones(window, window).triu(1).bool(), -torch.inf)
    return scores.softmax(-1).to(dtype)


def centred(fields):
    packed = ENTRIES.packed(fields).double()
    return (packed - packed.mean(0)) * torch.from_numpy(ENTRIES.kept)


def windows(kind="band"):
    return torch.from_numpy(np.stack([lag_window(kind, band, ENTRIES.lags) for band in BANDS]))


def windowed(fields, weights):
    """Windowed snapshots from the maps themselves: query minus key, sink column and first rows out."""
    lag = torch.arange(23)[:, None] - torch.arange(23)
    field = fields.double() * weights[lag.clamp(min=0)] * (lag >= 0)
    field[:, :3] = 0
    field[:, :, 0] = 0
    return field.flatten(1).numpy()


@pytest.mark.parametrize("kind", ["band", "low_pass", "none"])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-8), (torch.float32, 1e-5)])
def test_eigenvalues_and_subspaces_are_those_of_scikit_learn_on_the_same_windowed_snapshots(kind, dtype, close):
    fields = maps(dtype=dtype)
    X, weights = centred(fields), windows(kind)
    found = spectrum(lag_grams(X, ENTRIES.bounds.tolist(), weights).windowed, len(X))
    exact = maps()
    for band in range(len(BANDS)):
        pca = PCA(svd_solver="full").fit(windowed(exact, weights[band]))
        values = found.eigenvalues[band].numpy()
        theirs = pca.explained_variance_[:-1] * 16 / 17  # theirs divides by N - 1
        np.testing.assert_allclose(values, theirs, rtol=close)
        by_entry = weights[band][torch.from_numpy(ENTRIES.lag)]
        band_found = type(found)(found.eigenvalues[band], found.vectors[band])
        phi = modes(X, band_found, 17, window=by_entry, n_modes=5).phi.numpy()
        flat = np.zeros((5, 23 * 23))
        flat[:, ENTRIES.flat.numpy()] = phi
        overlap = np.linalg.svd(flat @ pca.components_[:5].T, compute_uv=False)
        np.testing.assert_allclose(overlap, 1, atol=close)


def test_modes_are_orthonormal_with_their_largest_entry_positive():
    X, weights = centred(maps()), windows()
    found = spectrum(lag_grams(X, ENTRIES.bounds.tolist(), weights[:1]).windowed, 17)
    by_entry = weights[0][torch.from_numpy(ENTRIES.lag)]
    phi = modes(X, type(found)(*(part[0] for part in found)), 17, window=by_entry, n_modes=6).phi
    np.testing.assert_allclose((phi @ phi.T).numpy(), np.eye(6), atol=1e-10)
    assert (phi.max(1).values == phi.abs().max(1).values).all()


def test_the_reconstruction_error_is_the_tail_sum_and_no_random_basis_does_better():
    X = centred(maps())
    found = spectrum((X @ X.T)[None], 17)
    phi = modes(
        X, type(found)(*(part[0] for part in found)), 17, window=torch.ones(X.shape[1]).double(), n_modes=16
    ).phi
    generator = torch.Generator().manual_seed(8)
    for n in (0, 1, 4, 11, 16):
        error = float((X - X @ phi[:n].T @ phi[:n]).square().sum() / 17)
        assert error == pytest.approx(float(found.eigenvalues[0, n:].sum()), abs=1e-8)
        for _ in range(20):
            within = torch.linalg.qr(X.T @ torch.randn(17, max(n, 1), generator=generator, dtype=torch.float64)).Q[
                :, :n
            ]
            assert float((X - X @ within @ within.T).square().sum() / 17) >= error - 1e-12


def test_held_out_energy_is_what_the_modes_of_the_other_half_leave_of_these_snapshots():
    X = centred(maps())
    train = np.arange(17) % 3 > 0
    found = held_out((X @ X.T)[None], train)
    own, other = X[torch.from_numpy(train)], X[torch.from_numpy(~train)]
    basis = torch.linalg.svd(own - own.mean(0), full_matrices=False).Vh
    x = other - own.mean(0)
    assert found.total[0] == pytest.approx(float(x.square().sum()))
    for n in range(11):
        left = x - x @ basis[:n].T @ basis[:n]
        assert found.left_out[0, n] == pytest.approx(float(left.square().sum()), rel=1e-9)


def test_held_out_snapshots_of_the_same_few_patterns_are_reconstructed_and_others_are_not():
    generator = torch.Generator().manual_seed(2)
    patterns = torch.randn(3, 400, generator=generator, dtype=torch.float64)
    X = torch.randn(40, 3, generator=generator, dtype=torch.float64) @ patterns
    noise = torch.randn(40, 400, generator=generator, dtype=torch.float64)
    train = np.arange(40) % 2 == 0
    shared, apart = (held_out((Y @ Y.T)[None], train) for Y in (X, noise))
    assert shared.left_out[0, 3] < 1e-12 * shared.total[0]
    assert apart.left_out[0, -1] > 0.9 * apart.total[0]


@pytest.mark.parametrize("rank", [1, 2, 5, 9])
def test_a_planted_rank_is_h_star_at_a_tiny_epsilon(rank):
    generator = torch.Generator().manual_seed(rank)
    X = torch.randn(20, rank, generator=generator, dtype=torch.float64) @ torch.randn(
        rank, 300, generator=generator, dtype=torch.float64
    )
    X -= X.mean(0)
    values = spectrum(X @ X.T, 20).eigenvalues.numpy()
    assert h_star(values, 1e-9) == rank


def test_a_field_of_rank_one_needs_one_mode_at_every_level_and_not_two():
    amplitude, pattern = np.random.default_rng(0).normal(size=(9, 1)), np.random.default_rng(1).normal(size=(1, 80))
    X = torch.from_numpy((amplitude - amplitude.mean()) @ pattern)
    values = spectrum(X @ X.T, 9).eigenvalues.numpy()
    assert [h_star(values, level) for level in LEVELS] == [1, 1, 1]


def test_a_constant_field_needs_no_mode():
    assert h_star(np.zeros(7), 0.1) == 0
    assert h_star(np.full(7, 1e-20), 0.1, floor=1e-12) == 0


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30), st.sampled_from(LEVELS))
def test_h_star_is_the_least_number_that_is_enough(values, epsilon):
    values = np.sort(values)[::-1]
    n = int(h_star(values, epsilon))
    assert values[n:].sum() <= epsilon * values.sum() * (1 + 1e-9)
    assert n == 0 or values[n - 1 :].sum() > epsilon * values.sum() * (1 - 1e-9)
    assert n <= len(values)


def test_h_star_of_many_random_snapshots_never_reaches_their_number():
    X = torch.randn(150, 4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    X -= X.mean(0)
    values = spectrum(X @ X.T, 150).eigenvalues.numpy()
    assert len(values) == 149
    assert 140 < h_star(values, 0.01) <= 149
    assert 120 < h_star(values, 0.10) < 149


def test_energy_that_no_eigenvalue_holds_counts_as_left_out():
    values = np.array([5.0, 3.2, 0.5])
    assert h_star(values, 0.10) == 2
    assert h_star(values, 0.10, discarded=0.5) == 3
    assert math.isnan(h_star(values, 0.10, discarded=3.0))


@pytest.mark.parametrize("beta", [0.4, 1.0, 2.3])
def test_a_power_law_returns_its_exponent_and_an_interval_that_closes_on_it(beta):
    fit = power_law(np.arange(1, 100.0) ** -beta, 120)
    assert fit.beta == pytest.approx(beta, abs=1e-10)
    assert fit.low == pytest.approx(beta, abs=1e-9)
    assert fit.high == pytest.approx(beta, abs=1e-9)
    assert fit.last == 30


def test_the_interval_of_the_exponent_covers_it_in_nineteen_of_twenty_noisy_spectra():
    rng = np.random.default_rng(4)
    k = np.arange(1, 31.0)
    fits = [power_law(k**-1.2 * np.exp(0.2 * rng.normal(size=30)), 120) for _ in range(400)]
    assert 0.92 < np.mean([fit.low <= 1.2 <= fit.high for fit in fits]) < 0.98


def test_a_spectrum_that_bends_shows_in_the_range_of_exponents():
    k = np.arange(1, 100.0)
    fit = power_law(k**-0.5 * np.exp(-k / 20), 120)
    assert fit.least < fit.beta < fit.most


@pytest.mark.parametrize(("values", "n"), [(np.ones(4), 100), (np.arange(1, 50.0) ** -1, 19), (np.zeros(0), 50)])
def test_fewer_than_five_usable_eigenvalues_give_no_exponent_rather_than_one(values, n):
    fit = power_law(values, n)
    assert math.isnan(fit.beta)
    assert math.isnan(fit.low)
    assert fit.last == 0


def test_eigenvalues_at_the_level_of_rounding_are_not_fitted():
    values = np.concatenate([np.arange(1, 9.0) ** -1, np.full(60, 1e-14)])
    assert power_law(values, 200).last == 8


def test_a_band_window_passes_its_own_lag_and_a_low_pass_the_diagonal():
    lags = np.arange(-40, 41)
    band, low = lag_window("band", 10.0, lags), lag_window("low_pass", 10.0, lags)
    assert band[lags == 10] == band[lags == -10] == 1
    assert band[lags == 15] == pytest.approx(math.exp(-0.5))
    assert low[lags == 0] == 1
    assert low[lags == 10] == pytest.approx(math.exp(-0.5))
    assert (lag_window("none", 10.0, lags) == 1).all()


def test_windows_of_different_scales_give_different_fields_of_a_causal_map():
    X = centred(maps())
    found = spectrum(lag_grams(X, ENTRIES.bounds.tolist(), windows("low_pass")).windowed, 17).eigenvalues
    assert found[0].sum() < 0.97 * found[1].sum() < 0.95 * found[2].sum()
    off_diagonal = ENTRIES.lag > 0
    assert X[:, torch.from_numpy(off_diagonal)].square().sum() > 0.5 * X.square().sum()


def test_a_subset_of_snapshots_has_the_spectrum_of_itself_alone():
    fields = maps()
    chosen = np.array([1, 4, 5, 9, 10, 16])
    X, alone = centred(fields), centred(fields[torch.from_numpy(chosen)])
    np.testing.assert_allclose(
        subset_spectrum((X @ X.T)[None], chosen)[0],
        spectrum(alone @ alone.T, 6).eigenvalues.numpy(),
        rtol=1e-9,
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.booleans(), min_size=17, max_size=17).filter(lambda m: sum(m) > 1))
def test_a_centred_gram_is_the_gram_of_centred_rows(seed, members):
    X = centred(maps(seed=seed))
    member = torch.tensor(members)
    rows = X[member] - X[member].mean(0)
    found = centred_gram(X @ X.T, member)
    np.testing.assert_allclose(found[member][:, member].numpy(), (rows @ rows.T).numpy(), atol=1e-12)
    assert found[~member].abs().sum() == 0


def test_coefficients_and_modes_make_the_windowed_snapshots_again():
    X, weights = centred(maps()), windows()
    found = spectrum(lag_grams(X, ENTRIES.bounds.tolist(), weights[:1]).windowed, 17)
    by_entry = weights[0][torch.from_numpy(ENTRIES.lag)]
    phi, coefficients = modes(X, type(found)(*(part[0] for part in found)), 17, window=by_entry, n_modes=16)
    np.testing.assert_allclose((coefficients @ phi).numpy(), (X * by_entry).numpy(), atol=1e-10)
    np.testing.assert_allclose((X * by_entry @ phi.T).numpy(), coefficients.numpy(), atol=1e-10)


@pytest.mark.parametrize(("n_documents", "per_document"), [(16, 2), (12, 8), (10, 15)])
def test_the_error_of_h_star_is_its_spread_over_other_texts_whatever_the_size_of_the_groups(n_documents, per_document):
    generator = np.random.default_rng(0)
    place = np.repeat(np.arange(n_documents), per_document)
    ranks, errors = [], []
    for _ in range(40):
        X = generator.standard_normal((len(place), 300)) * np.arange(1, 301) ** -0.3
        X = torch.from_numpy(X - X.mean(0))
        grams = (X @ X.T)[None]
        ranks.append(h_star(spectrum(grams, len(X)).eigenvalues.numpy(), 0.10)[0])
        errors.append(_jackknife(grams, place, np.zeros(1))[0][0, 0])
    assert np.mean(errors) < 3 * max(np.std(ranks), 0.3)


def test_groups_hold_whole_documents_and_are_as_alike_as_they_can_be():
    for sizes in ([1] * 150, [15] * 10, [8] * 12, [40, 3, 3, 3, 3, 3, 3, 3, 3], [5], [2, 7]):
        group = balanced_groups(np.repeat(np.arange(len(sizes)), sizes))
        of_document = [np.unique(part) for part in np.split(group, np.cumsum(sizes)[:-1])]
        assert all(len(groups) == 1 for groups in of_document)
        held = np.bincount(group)
        assert (held > 0).all()
        assert np.ptp(held) <= max(sizes)
    assert np.ptp(np.bincount(balanced_groups(np.repeat(np.arange(10), 15)))) == 0
