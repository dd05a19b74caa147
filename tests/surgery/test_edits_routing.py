"""Edits of routing and filtering: what they make of the scores, that they are causal, and that they are undone."""

from dataclasses import replace
from itertools import pairwise

import naive_scores as naive
import pytest
import torch
from scored import fitted, passed, text, view_of

from rheoscope.corpus import batches
from rheoscope.errors import Refused, RheoscopeError
from rheoscope.instruments.engine import run_pass
from rheoscope.instruments.loss import Loss
from rheoscope.instruments.routing.routing import Routing
from rheoscope.models.view import ModelView
from rheoscope.surgery.edits import edited
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.edits_routing import FilterOff, FilterScalar, KeyBiasRouting, TruncateFiltering, TruncateRouting
from tests.instruments.texts import corpus_of
from tests.tiny import CAUSAL, LENGTH, Float64Throughout, input_ids, tiny

# grouped keys; soft-cap and windows; learned sinks; partial RoPE in parallel; scale by layer; QK-norm; S-D; both ways
FAMILIES = ("llama", "gemma2", "gpt_oss", "gpt_neox", "gpt2:by-layer-scale", "qwen3", "sd", "sd rotary", "bert")
STANDARD = tuple(name for name in FAMILIES if not name.startswith("sd"))
EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")  # tokens are sorted by expert, so sums of the others may round anew


def edits_of(view, calibration):
    truncated = [] if view.is_damped(0) else [TruncateFiltering(calibration=calibration, rank=1)]
    return [
        TruncateRouting(calibration=calibration, rank=0),
        TruncateRouting(calibration=calibration, rank=2),
        *truncated,
        FilterScalar(calibration=calibration),
        FilterOff(),
        KeyBiasRouting(calibration=calibration),
    ]


def each_head(call):
    """(window, head, q, k) of one call, keys repeated."""
    k = call.k.repeat_interleave(call.n_rep, 1)
    for window in range(len(call.q)):
        for head in range(call.q.shape[1]):
            yield window, head, call.q[window, head], k[window, head]


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_those_of_the_literal_formulas(name):
    view = view_of(name)
    tokens, calibration = input_ids(view.model, batch=1, length=11), fitted(view)
    damped, d = view.is_damped(0), view.d_head
    edits = {
        "no routing": TruncateRouting(calibration=calibration, rank=0),
        "scalar": FilterScalar(calibration=calibration),
        "off": FilterOff(),
        "key bias": KeyBiasRouting(calibration=calibration),
    }
    for kind, edit in edits.items():
        _, calls = passed(view, tokens, edit)
        for layer, call in enumerate(calls):
            for window, head, q, k in each_head(call):
                S, F = naive.routing(q, k, call.scale), naive.filtering(q, k, call.scale)
                mean = torch.from_numpy(calibration.mean[layer, head])
                own = calibration.gram[layer, head][:d, d:].trace() / calibration.n_tokens * call.scale
                own = -calibration.damping[layer, head] if damped else own
                expected = {
                    "no routing": F,
                    "scalar": S + own * torch.eye(len(S), dtype=S.dtype),
                    "off": S,
                    "key bias": F + naive.gauge(q, k, call.scale, mean[:d], mean[d:]),
                }[kind]
                torch.testing.assert_close(call.scores[window, head], expected, rtol=0, atol=1e-10, msg=kind)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_neox", "sd"])
def test_on_the_window_it_was_fitted_on_a_truncation_is_the_best_approximation(name):
    view = view_of(name)
    window = input_ids(view.model, batch=1, length=23)  # more tokens than [q; k] has coordinates
    _, calls = passed(view, window)
    calibration = fitted(view, corpus_of(window.numpy()))
    for layer, call in enumerate(calls):  # one layer at a time: an edit below would change q and k above
        for rank in (2, 4, 6):
            _, after = passed(view, window, TruncateRouting(layers=(layer,), calibration=calibration, rank=rank))
            for _, head, q, k in each_head(call):
                S, F = naive.routing(q, k, call.scale), naive.filtering(q, k, call.scale)
                expected = naive.best(S, rank) + F
                assert (after[layer].scores[0, head] - expected).abs().max() < 1e-9 * expected.abs().max()
        if not view.is_damped(layer):
            _, after = passed(view, window, TruncateFiltering(layers=(layer,), calibration=calibration, rank=3))
            for _, head, q, k in each_head(call):
                expected = naive.routing(q, k, call.scale) + naive.best(naive.filtering(q, k, call.scale), 3)
                assert (after[layer].scores[0, head] - expected).abs().max() < 1e-9 * expected.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
