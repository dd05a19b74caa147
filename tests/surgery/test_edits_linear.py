"""Linear attention in place of softmax attention: the literal sums, causal, blind to padding, undone, or refused."""

import naive_scores as naive
import pytest
import torch

from rheoscope.errors import Refused, RheoscopeError
from rheoscope.models.view import ModelView
from rheoscope.nets import linear
from rheoscope.surgery.edits import edited
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.edits_routing import FilterOff
from rheoscope.surgery.edits_sinks import DropHeads
from tests.nets.models import tiny as tiny_net
from tests.tiny import CAUSAL, LENGTH, VARIANTS, WINDOW, Float64Throughout, input_ids, tiny

SLIDING = ("mistral", "qwen2:sliding", "gemma2", "gemma3_text", "phi3:partial-sliding", "cohere2", "starcoder2")
HANDLED = tuple(name for name in CAUSAL if name not in (*SLIDING, "gpt_oss"))
LONG = {"sliding_window": 29}
EXPERTS = ("mixtral", "qwen3_moe")
UNMIXED = "scores or attention map asked for of a layer that an edit has made linear"


def view_of(name, **changes):
    with Float64Throughout():
        return ModelView(tiny_net(name) if name in ("sd", "lag_conv", "ega") else tiny(name, **changes))


@torch.no_grad()
def passed(view, tokens, *edits, valid=None):
    """Logits, and q, k, v, z and the scale of every layer, under edits."""
    calls = []

    def keep(_layer, attention):
        k, v = (x.repeat_interleave(attention.n_rep, 1) for x in (attention.k, attention.v))
        calls.append((attention.q.clone(), k.clone(), v.clone(), attention.z.clone(), attention.scale))

    with Float64Throughout(), edited(view, *edits), view.tapped({"attention": keep}):
        return view.forward(tokens, valid), calls


def close_to_the_literal_sums(calls, valid, *, scaled=False):
    for q, k, v, z, scale in calls:
        root = scale**0.5 if scaled else 1.0
        for window in range(len(q)):
            for head in range(q.shape[1]):
                rows = naive.linear(q[window, head] * root, k[window, head] * root, v[window, head], valid[window])
                real = valid[window]
                torch.testing.assert_close(z[window, head][real], rows[real], rtol=0, atol=1e-10)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    "name", ["llama", "gpt2:by-layer-scale", "gpt_neox", "gemma", "granite", "opt", "sd", "lag_conv"]
)
def test_every_layer_mixes_by_the_literal_sums(name, scaled):
    view = view_of(name)
    tokens = input_ids(view.model)
    _, calls = passed(view, tokens, Linearize(scaled=scaled))
    close_to_the_literal_sums(calls, torch.ones_like(tokens, dtype=torch.bool), scaled=scaled)


def test_scores_that_are_capped_go_with_their_cap():
    view = view_of("gemma2", **LONG)
    tokens = input_ids(view.model)
    _, calls = passed(view, tokens, Linearize())
    close_to_the_literal_sums(calls, torch.ones_like(tokens, dtype=torch.bool))


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "sd"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_keys_leave_sums_and_normaliser(name, side):
    view = view_of(name)
    tokens = input_ids(view.model)
    pad = torch.full_like(tokens[:, :4], view.pad_token)
    row = torch.cat([pad, tokens] if side == "left" else [tokens, pad], 1)
    place = slice(4, None) if side == "left" else slice(0, LENGTH)
    valid = torch.zeros(row.shape, dtype=torch.bool)
    valid[0, place] = True
    valid[1] = True  # the other window of the batch has none
    alone, _ = passed(view, tokens, Linearize())
    padded, calls = passed(view, row, Linearize(), valid=valid)
    torch.testing.assert_close(padded[0, place], alone[0], rtol=0, atol=1e-9)
    close_to_the_literal_sums(calls, valid)


