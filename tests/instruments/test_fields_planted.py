"""Fields whose answer is known: mass at one lag, planted ranks, constant maps, ensembles beyond the memory budget."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rheoscope.errors import Refused, RheoscopeError
from rheoscope.instruments.fields.coherence import RowCoefficients, coherence
from rheoscope.instruments.fields.ensemble import Design, ensemble_readings
from rheoscope.instruments.fields.entries import Entries
from rheoscope.instruments.fields.fields import Fields
from rheoscope.instruments.fields.layer import Layer, Plan
from rheoscope.instruments.fields.shelf import Shelf
from rheoscope.instruments.fields.snapshots import AllSnapshots, LeadingSubspace
from rheoscope.instruments.fields.wavelets import Morlet, centred_rows, default_scales
from rheoscope.models.view import ModelView
from tests.tiny import tiny

from .texts import corpus_of

WINDOW, N = 64, 24
ENTRIES = Entries(WINDOW, causal=True, skip_rows=8, sink="separate")
DESIGN = Design(bands=(4.0, 8.0, np.inf), window="band", n_modes=3, n_bins=32, counts=(8, 16, N), ranks=(1, 2, 4, 8))
LAG = torch.arange(WINDOW)[:, None] - torch.arange(WINDOW)


def read(fields, *, rank=None):
    """Readings of a layer whose head-averaged maps are given: [snapshot, query, key]."""
    n = len(fields)
    corpus = corpus_of(np.zeros((n, WINDOW), int))
    morlet = Morlet(default_scales(WINDOW), WINDOW)
    layer = Layer(Plan(corpus, ENTRIES, morlet, np.arange(n), np.arange(4), np.arange(WINDOW), 0, rank or "memory"))
    for begin in range(0, n, 5):
        windows = np.arange(begin, min(begin + 5, n))
        layer.observe(fields[torch.from_numpy(windows)][None], windows)
    positions = np.array([40, 50, 60])
    return layer.readings(DESIGN, RowCoefficients(ENTRIES, positions, DESIGN.bands[:2], omega0=morlet.omega0))


def with_extra_mass_at(lag, amounts):
    """Even attention, and an amount that differs by snapshot at one lag."""
    A = torch.ones(WINDOW, WINDOW, dtype=torch.float64).tril()
    A = A / A.sum(1, keepdim=True)
    return A + torch.as_tensor(amounts)[:, None, None] * (lag == LAG)


def amounts(n=N, seed=0):
    return np.random.default_rng(seed).uniform(0.2, 0.8, n)


def test_mass_at_lag_17_shows_at_lag_17_in_profile_intensity_and_mode():
    found = read(with_extra_mass_at(17, amounts()))
    assert np.nanargmax(found["lag_profile"]) == 17
    assert np.nanargmax(found["intensity_by_lag"]) == 17
    assert (found["mode_peak_lag"][:, 0] == 17).all()
    assert np.nanmax(np.delete(found["intensity_by_lag"], 17)) < 1e-9


def test_the_window_whose_scale_is_nearest_the_lag_holds_the_most_energy():
    near = read(with_extra_mass_at(4, amounts()))["eigenvalues"][:, 0]
    far = read(with_extra_mass_at(9, amounts()))["eigenvalues"][:, 0]
    assert near[0] > near[1]
    assert far[1] > far[0]
    assert near[2] == pytest.approx(near[0], rel=1e-5)


def test_energy_off_the_diagonal_is_seen_at_every_scale():
    found = read(with_extra_mass_at(17, amounts()))["eigenvalues"][:, 0]
    expected = [np.exp(-(13.0**2) / 4), np.exp(-(9.0**2) / 16), 1.0]
    np.testing.assert_allclose(found / found[2], expected, rtol=1e-4)


def test_one_amplitude_needs_one_mode_and_equal_maps_need_none():
    one = read(with_extra_mass_at(5, amounts()))
    none = read(with_extra_mass_at(5, np.full(N, 0.5)))
    assert (one["h_star"] == 1).all()
    assert (none["h_star"] == 0).all()
    assert (none["h_star_se"] == 0).all()
    assert np.isnan(none["beta"]).all()
    assert float(none["intensity"]) < 1e-12


@pytest.mark.parametrize("rank", [2, 5])
def test_a_field_of_planted_rank_needs_so_many_modes(rank):
    generator = torch.Generator().manual_seed(rank)
    amplitudes = torch.randn(N, rank, generator=generator, dtype=torch.float64)
    patterns = torch.linalg.qr(torch.randn(WINDOW**2, rank, generator=generator, dtype=torch.float64)).Q
    fields = 0.02 + torch.einsum("sr,er->se", amplitudes, patterns).unflatten(1, (WINDOW, WINDOW)).tril()
    found = read(fields)
    tail = found["eigenvalues"][2]
    assert tail[rank] < 1e-11 * tail[0]
    assert found["held_out_error"][2, DESIGN.ranks.index(8)] < 1e-9
    assert found["h_star"][2, 2] <= rank


def test_too_few_usable_modes_give_no_exponent():
    found = read(with_extra_mass_at(5, amounts()))
    assert np.isnan(found["beta"]).all()
    assert np.isnan(found["spectral_temperature"]).all()
    assert (found["beta_last"] == 0).all()


def noise(n=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, WINDOW, WINDOW, generator=generator, dtype=torch.float64).tril()


def test_unrelated_maps_are_limited_by_their_number_and_say_so():
    found = read(noise())
    assert (found["h_star_limited"] == 1).all()
    assert (found["h_star"] <= N - 1).all()
    curve = found["h_star_by_count"][2, :, 0]
    assert curve[0] < curve[1] < curve[2] == found["h_star"][2, 0]
    assert (found["held_out_error"][2] > 0.9).all()
    assert (read(with_extra_mass_at(5, amounts()))["h_star_limited"] == 0).all()


def test_errors_are_taken_over_documents_and_cover_the_scatter_of_repeated_draws():
    draws = [read(with_extra_mass_at(5, amounts(seed=seed))) for seed in range(40)]
    values = np.array([float(draw["intensity"]) for draw in draws])
    errors = np.array([float(draw["intensity_se"]) for draw in draws])
    assert 0.6 < errors.mean() / values.std() < 1.5


def test_coherent_rows_are_coherent_and_unrelated_ones_are_not_once_chance_is_taken_off():
    rng = np.random.default_rng(0)
    W = rng.normal(size=(400, 3)) + 1j * rng.normal(size=(400, 3))
    W[:, 1] = 2j * W[:, 0]
    raw, corrected = coherence(W - W.mean(0), 400)
    assert raw[0, 1] == pytest.approx(1)
    assert corrected[0, 1] == pytest.approx(1)
    assert raw.diagonal() == pytest.approx(np.ones(3))
    many = [
        coherence(draw - draw.mean(0), 12)
        for draw in (rng.normal(size=(300, 12, 2)) + 1j * rng.normal(size=(300, 12, 2)))
    ]
    assert np.mean([one[0][0, 1] ** 2 for one in many]) == pytest.approx(1 / 11, rel=0.15)


def test_rows_that_share_an_amplitude_at_one_lag_are_coherent():
    found = read(with_extra_mass_at(6, amounts()))
    assert found["coherence"][0] == pytest.approx(np.ones((3, 3)), abs=1e-5)


def ensembles(fields, rank):
    packed = ENTRIES.packed(fields)
    whole = AllSnapshots(len(fields), len(ENTRIES))
    part = LeadingSubspace(len(fields), len(ENTRIES), rank=rank)
    for begin in range(0, len(fields), 3):
        windows = np.arange(begin, min(begin + 3, len(fields)))
        for one in (whole, part):
            one.update(windows, packed[torch.from_numpy(windows)])
    return whole, part


def decaying(n=60, seed=1):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.arange(1, 41, dtype=torch.float64) ** -1.5
    patterns = torch.randn(40, WINDOW**2, generator=generator, dtype=torch.float64) * sizes[:, None]
    return (torch.randn(n, 40, generator=generator, dtype=torch.float64) @ patterns).unflatten(
        1, (WINDOW, WINDOW)
    ) + 0.3


def test_beyond_the_budget_eigenvalues_are_bounded_by_the_stated_energy_under_every_window():
    whole, part = ensembles(decaying(), rank=10)
    exact = ensemble_readings(whole.ensemble(), ENTRIES, DESIGN, np.arange(60))
    found = ensemble_readings(part.ensemble(), ENTRIES, DESIGN, None)
    total = exact["eigenvalues"].sum(1)
    discarded = found["discarded_share"] * total
    assert (found["discarded_share"] > 1e-3).all()
    for band in range(3):
        n = min(found["eigenvalues"].shape[1], exact["eigenvalues"].shape[1])
        gap = exact["eigenvalues"][band, :n] - found["eigenvalues"][band, :n]
        assert (gap > -1e-5 * total[band]).all()
        assert (gap < discarded[band] + 1e-5 * total[band]).all()
        assert found["eigenvalues"][band].sum() + discarded[band] == pytest.approx(total[band], rel=1e-5)
    enough = np.isfinite(found["h_star"])
    assert enough.any()
    assert (found["h_star"][enough] >= exact["h_star"][enough]).all()
    assert float(found["intensity"]) == pytest.approx(float(exact["intensity"]), rel=1e-6)
    np.testing.assert_allclose(found["intensity_by_lag"], exact["intensity_by_lag"], rtol=1e-5)


def test_beyond_the_budget_a_field_of_few_patterns_loses_nothing():
    whole, part = ensembles(with_extra_mass_at(5, amounts(60)), rank=8)
    exact = ensemble_readings(whole.ensemble(), ENTRIES, DESIGN, np.arange(60))
    found = ensemble_readings(part.ensemble(), ENTRIES, DESIGN, None)
    assert (found["discarded_share"] < 1e-6).all()
    assert (found["h_star"] == exact["h_star"]).all()
    np.testing.assert_allclose(found["eigenvalues"][:, 0], exact["eigenvalues"][:, 0], rtol=1e-5)


def test_beyond_the_budget_parts_still_merge_within_the_stated_energy():
    fields = decaying()
    packed = ENTRIES.packed(fields)
    left, right = (LeadingSubspace(60, len(ENTRIES), rank=10) for _ in range(2))
    left.update(np.arange(25), packed[:25])
    right.update(np.arange(25, 60), packed[25:])
    right.take_in(left.state())
    whole, _ = ensembles(fields, rank=10)
    exact, found = whole.ensemble(), right.ensemble()
    assert found.n == 60
    np.testing.assert_allclose(found.mean, exact.mean, atol=1e-6)
    scatter = exact.rows.square().sum(0).numpy()
    np.testing.assert_allclose(found.rows.square().sum(0).numpy() + found.discarded, scatter, rtol=1e-4, atol=1e-6)


def test_memory_beyond_the_budget_does_not_grow_with_the_number_of_snapshots():
    part = LeadingSubspace(500, len(ENTRIES), rank=9)
    sizes = []
    for window in range(200):
        part.update(np.array([window]), torch.rand(1, len(ENTRIES)))
        sizes.append(len(part.rows))
    assert max(sizes[100:]) <= max(sizes[:100]) <= 3 * 9 + 1


def test_a_budget_too_small_for_eight_directions_is_refused_with_the_one_that_would_do():
    view = ModelView(tiny("llama"))
    corpus = corpus_of(np.random.default_rng(0).integers(3, 61, (9000, 29)))
    with pytest.raises(Refused, match=r"0 MiB hold 0 maps .* or 0 directions .* set fields.budget_mib to at least 1"):
        Fields(view, corpus, Fields.Options(budget_mib=0))
    many = Fields.Options(budget_mib=1, disk_mib=0, n_snapshots=9000)
    assert isinstance(Fields(view, corpus, many).storage, int)
    assert Fields(view, corpus, many).storage >= 8
    assert Fields(view, corpus, replace(many, disk_mib=64)).storage == "disk"
    assert Fields(view, corpus, replace(many, budget_mib=64)).storage == "memory"


def test_windows_too_long_for_any_ensemble_are_refused_before_their_maps_are_laid_out():
    view = ModelView(tiny("llama"))
    corpus = corpus_of(np.zeros((8, 2**20), int))
    with pytest.raises(Refused, match="192 MiB hold 0 maps of 1048576 tokens"):
        Fields(view, corpus, Fields.Options(bands=(4.0,), scales=(4.0,)))


def test_snapshots_on_disk_are_those_in_memory_bit_for_bit():
    packed = ENTRIES.packed(noise())
    memory, disk = (AllSnapshots(len(packed), len(ENTRIES), on_disk=on_disk) for on_disk in (False, True))
    for rows in (np.arange(9), np.arange(15, len(packed)), np.arange(9, 15)):
        for snapshots in (memory, disk):
            snapshots.update(rows, packed[rows])
    for one, other in zip(memory.ensemble(), disk.ensemble(), strict=True):
        np.testing.assert_array_equal(one, other)
    again = AllSnapshots(len(packed), len(ENTRIES), on_disk=True)
    again.restore(disk.state())
    np.testing.assert_array_equal(again.ensemble().rows, memory.ensemble().rows)


def test_a_full_disk_is_said_in_one_sentence():
    shelf = Shelf(2, 5)
    shelf.file.close()
    shelf.file = open("/dev/full", "r+b", buffering=0)  # noqa: SIM115 - which takes nothing
    with pytest.raises(RheoscopeError, match=r"cannot be written .* make room, set TMPDIR"):
        shelf[np.array([1])] = np.zeros((1, 5), np.float32)
    shelf.file.close()


def test_coefficients_of_rows_are_those_of_the_centred_row_at_the_first_lag_inside_the_cone():
    X = ENTRIES.packed(noise())
    X = X - X.mean(0)
    W = RowCoefficients(ENTRIES, np.array([20, 63]), [4.0, 16.0], omega0=6.0)(X)
    rows = centred_rows(ENTRIES.rows(X), ENTRIES.support)
    exact = Morlet((4.0, 16.0), WINDOW).coefficients(rows[:, 63]).numpy()
    for index, (scale, lag) in enumerate([(4.0, 6), (16.0, 23)]):
        found = W[index, :, 1] * 2 / np.sqrt(2 * np.pi)
        np.testing.assert_allclose(abs(found), abs(exact[:, index, lag]), rtol=1e-3, atol=1e-5 * scale)
    assert np.isnan(W[1, :, 0]).all()
    assert np.isfinite(W[0]).all()
