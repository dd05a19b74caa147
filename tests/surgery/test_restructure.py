"""Edits as modules: the same numbers as through taps, fewer parameters, and refusals in a sentence."""

import copy

import pytest
import torch

from rheoscope.errors import Refused, RheoscopeError
from rheoscope.models.view import ModelView
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.edits_sinks import ConstantHeads, DiagonalHeads, DropHeads, SinkOneHot
from rheoscope.surgery.edits_steering import GateFFN
from rheoscope.surgery.edits_structure import DropAttention, Parallelize, ShrinkHeads
from rheoscope.surgery.restructure import restructured, saving
from tests.models.views import EXPERTS, view_of
from tests.surgery.restructuring import (
    EXAMPLES,
    all_heads,
    group,
    logits_by_taps,
    logits_of,
    refused_for,
    view_of_modules,
)
from tests.tiny import CAUSAL, VARIANTS, input_ids, tiny


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("name", VARIANTS)
def test_modules_do_what_taps_do_with_as_many_parameters_less_as_predicted_and_see_no_later_token(name, example):
    view = view_of(name)
    edits = EXAMPLES[example](view)
    message = refused_for(name, example, view)
    if message:
        with pytest.raises(RheoscopeError, match=message):
            restructured(view, edits)
        return
    plain = logits_of(view)
    new = view_of_modules(view, edits)
    found = logits_of(new)
    torch.testing.assert_close(found, logits_by_taps(view, edits), rtol=0, atol=1e-10)
    assert torch.equal(logits_of(view), plain)
    assert view.n_parameters - new.n_parameters == sum(saving(view, edit) for edit in edits)
    if name in CAUSAL:
        sees_no_later_token(new, found, exact=VARIANTS[name].family not in EXPERTS)


def sees_no_later_token(new, before, *, exact):
    """Another token leaves the logits before it as they were; to rounding where experts are given other batches."""
    tokens = input_ids(new.inner)
    after = tokens.clone()
    after[:, 7] = 3 + (tokens[:, 7] - 2) % (new.config.vocab_size - 3)
    change = (before - logits_of(new, after)).abs().amax((0, 2))
    assert change[:7].max() <= (0 if exact else 1e-12)
    assert change[7] > 1e-3


def test_what_is_saved_is_what_the_heads_had():
    view = view_of("llama")  # 42 dimensions, 6 heads of 10 on 2 of keys, no biases
    a_head, a_key_head, gain = 2 * 42 * 10, 2 * 42 * 10, 42
    three = DropHeads(heads=group(view))
    assert saving(view, three) == 3 * a_head + a_key_head
    assert saving(view, DropAttention(layers=(0, 2))) == 2 * (6 * a_head + 2 * a_key_head)
    constant = ConstantHeads(heads=group(view), constants=((0.0,) * 10,) * 3)
    assert saving(view, constant) == 3 * a_head + a_key_head - 42  # an output bias is made
    assert saving(view, DiagonalHeads(heads=group(view))) == 3 * a_head + a_key_head - 2 * 42 * 10
    assert saving(view, ShrinkHeads(layers=(1,), rank=4)) == (6 + 2) * 42 * 6
    assert saving(view, Parallelize(layers=(1,), fused=True)) == 2 * gain
    assert saving(view, Parallelize(layers=(1,))) == saving(view, Linearize()) == 0


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_oss"])
def test_the_original_stays_as_it_was_bit_for_bit(name):
    view = ModelView(tiny(name, dtype=torch.float32))
    before, numbers = logits_of(view), copy.deepcopy(view.model.state_dict())
    model = restructured(view, [*EXAMPLES["drop"](view), GateFFN(gates=(0.5, 0.5, 0.5))])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(logits_of(view), before)
    assert all(torch.equal(value, numbers[key]) for key, value in view.model.state_dict().items())