def test_full_rank_is_the_model_itself_to_rounding(name):
    view = view_of(name)
    tokens, calibration = input_ids(view.model), fitted(view)
    plain, before = passed(view, tokens)
    capacity = view.d_head if view.is_damped(0) else 2 * view.d_head
    edits = [TruncateRouting(calibration=calibration, rank=capacity)]
    edits += [] if view.is_damped(0) else [TruncateFiltering(calibration=calibration, rank=capacity)]
    for edit in edits:
        logits, after = passed(view, tokens, edit)
        torch.testing.assert_close(logits, plain, rtol=0, atol=1e-10)
        for one, two in zip(before, after, strict=True):
            torch.testing.assert_close(two.scores, one.scores, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_one_plane_less_than_all_is_nearly_the_model_and_ranks_in_between_lie_in_order(name):
    view = view_of(name)
    window = input_ids(view.model, batch=1, length=29)
    calibration = fitted(view, corpus_of(window.numpy()))
    _, (plain, *_) = passed(view, window)
    errors = []
    for rank in range(0, 2 * view.d_head + 1, 2):
        _, (call, *_) = passed(view, window, TruncateRouting(layers=(0,), calibration=calibration, rank=rank))
        errors.append(float((call.scores - plain.scores).norm()))
    assert all(after <= before for before, after in pairwise(errors))
    assert 0 < errors[-2] < 0.1 * errors[0]


@pytest.mark.parametrize("name", [*CAUSAL, "sd", "sd rotary"])
def test_a_changed_token_leaves_what_comes_before_it_bit_equal(name):
    view = view_of(name)
    tokens, calibration = input_ids(view.model), fitted(view)
    other = tokens.clone()
    other[:, 8] = (other[:, 8] - 3 + 7) % (view.model.config.vocab_size - 3) + 3
    for edit in edits_of(view, calibration):
        (one, _), (two, _) = (passed(view, ids, edit) for ids in (tokens, other))
        if name.partition(":")[0] in EXPERTS:
            torch.testing.assert_close(one[:, :8], two[:, :8], rtol=1e-12, atol=1e-12)
        else:
            assert torch.equal(one[:, :8], two[:, :8]), edit
        assert not torch.equal(one[:, 8:], two[:, 8:])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_edit_changes_the_output_and_leaving_it_gives_the_model_back(name):
    view = view_of(name)
    tokens, calibration = input_ids(view.model), fitted(view)
    plain, _ = passed(view, tokens)
    for edit in edits_of(view, calibration):
        changed, _ = passed(view, tokens, edit)
        assert not torch.allclose(changed, plain, rtol=1e-6), edit
        again, _ = passed(view, tokens)
        assert torch.equal(again, plain), edit


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "sd"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(name, side):
    view = view_of(name)
    tokens, calibration = input_ids(view.model), fitted(view)
    pad = torch.full_like(tokens[:, :4], view.pad_token)
    row = torch.cat([pad, tokens] if side == "left" else [tokens, pad], 1)
    place = slice(4, None) if side == "left" else slice(0, LENGTH)
    valid = torch.zeros(row.shape, dtype=torch.bool)
    valid[:, place] = True
    for edit in edits_of(view, calibration):
        alone, _ = passed(view, tokens, edit)
        padded, _ = passed(view, row, edit, valid=valid)
        torch.testing.assert_close(padded[:, place], alone, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["llama", "sd"])
def test_without_soft_cap_or_sinks_the_key_bias_is_one_number_per_key(name):
    view = view_of(name)
    tokens, calibration = input_ids(view.model), fitted(view)
    _, (call, *_) = passed(view, tokens, KeyBiasRouting(layers=(0,), calibration=calibration))
    mean = torch.from_numpy(calibration.mean[0])
    k = call.k.repeat_interleave(call.n_rep, 1)
    biases = torch.einsum("bhpd,hd->bhp", k, mean[:, : view.d_head]) / 2 * call.scale
    biases -= torch.einsum("bhpd,hd->bhp", call.q, mean[:, view.d_head :]) / 2 * call.scale
    filtering = call.scale * (call.q @ k.mT + k @ call.q.mT) / 2
    masked = (filtering + biases[:, :, None] + (0 if call.bias is None else call.bias)).masked_fill(
        ~call.allowed, -torch.inf
    )
    torch.testing.assert_close(call.probs, masked.softmax(-1), rtol=0, atol=1e-10)


def test_damping_stays_under_edits_of_routing_and_goes_under_edits_of_filtering():
    view = view_of("sd")
    tokens, calibration = input_ids(view.model), fitted(view)
    _, before = passed(view, tokens)
    for edit in edits_of(view, calibration):
        _, after = passed(view, tokens, replace(edit, layers=(0,)))
        if isinstance(edit, FilterScalar | FilterOff):
            assert after[0].bias is None
        else:
            assert torch.equal(after[0].bias, before[0].bias)


def test_half_precision_is_as_near_as_its_own_rounding():
    view = ModelView(tiny("llama", dtype=torch.bfloat16))
    tokens, calibration = input_ids(view.model), fitted(view)
    plain, _ = passed(view, tokens)
    logits, _ = passed(view, tokens, TruncateRouting(calibration=calibration, rank=2 * view.d_head))
    assert logits.dtype == torch.bfloat16
    assert (logits - plain).abs().max() < 0.1 * plain.abs().max()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (TruncateRouting(rank=3), "routing of rank 3 asked for; S turns planes: give an even number from 0"),
        (TruncateRouting(rank=-2), "routing of rank -2 asked for"),
        (TruncateRouting(rank=22), "routing of rank 22 asked for; heads of this model reach 20"),
        (TruncateRouting(rank=2), "TruncateRouting asked for without a calibration"),
        (TruncateFiltering(rank=-1), "filtering of rank -1 asked for; give a number from 0"),
        (TruncateFiltering(rank=21), "filtering of rank 21 asked for; heads of this model reach 20"),
        (FilterScalar(), "FilterScalar asked for without a calibration"),
        (FilterOff(layers=(3,)), r"layers \[3\] asked for; the model has layers 0 to 2"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(edit, message):
    view = view_of("llama")
    with pytest.raises(RheoscopeError, match=message), edited(view, edit):
        pass


def test_edits_that_do_not_fit_the_model_or_one_another_are_refused():
    view, net = view_of("llama"), view_of("sd")
    calibration = fitted(view)
    tokens = input_ids(view.model)
    with pytest.raises(RheoscopeError, match="layer 0 is S-D"), edited(net, TruncateFiltering(rank=1)):
        pass
    with pytest.raises(RheoscopeError, match="routing of rank 14 asked for; heads of this model reach 12"):
        TruncateRouting(rank=14).taps(net)
    with pytest.raises(RheoscopeError, match=r"layers \[3\] asked for; the model has layers 0 to 2"):
        TruncateRouting(rank=2, layers=(3,)).taps(net)
    with pytest.raises(RheoscopeError, match="calibration of another model"):
        FilterScalar(calibration=calibration).taps(net)
    with pytest.raises(RheoscopeError, match="two edits of the scores of one layer"):
        passed(view, tokens, FilterOff(), KeyBiasRouting(calibration=calibration))
    with pytest.raises(RheoscopeError, match="run whole windows without a cache"):
        generate(view, FilterOff())


def generate(view, edit):
    with Float64Throughout(), edited(view, edit):
        view.model.generate(input_ids(view.model, batch=1), max_new_tokens=3, do_sample=False)


def test_routing_is_not_read_off_q_and_k_where_other_scores_act():
    view = view_of("llama")
    corpus = text(view)
    doubled = view.tapped({"attn_scores": lambda layer, scores: 2 * scores}, layers=[0])
    edits = [doubled, edited(view, FilterOff(layers=(1,))), edited(view, Linearize(layers=(2,)))]
    for layer, edit in enumerate(edits):
        with Float64Throughout(), edit, pytest.raises(Refused, match=f"the scores of layer {layer} were replaced"):
            run_pass(view, batches(corpus, 4), [Routing(view, corpus)])
    with Float64Throughout(), edited(view, FilterOff(layers=(1,))):
        run_pass(view, batches(corpus, 4), [Loss(view, corpus)])