@pytest.mark.parametrize("name", ["llama", "sd"])
def test_the_length_of_the_chunks_changes_nothing(name, monkeypatch):
    view = view_of(name)
    tokens = input_ids(view.model, length=29)
    whole, _ = passed(view, tokens, Linearize())
    monkeypatch.setattr(linear.causal_sums, "__kwdefaults__", {"state": None, "chunk": 7})
    pieces, _ = passed(view, tokens, Linearize())
    assert not torch.equal(pieces, whole)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", [*HANDLED, "sd"])
def test_a_changed_token_leaves_what_comes_before_it_alone_and_the_edit_is_undone(name):
    view = view_of(name)
    tokens = input_ids(view.model)
    other = tokens.clone()
    other[:, 8] = (other[:, 8] - 3 + 7) % (view.model.config.vocab_size - 3) + 3
    plain, _ = passed(view, tokens)
    (one, _), (two, _) = (passed(view, ids, Linearize(layers=(0, 2))) for ids in (tokens, other))
    if name.partition(":")[0] in EXPERTS:
        torch.testing.assert_close(one[:, :8], two[:, :8], rtol=1e-12, atol=1e-12)
    else:
        assert torch.equal(one[:, :8], two[:, :8])
    assert not torch.equal(one[:, 8:], two[:, 8:])
    assert not torch.allclose(one, plain, rtol=1e-6)
    again, _ = passed(view, tokens)
    assert torch.equal(again, plain)


def test_only_the_layers_asked_for_are_linear():
    view = view_of("llama")
    tokens = input_ids(view.model)
    _, before = passed(view, tokens)
    _, after = passed(view, tokens, Linearize(layers=(1,)))
    assert torch.equal(after[0][3], before[0][3])
    close_to_the_literal_sums(after[1:2], torch.ones_like(tokens, dtype=torch.bool))


@pytest.mark.parametrize("name", [*SLIDING, "gpt_oss", "ega", *(name for name in VARIANTS if name not in CAUSAL)])
def test_what_has_no_counterpart_is_refused(name):
    view = view_of(name)
    tokens = input_ids(view.model)
    reasons = {"gpt_oss": "learned sinks", "ega": "adds a bias to its scores"} | dict.fromkeys(
        SLIDING, "sliding window"
    )
    with pytest.raises(Refused, match=f"linear attention asked for; .*{reasons.get(name, 'reads both ways')}"):
        passed(view, tokens, Linearize())
    passed(view, tokens)  # the model is as before


@pytest.mark.parametrize("name", SLIDING)
def test_windows_no_longer_than_the_sliding_window_are_no_obstacle(name):
    view = view_of(name)
    tokens = input_ids(view.model, length=WINDOW)
    _, calls = passed(view, tokens, Linearize())
    close_to_the_literal_sums(calls, torch.ones_like(tokens, dtype=torch.bool))


def test_a_linear_layer_has_neither_scores_nor_a_map_to_read_or_edit():
    view = view_of("llama")
    tokens = input_ids(view.model)
    for site in ("attn_scores", "attn_probs"):
        with view.tapped({site: lambda layer, x: None}):
            passed(view, tokens)
            with pytest.raises(Refused, match=UNMIXED):
                passed(view, tokens, Linearize())
    with pytest.raises(RheoscopeError, match="two edits of the scores of one layer"):
        passed(view, tokens, Linearize(), FilterOff())
    with pytest.raises(Refused, match="whose scores another edit has replaced"):
        passed(view, tokens, FilterOff(), Linearize())
    passed(view, tokens, Linearize(), DropHeads(heads=((1, 2),)))  # z is there


def test_bad_layers_and_caches_are_refused():
    view = view_of("llama")
    with pytest.raises(RheoscopeError, match=r"layers \[3\] asked for"), edited(view, Linearize(layers=(3,))):
        pass
    with pytest.raises(Refused, match="fewer queries than keys"), Float64Throughout(), edited(view, Linearize()):
        view.model.generate(input_ids(view.model, batch=1), max_new_tokens=3, do_sample=False)
