"""Wavelets: a sinusoid stands as high at every period, and nothing is read where a row ends."""

import math

import numpy as np
import pytest
import pywt
import torch

from rheoscope.instruments.fields.entries import Entries
from rheoscope.instruments.fields.wavelets import (
    Morlet,
    RowEnergies,
    between_steps,
    centred_rows,
    default_scales,
    dominant_scales,
    first_lag,
    least_window,
    step,
    strongest_scales,
)

FINE = tuple((2 ** np.linspace(1, 7, 241)).tolist())


def literal(x, scale, omega0):
    """W(a, τ) as a sum in time, scaled to 1 for a sinusoid of height 1."""
    t = np.arange(len(x))
    centre = t[:, None]
    psi = (np.exp(1j * omega0 * (t - centre) / scale) - math.exp(-(omega0**2) / 2)) * np.exp(
        -(((t - centre) / scale) ** 2) / 2
    )
    return 2 / math.sqrt(2 * math.pi) / scale * (psi.conj() @ x)


@pytest.mark.parametrize("omega0", [5.0, 6.0])
@pytest.mark.parametrize("period", [3, 5, 11.7, 17, 40, 90])
def test_a_sinusoid_of_any_period_peaks_at_its_scale_with_equal_height(period, omega0):
    x = 0.3 * torch.cos(2 * math.pi * torch.arange(2048, dtype=torch.float64) / period + 0.7)
    morlet = Morlet(FINE, 2048, omega0=omega0)
    height = morlet.coefficients(x)[:, 1024].abs().numpy()
    assert height.max() == pytest.approx(0.3, rel=0.02)
    assert morlet.periods[height.argmax()] == pytest.approx(period, rel=0.02)


