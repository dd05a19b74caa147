"""The refit is ridge regression on what the model does, and lowers the error that it is said to lower."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rheoscope.errors import RheoscopeError
from rheoscope.models.view import ModelView
from rheoscope.surgery.edits import edited
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.edits_sinks import ConstantHeads, DropHeads
from rheoscope.surgery.recover import cut_layers, refit, refitted
from rheoscope.surgery.ridge import Moments, Ridge, chosen_ridge
from rheoscope.surgery.streams import Streams
from tests.instruments.texts import random_corpus
from tests.tiny import Float64Throughout, input_ids, tiny

FAMILIES = ("llama", "gpt2", "gpt_neox", "gptj", "opt", "gemma2", "granite", "phi3")
GROUPS = tuple((layer, head) for layer, head in ((0, 0), (0, 1), (0, 2), (2, 3), (2, 4), (2, 5)))


def corpus_of_lengths(*lengths):
    return random_corpus(lengths=lengths, documents=range(len(lengths)))


def rows(seed, n=40, inputs=5, outputs=3):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, inputs)) @ rng.standard_normal((inputs, inputs)) + rng.standard_normal(inputs)
    return torch.from_numpy(X), torch.from_numpy(rng.standard_normal((n, outputs)) + X[:, :outputs])


def moments(X, Y):
    sums = Moments.empty(X.shape[1], Y.shape[1])
    sums.update(X, Y)
    return sums


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1e-4, 0.1, 3.0]), st.booleans())
def test_the_ridge_equals_least_squares_with_added_rows(seed, strength, with_bias):
    X, Y = rows(seed)
    rng = np.random.default_rng(seed + 1)
    W0, b0 = rng.standard_normal((5, 3)), rng.standard_normal(3)
    ridge = Ridge(moments(X, Y), torch.from_numpy(W0), torch.from_numpy(b0), with_bias=with_bias)
    found = ridge.fitted(strength)
    penalty = np.sqrt(strength * ridge.scale) * np.eye(5)
    ones, nothing = np.ones((len(X), 1)), np.zeros((5, 1))
    left = np.block([[X.numpy(), ones], [penalty, nothing]]) if with_bias else np.vstack([X.numpy(), penalty])
    right = np.vstack([Y.numpy() - (0 if with_bias else b0), penalty @ W0])
    expected = np.linalg.lstsq(left, right, rcond=None)[0]
    np.testing.assert_allclose(found.W, expected[:5], rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(found.b, expected[5] if with_bias else b0, rtol=1e-6, atol=1e-8)


def test_the_error_from_moments_is_that_of_the_rows():
    X, Y = rows(3)
    W, b = torch.randn(5, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    assert moments(X, Y).error(W, b) == pytest.approx(float((Y - X @ W - b).square().sum()))


def test_splitting_the_rows_changes_nothing():
    X, Y = rows(4)
    parts = moments(X[:13], Y[:13]).joined(moments(X[13:], Y[13:]))
    whole = moments(X, Y)
    for name in ("xx", "xy", "x", "y"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name))


def test_weights_stay_where_nothing_does_better_on_held_out_rows():
    X, Y = rows(5)
    W0, b0 = torch.eye(5, 3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal(Y.shape)) * 100
    choice = chosen_ridge(moments(X, Y + noise), moments(X, X @ W0), W0, b0, with_bias=False, strengths=(1e-6,))
    assert choice.fitted.strength == float("inf")
    assert torch.equal(choice.fitted.W, W0)


def test_no_rows_are_refused():
    with pytest.raises(RheoscopeError, match="no rows"):
        Ridge(Moments.empty(2, 2), torch.zeros(2, 2), torch.zeros(2), with_bias=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_streams_in_parts_are_those_of_whole_passes(name):
    view, corpus = ModelView(tiny(name)), corpus_of_lengths(11, 7, 9)
    seen = {}

    def keep(layer, x):
        seen[layer] = x.clone()

    with torch.no_grad(), view.tapped({"resid_pre": keep, "attention": lambda _layer, _attention: None}):
        view.forward(torch.tensor(corpus.tokens, dtype=torch.int64), valid_of(corpus))
    streams = Streams(view, corpus, batch_size=3)
    for layer in (0, 1, 1, 2):
        (found,) = streams.to(layer)
        torch.testing.assert_close(found.stream, seen[layer][valid_of(corpus)])


def valid_of(corpus):
    return torch.arange(corpus.window) < torch.tensor(corpus.lengths)[:, None]


def output_error(view, corpus, edits, fits, layer):
    """Squared distance of one layer's attention output from that of the original model."""
    kept = []
    tokens = torch.tensor(corpus.tokens, dtype=torch.int64)

    def keep(_layer, x):
        kept.append(x.clone())

    with torch.no_grad(), view.tapped({"attn_out": keep}, layers=[layer]):
        view.forward(tokens, valid_of(corpus))
        with edited(view, *edits), refitted(view, fits):
            view.forward(tokens, valid_of(corpus))
    return float((kept[0] - kept[1])[valid_of(corpus)].square().sum())