@pytest.mark.parametrize("example", EXAMPLES)
def test_float32_agrees_to_its_rounding(example):
    view = ModelView(tiny("llama", dtype=torch.float32))
    edits = EXAMPLES[example](view)
    new = ModelView(restructured(view, edits))
    torch.testing.assert_close(logits_of(new), logits_by_taps(view, edits), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_edits_compose_and_heads_are_counted_anew(name):
    view = view_of(name)
    first = EXAMPLES["drop"](view)
    once = view_of_modules(view, first)
    assert once.sizes[1].n_heads == view.n_heads - len(group(view))
    again = [DropHeads(heads=((1, 0), (1, 1), (1, 2)[:2]) if name != "llama" else tuple((1, h) for h in range(3)))]
    twice = view_of_modules(once, again)
    shifted = [DropHeads(heads=tuple((1, head + len(group(view))) for _, head in again[0].heads))]
    torch.testing.assert_close(logits_of(twice), logits_by_taps(view, first + shifted), rtol=0, atol=1e-10)
    torch.testing.assert_close(logits_of(twice), logits_by_taps(once, again), rtol=0, atol=1e-10)
    assert [len(edits) for edits in twice.model.config.rounds] == [1, 1]


def test_maps_of_tokens_add_up_over_rounds():
    for name in ("llama", "bert"):
        view = view_of(name)
        once = view_of_modules(view, [DiagonalHeads(heads=group(view))])
        rest = DiagonalHeads(heads=tuple((1, head) for head in range(once.sizes[1].n_heads)))
        twice = view_of_modules(once, [rest])
        expected = logits_by_taps(view, [DiagonalHeads(heads=all_heads(view, 1))])
        torch.testing.assert_close(logits_of(twice), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "edits", "message"),
    [
        ("llama", [], "by no edits"),
        ("llama", [SinkOneHot(heads=((0, 0),))], "acts through taps only: a model can keep DropHeads"),
        ("llama", [DropHeads(heads=((1, 0), (1, 2)))], r"share key head 0 with heads \[1\]: remove those too"),
        ("llama:mqa", [DropHeads(heads=((1, 0),))], r"read one key head \(MQA\)"),
        ("gpt_bigcode", [DiagonalHeads(heads=((1, 0),))], r"read one key head \(MQA\)"),
        ("llama", [DropHeads(heads=((1, 6),))], "layer 1 has heads 0 to 5"),
        ("llama", [DropHeads(heads=((0, 1),)), DiagonalHeads(heads=((0, 1),))], r"head \(0, 1\) asked to be changed"),
        ("llama", [DropAttention(layers=(0,)), DropHeads(heads=((0, 1),))], "to lose its attention and to have it"),
        ("llama", [Linearize(), Linearize(layers=(1,), scaled=True)], "linear twice"),
        ("llama", [Linearize(layers=(1,)), Linearize(layers=(1,))], "layer 1 asked to be made linear twice"),
        ("llama", [ShrinkHeads(rank=4), ShrinkHeads(rank=2)], "narrower twice"),
        ("gpt2", [ShrinkHeads((0, 1), rank=4), ShrinkHeads((1, 2), rank=4)], "layer 1 asked to be made narrower twice"),
        ("rheoscope_decoder:morlet", [ShrinkHeads((2,), rank=2)] * 2, "layer 2 asked to be made narrower twice"),
        ("llama", [ShrinkHeads(rank=3)], "RoPE turns pairs"),
        ("llama", [ShrinkHeads(rank=10)], "heads have 10: ask for fewer"),
        ("llama", [Linearize(feature="hedgehog")], "no feature map is called 'hedgehog'"),
        ("llama", [GateFFN(gates=(1.0,))], "1 gates given for 3 layers"),
        ("llama", [GateFFN((1,), (float("nan"),))], "give finite numbers"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_a_sentence(name, edits, message):
    with pytest.raises(RheoscopeError, match=message):
        restructured(view_of(name), edits)


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (DropAttention(layers=(1,)), DropHeads(heads=((1, 0),)), "layer 1 has no heads left"),
        (DropAttention(layers=(1,)), Linearize(layers=(1,)), "taken its attention away|taken their attention away"),
        (DropAttention(layers=(1,)), ShrinkHeads(layers=(1,)), "no attention is left|taken"),
        (DropAttention(layers=(1,)), DropAttention(), r"asked to be dropped in layers \[1\]; no attention is left"),
        (Linearize(layers=(1,)), Linearize(layers=(1,)), "it is already"),
        (Parallelize(layers=(1,), fused=True), GateFFN(gates=(1.0, 0.5, 1.0)), "edit first, fuse last"),
        (ShrinkHeads(layers=(1,)), DropHeads(heads=((1, 0), (1, 1), (1, 2))), "make both edits at once"),
    ],
)
def test_a_second_edit_that_finds_nothing_to_edit_is_refused(first, then, message):
    once = view_of_modules(view_of("llama"), [first])
    with pytest.raises(RheoscopeError, match=message):
        restructured(once, [then])


def test_an_encoder_cannot_be_linear_and_a_stranger_cannot_be_kept():
    with pytest.raises(Refused, match="reads both ways"):
        restructured(view_of("bert"), [Linearize()])
    view = ModelView(tiny("llama"))
    view.family = None
    with pytest.raises(Refused, match=r"has no row in rheoscope/models/families\.py"):
        saving(view, DropAttention())


def test_attention_that_is_gone_cannot_be_dropped_through_taps_either():
    once = view_of_modules(view_of("llama"), [DropAttention(layers=(1,))])
    with pytest.raises(Refused, match="no attention is left there: leave them out"):
        logits_by_taps(once, [DropAttention(layers=(1,))])
