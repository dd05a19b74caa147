"""Curves over ranks and linear layers are paired losses of the edits they name, and part of an ablation."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rheoscope.errors import Refused, RheoscopeError
from rheoscope.instruments.catalog import out_of_bounds
from rheoscope.models.view import ModelView
from rheoscope.run import Run
from rheoscope.surgery.ablation import ablate, ablation_lines
from rheoscope.surgery.calibration import calibrated
from rheoscope.surgery.edits import edited
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.edits_routing import FilterOff, TruncateRouting
from rheoscope.surgery.passes import Passes
from rheoscope.surgery.score_curves import (
    curve_ranks,
    first_windows,
    linearisation_curve,
    score_edit_table,
    truncation_curve,
)
from tests.instruments.texts import random_corpus
from tests.nets.models import tiny as tiny_net
from tests.tiny import Float64Throughout, tiny


def view_of(name="llama"):
    with Float64Throughout():
        return ModelView(tiny_net("sd") if name == "sd" else tiny(name))


def text(view, **shape):
    corpus = random_corpus(**shape)
    return replace(corpus, tokens=corpus.tokens % view.model.config.vocab_size)


@pytest.fixture(scope="module")
def whole():
    """An ablation of scores and linear layers, fitted on the text's own first windows."""
    view = view_of()
    with Float64Throughout():
        return ablate(view, text(view), variants=False, scores=True, linear=True, batch_size=4)


def literal_loss(view, corpus):
    """Mean loss of a text by transformers' own loss, window by window."""
    total = count = 0
    for row, length in zip(corpus.tokens, corpus.lengths, strict=True):
        row = torch.tensor(row[:length], dtype=torch.int64)[None]
        with Float64Throughout(), torch.no_grad():
            nll = torch.nn.functional.cross_entropy(view.forward(row)[0, :-1], row[0, 1:], reduction="sum")
        total, count = total + float(nll), count + int(length) - 1
    return total / count


def test_changes_are_differences_of_losses(whole):
    view = view_of()
    corpus = text(view)
    with Float64Throughout():
        fitted = calibrated(view, first_windows(corpus))
    plain = literal_loss(view, corpus)
    data = whole["ablation"]
    for edit, value in (
        (Linearize(layers=(0, 1)), data.linear_change.sel(n_linear=2)),
        (TruncateRouting(calibration=fitted, rank=2), data.routing_change.sel(rank=2)),
        (FilterOff(), data.score_edit_change.sel(score_edit="filter off")),
    ):
        with edited(view, edit):
            assert float(value) == pytest.approx(literal_loss(view, corpus) - plain, abs=1e-11)


def test_curves_end_where_they_must(whole):
    data = whole["ablation"]
    assert data["rank"].values.tolist() == [0, 2, 4, 8, 16, 20]
    assert data.n_linear.values.tolist() == [1, 2, 3]
    assert abs(float(data.routing_change.sel(rank=20))) < 1e-12
    assert abs(float(data.filtering_change.sel(rank=20))) < 1e-12
    off = float(data.score_edit_change.sel(score_edit="filter off"))
    assert float(data.filtering_change.sel(rank=0)) == pytest.approx(off, abs=1e-12)
    assert data.attrs["n_passes"] == 1 + 1 + 2 * 6 + 3 + 3  # plain, calibration, two parts of six ranks, forms, linear
    assert (data.routing_change_se[:-1] > 0).all()
    assert out_of_bounds(data, "ablation") == []


def test_the_run_says_what_it_was_fitted_on_prints_and_goes_to_a_file(whole, tmp_path):
    lines = "\n".join(ablation_lines(whole))
    data = whole["ablation"]
    for name in ("key-bias routing", "filter scalar", "filter off", "linear layers, from 0"):
        assert name in lines
    assert f"{float(data.linear_change[2]):+.4f} ± {float(data.linear_change_se[2]):.4f}" in lines
    assert f"{100 * np.expm1(float(data.linear_change[2])):+.1f} %" in lines
    assert whole.provenance["config"]["ablation"]["scores"]["calibration_windows"] == 12
    whole.save(tmp_path / "run.nc")
    assert ablation_lines(Run.load(tmp_path / "run.nc")) == ablation_lines(whole)


def test_another_text_to_fit_on_moves_ranks_in_between_and_nothing_else(whole):
    view = view_of()
    with Float64Throughout():
        other = ablate(view, text(view), variants=False, scores=True, calibration=text(view, seed=9), batch_size=4)
    one, two = whole["ablation"], other["ablation"]
    assert np.array_equal(one.routing_change[[0, -1]], two.routing_change[[0, -1]])
    assert (one.routing_change[1:-1] != two.routing_change[1:-1]).all()
    assert "linear_change" not in two
    assert other.provenance["config"]["ablation"]["scores"] != whole.provenance["config"]["ablation"]["scores"]


def test_sd_networks_have_a_curve_of_routing_alone_up_to_twice_their_heads():
    view = view_of("sd")
    with Float64Throughout():
        corpus = text(view)
        passes, fitted = Passes(view, corpus, batch_size=4), calibrated(view, corpus)
        data = truncation_curve(passes, fitted)
        table = score_edit_table(passes, fitted)
        linear = linearisation_curve(passes)
    assert "filtering_change" not in data
    assert data["rank"].values.tolist() == [0, 2, 4, 8, 12]  # d_head is 6
    assert abs(float(data.routing_change[-1])) < 1e-12
    assert np.isfinite(table.score_edit_change).all()
    assert linear.sizes["n_linear"] == 3


def test_passes_are_remembered_with_the_text_they_were_fitted_on(tmp_path):
    view = view_of()
    corpus = text(view)
    with Float64Throughout():
        fitted, other = calibrated(view, corpus), calibrated(view, text(view, seed=4))
    ran = []
    for calibration in (fitted, fitted, other):
        passes = Passes(view, corpus, memory=tmp_path / "passes.jsonl", batch_size=4)
        with Float64Throughout():
            truncation_curve(passes, calibration, ranks=(2, 4))
        ran.append(passes.n_run)
    assert ran == [5, 0, 4]


def test_ranks_of_a_curve_double_up_to_all():
    assert curve_ranks(128) == [0, 2, 4, 8, 16, 32, 64, 128]
    assert curve_ranks(10) == [0, 2, 4, 8, 10]
    assert curve_ranks(2) == [0, 2]


def test_what_cannot_be_asked_is_refused():
    view = view_of()
    passes = Passes(view, text(view), batch_size=4)
    for sizes in ([], [0], [4]):
        with pytest.raises(RheoscopeError, match="linear layers asked for; the model has 3"):
            linearisation_curve(passes, sizes=sizes)
    with Float64Throughout(), pytest.raises(Refused, match="learned sinks"):
        linearisation_curve(Passes(view_of("gpt_oss"), text(view), batch_size=4))
    with pytest.raises(RheoscopeError, match="windows of 41 tokens asked for"):
        ablate(view, text(view), variants=False, scores=True, calibration=random_corpus(window=41, lengths=(41,) * 12))
