"""Prefix sensitivity and the response of attention: exact derivatives, nothing from the future, and clear refusals."""

import numpy as np
import pytest
import torch

from rheoscope.errors import RheoscopeError
from rheoscope.models.view import ModelView
from rheoscope.surgery.ablation import ablate
from rheoscope.surgery.passes import Passes
from rheoscope.surgery.prefix import attention_response, default_keeps, prefix_readings, source_response
from tests.instruments.texts import corpus_of, random_corpus
from tests.tiny import CAUSAL, VARIANTS, Float64Throughout, tiny


def full_windows(n=6, window=13, seed=0):
    return corpus_of(np.random.default_rng(seed).integers(3, 61, (n, window)))


def read(name="llama", corpus=None, **options):
    with Float64Throughout():
        return prefix_readings(Passes(ModelView(tiny(name)), corpus or full_windows(), batch_size=3), **options)


@pytest.mark.parametrize("name", [name for name in CAUSAL if name == VARIANTS[name].family])
def test_the_future_has_no_influence_and_the_past_has(name):
    if name in ("bert", "opt:post-norm"):
        return
    view = ModelView(tiny(name))
    text = torch.tensor(full_windows(2).tokens, dtype=torch.int64)
    with Float64Throughout(), torch.no_grad():
        response = source_response(view, text, source=6, generator=torch.Generator().manual_seed(0))[1]
    assert (response[:, :6] == 0).all()
    assert (response[:, 6:9] > 0).all()


def test_the_response_is_the_norm_of_the_jacobian():
    view, window = ModelView(tiny("llama")), 5
    text = torch.tensor(full_windows(1, window).tokens, dtype=torch.int64)
    kept, d = [], view.d_model
    with Float64Throughout(), torch.no_grad():
        with view.tapped({"resid_pre": lambda layer, x: kept.append(x.clone())}, layers=[1]):
            view.forward(text)
        x, step, columns = kept[0], 1e-5, []
        for k in range(d):
            ends = {}
            for sign in (1, -1):
                moved = x.clone()
                moved[0, 2, k] += sign * step
                taps = {
                    "resid_pre": lambda layer, _, moved=moved: moved,
                    "attn_out": lambda layer, A, ends=ends, sign=sign: ends.update({sign: A.clone()}),
                }
                with view.tapped(taps, layers=[1]):
                    view.forward(text)
            columns.append((ends[1] - ends[-1])[0] / (2 * step))
        J = torch.stack(columns, -1)  # position d_model source
        u = x[0] / x[0].norm(dim=-1, keepdim=True)
        J = J - torch.einsum("pd,pe,pes->pds", u, u, J)
        exact = J.square().sum((1, 2)).sqrt()
        generator = torch.Generator().manual_seed(0)
        probed = source_response(view, text, source=2, n_probes=600, generator=generator)[1, 0]
    assert torch.allclose(probed[2:], exact[2:], rtol=0.1)


def test_with_more_text_kept_another_prefix_turns_the_last_token_less():
    data = read(keeps=(1, 12))
    assert (data.prefix_turn[:, 0] == 0).all()  # the first layer's input is the token alone
    assert (data.prefix_turn.sel(keep=12)[1:] < data.prefix_turn.sel(keep=1)[1:]).all()
    assert (data.prefix_turn.sel(keep=12)[2] > 0).all()
    assert (data.prefix_turn_se[:, 1:] > 0).all()
    assert (data.prefix_defect_change >= 0).all()


def test_a_sliding_window_forgets_what_lies_before_its_reach():
    """Three layers that see five tokens each: the stream at layer l knows 4 l tokens before its own."""
    data = read("mistral", keeps=(4, 5, 8, 9))
    turn = data.prefix_turn
    for keep in (4, 5, 8, 9):
        for layer in range(3):
            known = 4 * layer + 1 <= keep
            assert (float(turn.sel(keep=keep)[layer]) < 1e-6) is known, (keep, layer)


def test_the_response_by_lag_is_reproducible_and_ends_with_the_window():
    view = ModelView(tiny("mistral"))
    tokens = full_windows(2).tokens
    with Float64Throughout():
        (first, lags), (again, _) = (attention_response(view, tokens, seed=1) for _ in range(2))
    assert np.array_equal(first, again)
    assert lags.tolist() == list(range(13))
    assert (first[:, 5:] == 0).all()
    assert (first[:, :5] > 0).all()


def test_an_ablation_holds_the_prefix_readings():
    with Float64Throughout():
        run = ablate(ModelView(tiny("gpt2")), full_windows(), variants=False, prefix=True, batch_size=3)
    assert {"prefix_turn", "attention_response"} <= set(run["ablation"])
    assert run["ablation"].attrs["n_passes"] > 0
    assert default_keeps(13) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("corpus", "keeps", "message"),
    [
        (full_windows(), (2, 13), r"before the last \[2, 13\] tokens asked for; the windows have 13"),
        (random_corpus(), (2,), "two or more full windows"),
        (full_windows(1), (2,), "two or more full windows"),
    ],
)
def test_bad_input_is_one_sentence(corpus, keeps, message):
    with pytest.raises(RheoscopeError, match=message):
        read(corpus=corpus, keeps=keeps)