@pytest.mark.parametrize("name", ["llama", "gpt2", "granite"])
@pytest.mark.parametrize("edit", [DropHeads(heads=GROUPS), Linearize(layers=(0, 2))], ids=["drop", "linear"])
def test_the_refit_lowers_the_error_of_every_layer_it_fits(name, edit):
    with Float64Throughout():
        view = ModelView(tiny(name))
        corpus = corpus_of_lengths(*[29] * 40)
        before = [parameter.clone() for parameter in view.model.parameters()]
        fits = refit(view, [edit], corpus)
        assert [fit.layer for fit in fits] == cut_layers(view, [edit]) == [0, 2]
        for number, fit in enumerate(fits):
            with_it = output_error(view, corpus, [edit], fits[: number + 1], fit.layer)
            without = output_error(view, corpus, [edit], fits[:number], fit.layer)
            assert with_it < without if np.isfinite(fit.strength) else with_it == without
            assert fit.error_after <= fit.error_before
        assert any(np.isfinite(fit.strength) for fit in fits)
    assert all(torch.equal(a, b) for a, b in zip(before, view.model.parameters(), strict=True))


def test_the_refit_is_least_squares_on_the_rows_of_the_edited_and_the_original_model():
    with Float64Throughout():
        view, corpus = ModelView(tiny("gpt2")), corpus_of_lengths(*[29] * 8)
        edit = DropHeads(heads=((1, 0), (1, 4)))
        (fit,) = refit(view, [edit], corpus, batch_size=2)
        sums = Moments.empty(42, 42)
        X = np.concatenate([r.inputs.numpy() for r in Streams(view, corpus, batch_size=8, edits=[edit]).to(1)])
        Y = np.concatenate([r.outputs.numpy() for r in Streams(view, corpus, batch_size=8).to(1)])
        sums.update(torch.from_numpy(X), torch.from_numpy(Y))
        W0 = view.weights.W_O(1).flatten(0, 1).numpy()
    centred = X - X.mean(0)
    penalty = np.sqrt(fit.strength * (centred**2).sum(0).mean()) * np.eye(42)
    right = np.vstack([Y - Y.mean(0) - centred @ W0, np.zeros((42, 42))])
    change = np.linalg.lstsq(np.vstack([centred, penalty]), right, rcond=None)[0]
    np.testing.assert_allclose(fit.weight.numpy(), W0 + change, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(fit.bias.numpy(), Y.mean(0) - X.mean(0) @ (W0 + change), rtol=1e-6, atol=1e-8)


def test_a_bias_is_made_where_constant_heads_make_one_and_nowhere_else():
    view, corpus = ModelView(tiny("llama")), corpus_of_lengths(*[29] * 6)
    constants = tuple((0.1,) * view.d_value for _ in range(3))
    (dropped,) = refit(view, [DropHeads(heads=GROUPS[:3])], corpus)
    (constant,) = refit(view, [ConstantHeads(heads=GROUPS[:3], constants=constants)], corpus)
    assert dropped.bias is None
    assert constant.bias is not None
    assert getattr(view.part(0, view.family.o), "bias", None) is None


def test_a_refitted_model_is_as_before_afterwards_also_after_an_exception():
    view, corpus = ModelView(tiny("gpt2")), corpus_of_lengths(*[13] * 6)
    tokens = input_ids(view.model)
    with torch.no_grad():
        before = view.forward(tokens)
    fits = refit(view, [DropHeads(heads=GROUPS)], corpus)
    with pytest.raises(KeyboardInterrupt), refitted(view, fits):
        raise KeyboardInterrupt
    with torch.no_grad():
        assert torch.equal(view.forward(tokens), before)


def test_a_refit_on_one_window_or_towards_nothing_known_is_refused():
    view, edit = ModelView(tiny("gpt2")), DropHeads(heads=GROUPS)
    with pytest.raises(RheoscopeError, match="one window"):
        refit(view, [edit], corpus_of_lengths(13))
    with pytest.raises(RheoscopeError, match="towards 'sky'"):
        refit(view, [edit], corpus_of_lengths(13, 13), target="sky")
