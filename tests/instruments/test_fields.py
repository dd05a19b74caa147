"""Fields of whole models are those of their attention maps, and what cannot be read is refused in one sentence."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rheoscope.corpus import batches
from rheoscope.errors import Refused, RheoscopeError
from rheoscope.instruments.catalog import out_of_bounds
from rheoscope.instruments.engine import run_pass
from rheoscope.instruments.fields.fields import Fields
from rheoscope.instruments.fields.nulls import chance_corpus
from rheoscope.instruments.measure import measure
from rheoscope.instruments.sampling import spread
from rheoscope.models.view import ModelView
from tests.tiny import Float64Throughout, tiny

from .texts import corpus_of, random_corpus

WINDOW, N = 29, 13
OPTIONS = Fields.Options(skip_rows=3, n_scalogram=5, n_null=8, bands=(4.0, 6.0))


def whole_corpus(n=N, *, window=WINDOW, seed=0, documents=None):
    return corpus_of(np.random.default_rng(seed).integers(3, 61, (n, window)), documents=documents)


def measured(family="llama", *, corpus=None, nulls=False, batch_size=4, **options):
    view = ModelView(tiny(family))
    chosen = {"fields": Fields.Options(**{**vars(OPTIONS), **options})}
    with Float64Throughout():
        return measure(
            view, corpus or whole_corpus(), instruments=["fields"], options=chosen, nulls=nulls, batch_size=batch_size
        )["fields"]


def maps_of(family, corpus):
    """Attention maps of every window by plain transformers: [layer, window, head, query, key]."""
    model = tiny(family)
    model.set_attn_implementation("eager")
    with Float64Throughout(), torch.no_grad():
        tokens = torch.tensor(corpus.tokens, dtype=torch.int64)
        found = model.double()(tokens, attention_mask=torch.ones_like(tokens), output_attentions=True).attentions
    return np.stack([layer.double().numpy() for layer in found])


def literal(fields, *, skip_rows, first_key, causal, weight):
    """Profile over lag, intensity and eigenvalues of windowed snapshots, entry by entry."""
    n, window = len(fields), fields.shape[-1]
    entries = [(i, j) for i in range(skip_rows, window) for j in range(first_key, window) if j <= i or not causal]
    A = np.array([[field[i, j] for i, j in entries] for field in fields])
    lag = np.array([i - j for i, j in entries])
    u = A - A.mean(0)
    profile = {tau: A[:, lag == tau].mean() for tau in np.unique(lag)}
    values = np.linalg.svd(u * weight(lag), compute_uv=False) ** 2 / n
    return profile, (u**2).sum() / (A**2).sum(), values[: n - 1]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "bert"])
def test_profile_intensity_and_eigenvalues_are_those_of_the_maps_that_transformers_gives(family):
    corpus, causal = whole_corpus(), family != "bert"
    data = measured(family, corpus=corpus)
    for layer, maps in enumerate(maps_of(family, corpus)):
        for band in (4.0, np.inf):
            weight = (lambda lag: np.exp(-((abs(lag) - 4.0) ** 2) / 8)) if band == 4.0 else np.ones_like
            skip = 3 if causal else 0
            profile, intensity, values = literal(
                maps.mean(1), skip_rows=skip, first_key=1, causal=causal, weight=weight
            )
            read = data.isel(layer=layer)
            for lag, value in profile.items():
                beyond_window = np.isnan(read.lag_profile.sel(lag=lag))
                assert value == 0 if beyond_window else float(read.lag_profile.sel(lag=lag)) == pytest.approx(value)
            assert float(read.intensity) == pytest.approx(intensity, rel=2e-5)
            np.testing.assert_allclose(read.eigenvalues.sel(band=band), values, rtol=1e-5, atol=1e-10 * values[0])


def test_a_model_that_reads_both_ways_has_lags_of_both_signs():
    data = measured("bert")
    assert data.lag.values.tolist() == list(range(-28, 29))
    assert np.isfinite(data.lag_profile.values[:, [0, 28, 55]]).all()


def test_a_sliding_window_bounds_the_lags_that_rows_have():
    data = measured("mistral", bands=(), scales=(2.0,), skip_rows=0, sink="keep")
    width = 5
    assert np.isnan(data.lag_profile.values[:, width:]).all()
    assert np.isfinite(data.lag_profile.values[:, :width]).all()


def test_a_sliding_window_to_both_sides_bounds_lags_of_both_signs():
    data = measured("modernbert", bands=(), scales=(2.0,), skip_rows=0, sink="keep")
    view = ModelView(tiny("modernbert"))
    for layer, width in enumerate(view.windows):
        seen = data.lag[np.isfinite(data.lag_profile.values[layer])].values
        assert (seen.min(), seen.max()) == ((-28, 28) if width is None else (1 - width, width - 1))


def test_every_variable_has_its_row_and_lies_within_its_bounds():
    data = measured(nulls=True, heads="each")
    assert out_of_bounds(data, "fields") == []
    assert {"intensity_null", "intensity_null_shuffled", "scale_energy_null_uniform", "head_h_star"} <= set(data)
    assert all(variable.attrs["long_name"] for variable in data.data_vars.values())


def test_every_reading_carries_its_number_of_texts_and_how_it_was_made():
    attrs = measured().attrs
    assert (attrs["n"], attrs["n_snapshots"], attrs["n_scalogram"]) == (N, N, 5)
    assert (attrs["window"], attrs["sink"], attrs["skip_rows"]) == ("band", "separate", 3)
    assert attrs["form"] == "all snapshots"


@pytest.mark.parametrize("batch_size", [1, 5, 13])
def test_the_size_of_batches_changes_nothing(batch_size):
    one, other = measured(batch_size=4), measured(batch_size=batch_size)
    assert one.equals(other) or all(
        np.allclose(one[name], other[name], rtol=1e-6, atol=1e-9, equal_nan=True) for name in one if "mode" not in name
    )


def test_parts_of_the_corpus_read_apart_and_merged_are_the_whole():
    view, corpus = ModelView(tiny("llama")), whole_corpus(documents=[0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9])
    whole, left, right = (Fields(view, corpus, OPTIONS) for _ in range(3))
    parts = list(batches(corpus, 4))
    run_pass(view, parts, [whole])
    run_pass(view, parts[2:], [right])
    run_pass(view, parts[:2], [left])
    right.merge(left)
    a, b = whole.finalize(), right.finalize()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-9, atol=1e-15, err_msg=name)


def test_windows_that_are_fed_twice_are_refused():
    view, corpus = ModelView(tiny("llama")), whole_corpus()
    fields = Fields(view, corpus, OPTIONS)
    first = list(batches(corpus, 4))[:1]
    run_pass(view, first, [fields])
    with pytest.raises(RheoscopeError, match=r"4 windows of a field came twice"):
        run_pass(view, first, [fields])


def test_fields_of_another_text_do_not_merge():
    view = ModelView(tiny("llama"))
    with pytest.raises(RheoscopeError, match="two texts"):
        Fields(view, whole_corpus(), OPTIONS).merge(Fields(view, whole_corpus(seed=1), OPTIONS))


def test_readings_of_each_head_are_those_of_its_own_map():
    corpus = whole_corpus()
    data = measured(corpus=corpus, heads="each")
    maps = maps_of("llama", corpus)[1][:, 4]
    profile, intensity, _ = literal(maps, skip_rows=3, first_key=1, causal=True, weight=np.ones_like)
    read = data.sel(layer=1, head=4)
    assert float(read.head_intensity) == pytest.approx(intensity, rel=2e-5)
    assert float(read.head_lag_profile.sel(lag=7)) == pytest.approx(profile[7], rel=1e-9)


def test_the_sink_and_the_first_rows_are_reported_with_and_without():
    corpus = whole_corpus()
    data, kept = measured(corpus=corpus), measured(corpus=corpus, sink="keep", skip_rows=0)
    assert (data.intensity != kept.intensity).all()
    np.testing.assert_allclose(data.intensity_everything, kept.intensity, rtol=1e-9)
    np.testing.assert_array_equal(data.h_star_everything, kept.h_star.sel(band=np.inf))
    np.testing.assert_allclose(data.lag_profile_everything, kept.lag_profile, rtol=1e-6)
    maps = maps_of("llama", corpus).mean(2)
    u = np.tril(maps - maps.mean(1, keepdims=True))
    shares = (u[..., 0] ** 2).sum((1, 2)) / (u**2).sum((1, 2, 3))
    np.testing.assert_allclose(data.sink_variance_share, shares, rtol=1e-4)


def test_an_untrained_network_is_read_beside_the_model_and_needs_more_modes_the_more_texts():
    data = measured(nulls=True, corpus=whole_corpus(40), n_null=32)
    null = data.h_star_by_count_null.sel(level=90.0, band=np.inf)
    assert (null.sel(count=32) > null.sel(count=16)).all()
    assert (null.sel(count=16) > null.sel(count=8)).all()
    assert np.isnan(null.sel(count=40)).all()
    assert (data.h_star_by_count.sel(count=40) == data.h_star).all()


def test_the_null_of_shuffled_text_keeps_the_tokens_and_the_special_ones_in_place():
    corpus = whole_corpus()
    shuffled = chance_corpus(corpus, seed=3)
    assert (np.sort(shuffled.tokens, 1) == np.sort(corpus.tokens, 1)).all()
    assert (shuffled.tokens != corpus.tokens).mean() > 0.8
    assert (chance_corpus(corpus, seed=3).tokens == shuffled.tokens).all()
    packed = replace(corpus, packed=True, separator=int(corpus.tokens[0, 7]))
    ends = packed.tokens == packed.separator
    assert ends[0, 7]
    moved = chance_corpus(packed, seed=3).tokens
    assert ((moved == packed.separator) == ends).all()
    assert (np.sort(moved, 1) == np.sort(corpus.tokens, 1)).all()


def test_some_windows_as_snapshots_are_the_corpus_of_those_windows():
    corpus = whole_corpus(23)
    chosen = spread(23, 9)
    some = measured(corpus=corpus, n_snapshots=9)
    alone = measured(corpus=corpus.of_windows(chosen))
    assert some.snapshot.values.tolist() == chosen.tolist()
    assert some.attrs["n_snapshots"] == 9
    for name in (
        "eigenvalues",
        "intensity",
        "intensity_se",
        "lag_profile",
        "scale_energy",
        "h_star_se",
        "coefficients",
    ):
        np.testing.assert_allclose(some[name], alone[name], rtol=1e-9, atol=1e-12, err_msg=name)


def test_some_rows_of_a_scalogram_stand_for_those_between_them():
    whole, some = measured(n_rows=29), measured(n_rows=13)  # 13 of 26: every second row of the field, and the last
    known = np.flatnonzero(np.isfinite(whole.scalogram_by_position.values).all((0, 1)))
    read = 3 + spread(26, 13)
    both = np.intersect1d(known, read)
    assert len(both)
    np.testing.assert_allclose(
        some.scalogram_by_position.sel(position=both), whole.scalogram_by_position.sel(position=both), rtol=1e-9
    )
    ratio = some.scale_energy / whole.scale_energy
    assert ((ratio > 0.5) & (ratio < 2)).all()


def test_no_nulls_are_run_where_none_are_asked_for():
    data = measured(nulls=True, n_null=0)
    assert not [name for name in data if name.endswith(("_null", "_null_shuffled"))]
    assert "dominant_scale" in data


@pytest.mark.parametrize(
    ("corpus", "words"),
    [
        (whole_corpus(7), "fields asked for of 7 windows; an ensemble needs at least 8"),
        (random_corpus(), "3 of 12 windows are shorter than the 29 tokens of the others"),
        (whole_corpus(window=11), "windows of 11 tokens; scales need at least 16"),
    ],
)
def test_windows_that_are_no_ensemble_are_refused_in_one_sentence_and_left_out_by_default(corpus, words):
    view = ModelView(tiny("llama"))
    with pytest.raises(Refused, match=words) as refusal:
        measure(view, corpus, instruments=["fields"])
    assert str(refusal.value).count("\n") == 0
    assert "fields" not in measure(view, corpus, nulls=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scales": (2.0, 64.0)}, "scale 64 asked for; it needs windows of at least 184 tokens"),
        ({"bands": (0.0,)}, "scale 0 asked for"),
        ({"bands": ("four",)}, "scale 'four' asked for of fields; give a list of numbers"),
        ({"sink": "drop"}, "fields.sink=drop asked for; choose one of separate, keep"),
        ({"window": "lowpass"}, "fields.window=lowpass asked for; choose one of band, low_pass, none"),
        ({"heads": "all"}, "fields.heads=all asked for"),
        ({"dominant": "best"}, "fields.dominant=best asked for"),
        ({"skip_rows": 15}, "fields.skip_rows=15 asked for; windows of 29 tokens can spare 0 to 14"),
        ({"n_modes": 0}, "must be above 0"),
    ],
)
def test_choices_that_do_not_exist_or_do_not_fit_are_refused_in_one_sentence(options, words):
    with pytest.raises(RheoscopeError, match=words):
        Fields(ModelView(tiny("llama")), whole_corpus(), Fields.Options(**options))


def test_a_model_without_attention_maps_is_refused_in_one_sentence():
    with pytest.raises(Refused) as refusal:
        ModelView(tiny("mamba"))
    assert "attention" in str(refusal.value)
    assert str(refusal.value).count("\n") == 0


def test_published_choices_can_be_made():
    data = measured(window="low_pass", sink="keep", skip_rows=0, omega0=5.0, dominant="raw")
    assert data.attrs["dominant_rule"] == "raw"
    assert np.isfinite(data.dominant_scale).all()
    assert data.h_star.max() <= N - 1


def test_without_a_window_only_the_whole_field_is_decomposed():
    data = measured(window="none")
    assert data.band.values.tolist() == [np.inf]
    assert "coherence" not in data