def test_coefficients_are_the_sum_in_time():
    x = torch.randn(101, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    scales = (4.0, 6.5, 13.0)
    W = Morlet(scales, 101).coefficients(x).numpy()
    for row, scale in zip(W, scales, strict=True):
        np.testing.assert_allclose(row, literal(x.numpy(), scale, 6.0), atol=1e-5 * abs(row).max())


def test_coefficients_are_those_of_pywavelets_up_to_its_norm():
    x = np.random.default_rng(5).normal(size=1000)
    scales = np.array([32.0, 45.0, 64.0])  # theirs stand half a token off, which shows at small scales
    theirs, _ = pywt.cwt(x, scales, f"cmor2.0-{6 / (2 * math.pi):.12f}", method="fft", precision=14)
    ours = Morlet(tuple(scales), 1000).coefficients(torch.from_numpy(x)).numpy()
    inside = slice(200, 800)
    scaled = np.abs(theirs) * 2 / np.sqrt(scales)[:, None]
    np.testing.assert_allclose(np.abs(ours)[:, inside], scaled[:, inside], atol=0.03 * scaled[:, inside].max())


def test_a_constant_has_no_energy_and_does_without_the_admissible_term():
    x = torch.ones(4096, dtype=torch.float64)
    middle = slice(2000, 2100)
    exact = Morlet((4.0, 16.0), 4096).coefficients(x)[:, middle].abs().max()
    published = Morlet((4.0, 16.0), 4096, omega0=2.0, admissible=False).coefficients(x)[:, middle].abs().max()
    assert exact < 1e-9
    assert published > 0.05


def test_single_precision_suffices():
    x = torch.randn(7, 256, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    morlet = Morlet(default_scales(256), 256)
    exact, single = morlet.coefficients(x).abs(), morlet.coefficients(x.float()).abs()
    assert single.dtype == torch.float32
    assert (single - exact).abs().max() < 1e-5 * exact.max()


def test_default_scales_are_the_published_ones_at_256_and_reach_further_in_longer_windows():
    np.testing.assert_allclose(default_scales(256), 2 ** np.linspace(1, 6, 20))
    assert default_scales(512)[-1] == pytest.approx(128)
    assert all(least_window(scale) <= window for window in (16, 29, 64, 256) for scale in default_scales(window))


def test_the_cone_leaves_out_what_is_nearer_to_an_end_than_root_two_scales():
    morlet = Morlet((2.0, 5.0), 60)
    outside = morlet.outside_cone(np.array([[0, 39], [0, -1]]))
    for scale, row in zip(morlet.scales, outside[0], strict=True):
        literal = [lag < math.sqrt(2) * scale or lag > 39 - math.sqrt(2) * scale for lag in range(60)]
        assert row.tolist() == literal
    assert outside[1].all()


def test_what_lies_beyond_the_ends_of_a_row_does_not_wrap_around():
    x = torch.zeros(256, dtype=torch.float64)
    x[-1] = 1.0
    far = Morlet((64.0,), 256).coefficients(x).abs()[0]
    assert far[0] < 1e-3 * far[-1]
    assert (far.diff() > 0).all()


def test_uniform_attention_has_no_energy_at_any_scale():
    entries = Entries(64, causal=True, skip_rows=4, sink="separate")
    A = torch.tril(torch.ones(64, 64, dtype=torch.float64))
    A /= A.sum(1, keepdim=True)
    energies = RowEnergies(Morlet(default_scales(64), 64), entries.support)
    by_lag, by_row = energies(entries.rows(entries.packed(A[None])))
    assert by_lag.max() < 1e-30
    assert by_row.max() < 1e-30


def test_row_energies_are_the_sum_over_the_lags_evaluated_inside_the_cone_row_by_row():
    window, scales = 64, (3.5, 5.0, 7.0, 15.0)  # evaluated at every lag, and at every second and fourth
    entries = Entries(window, causal=True, skip_rows=5, sink="separate")
    A = torch.rand(3, window, window, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tril()
    by_lag, by_row = RowEnergies(Morlet(scales, window), entries.support)(entries.rows(entries.packed(A)))
    expected = np.zeros((3, len(scales), window, window))
    for s in range(3):
        for query in range(5, window):
            row = A[s, query, 1 : query + 1].flip(0).numpy()  # lag 0 first, key 0 left out
            padded = np.concatenate([row - row.mean(), np.zeros(window - len(row))])
            W = Morlet(scales, window).coefficients(torch.from_numpy(padded)).numpy()
            for index, scale in enumerate(scales):
                lag = np.arange(window)
                inside = (lag >= math.sqrt(2) * scale) & (lag <= len(row) - 1 - math.sqrt(2) * scale)
                inside &= (lag - first_lag(scale)) % step(scale) == 0
                expected[s, index, query] = np.abs(W[index]) ** 2 * inside
    np.testing.assert_allclose(by_lag, expected.sum(2), rtol=1e-5, atol=1e-14)
    np.testing.assert_allclose(by_row, expected.sum(3), rtol=1e-5, atol=1e-14)


def test_all_mass_at_lag_17_peaks_at_lag_17_and_the_more_the_finer_the_scale():
    entries = Entries(96, causal=True, skip_rows=8, sink="separate")
    A = torch.zeros(96, 96, dtype=torch.float64)
    A[torch.arange(18, 96), torch.arange(1, 79)] = 1.0
    morlet = Morlet(default_scales(96), 96)
    energies = RowEnergies(morlet, entries.support)
    by_lag, _ = energies(entries.rows(entries.packed(A[None])))
    with np.errstate(invalid="ignore"):
        profile = np.nan_to_num(between_steps(by_lag[0] / energies.count_by_lag))
    reached = np.array(morlet.scales) * math.sqrt(2) < 16
    assert reached.sum() > 8
    apart = np.array([step(scale) for scale in morlet.scales])[reached]
    assert (abs(profile[reached].argmax(1) - 17) <= apart / 2).all()
    assert profile[:, 17].argmax() <= 1  # half of the band of scale 2 lies beyond what whole tokens resolve
    assert (np.diff(profile[reached][1:, 17]) < 0).all()


def test_attention_with_period_12_stands_out_at_the_scale_of_period_12():
    window = 128
    entries = Entries(window, causal=True, skip_rows=8, sink="separate")
    lag = torch.arange(window)[:, None] - torch.arange(window)
    A = (1 + torch.cos(2 * math.pi * lag / 12)).tril().double()
    A /= A.sum(1, keepdim=True)
    morlet = Morlet(default_scales(window), window)
    energies = RowEnergies(morlet, entries.support)
    by_lag, _ = energies(entries.rows(entries.packed(A[None])))
    energy = by_lag[0].sum(1) / energies.count_by_lag.sum(1)
    found = dominant_scales(energy, np.zeros_like(energy), np.array(morlet.scales))
    assert 2 * math.pi * found[0] / 6 == pytest.approx(12, rel=0.1)


def test_centred_rows_are_centred_over_the_entries_that_they_have():
    rows = torch.rand(2, 3, 10, dtype=torch.float64)
    centred = centred_rows(rows, np.array([[0, 9], [2, 5], [0, -1]]))
    assert centred[:, :2].sum(-1).abs().max() < 1e-14
    assert (centred[:, 1, [0, 1, 6, 7, 8, 9]] == 0).all()
    assert (centred[:, 2] == 0).all()


def test_a_profile_that_only_rises_or_falls_has_no_dominant_scale_though_its_raw_maximum_is_an_end():
    scales = 2 ** np.linspace(1, 6, 20)
    null = np.ones(20)
    assert np.isnan(dominant_scales(scales**1.5, null, scales)).all()
    assert np.isnan(dominant_scales(1 / scales, null / 100, scales)).all()
    assert strongest_scales(scales**-0.5, scales).tolist() == scales[:-5:-1].tolist()


def test_dominant_scales_are_relative_to_the_null_and_the_clearest_comes_first():
    scales = 2 ** np.linspace(1, 6, 20)
    null = scales**-2.0
    bumps = 1 + 5 * np.exp(-((np.arange(20) - 5.0) ** 2)) + 9 * np.exp(-((np.arange(20) - 13.0) ** 2))
    found = dominant_scales(null * bumps, null, scales)
    assert found[:2].tolist() == [scales[13], scales[5]]
    assert np.isnan(found[2:]).all()
    assert np.isnan(dominant_scales(null * bumps / 20, null, scales)).all()


def test_coefficients_at_fewer_lags_lose_nothing_that_a_straight_line_would_not_show():
    assert [step(scale) for scale in (2.0, 6.7, 7.0, 14.0, 64.0)] == [1, 1, 2, 4, 16]
    x = torch.randn(1, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x -= x.mean()
    morlet = Morlet((7.0, 15.0), 200)
    energies = RowEnergies(morlet, np.array([[0, 199]]))
    found = between_steps(np.where(energies.count_by_lag > 0, energies(x[None])[0][0], np.nan))
    exact = morlet.coefficients(x)[0].abs().square().numpy()
    inside = np.isfinite(found)
    assert abs(found - exact)[inside].max() < 0.05 * exact.max()


def test_a_peak_within_the_error_of_its_surroundings_is_none():
    scales = 2 ** np.linspace(1, 6, 20)
    bump = 1 + 0.3 * np.exp(-((np.arange(20) - 9.0) ** 2))
    null = np.full(20, 0.5)
    assert dominant_scales(bump, null, scales, relative_error=0.1)[0] == scales[9]
    assert np.isnan(dominant_scales(bump, null, scales, relative_error=0.2)).all()


def test_fewer_lags_change_the_energy_of_scales_alike_and_hardly():
    generator = torch.Generator().manual_seed(0)
    lag = (torch.arange(256)[:, None] - torch.arange(256)).clamp(min=0)
    scores = torch.randn(4, 256, 256, generator=generator) - 0.5 * torch.log1p(lag.float())
    A = scores.masked_fill(torch.ones(256, 256).triu(1).bool(), -torch.inf).softmax(-1)
    entries = Entries(256, causal=True, skip_rows=8, sink="separate")
    morlet = Morlet((10.0, 20.0, 40.0, 64.0), 256)
    energies = RowEnergies(morlet, entries.support)
    rows = entries.rows(entries.packed(A))
    fewer = energies(rows)[0].sum((0, 2)) / energies.count_by_lag.sum(1) / 4
    inside = ~morlet.outside_cone(entries.support)
    W = morlet.coefficients(centred_rows(rows, entries.support)).abs().square().numpy()
    ratio = fewer / ((W * inside).sum((0, 1, 3)) / inside.sum((0, 2)) / 4)
    assert (abs(ratio - 1) < 0.04).all()
    assert np.ptp(ratio) < 0.03
