"""Edits of attention and feed-forward network: undone bit for bit, causal, true to their names, on all families."""

import pytest
import torch

from rheoscope.errors import Refused, RheoscopeError
from rheoscope.instruments.steering.strongest import strongest
from rheoscope.models.families import Residual
from rheoscope.models.field import ffn_field
from rheoscope.models.view import ModelView
from rheoscope.surgery.edits import edited
from rheoscope.surgery.edits_steering import (
    AttentionGain,
    GateFFN,
    OtherPrefix,
    ParallelFFN,
    RadialFFN,
    TangentialFFN,
    TopAttention,
    ZeroAttention,
    ZeroFFN,
)
from tests.tiny import CAUSAL, LENGTH, VARIANTS, Float64Throughout, input_ids, tiny

EXPERTS = {"mixtral", "qwen3_moe", "gpt_oss"}  # tokens are sorted by expert, so sums of the others may round anew
EDITS = {
    "zero": ZeroFFN(),
    "zero, first spared": ZeroFFN(spare="first"),
    "radial": RadialFFN(),
    "radial, massive spared": RadialFFN(spare="massive"),
    "tangential": TangentialFFN(layers=(1, 2)),
    "gates": GateFFN(gates=(0.5, 1.25, 2.0)),
    "zero attention": ZeroAttention(layers=(1,)),
    "gain": AttentionGain(gain=1.5),
    "top": TopAttention(k=3),
    "parallel": ParallelFFN(layers=(0, 2)),
    "prefix": OtherPrefix(keep=4),
}
NORMED = ("bert", "roberta", "distilbert", "opt:post-norm")  # the stream itself
SITES = ("resid_pre", "attn_out", "ffn_out", "resid_post")


class StopHereError(Exception):
    pass


def view_of(name):
    return ModelView(tiny(name))


def n_hooks(view):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in view.model.modules())


def post_norm(view):
    return view.family.residual is Residual.POST_NORM


def fitting(view):
    """The edits that this family can be given."""
    return {name: edit for name, edit in EDITS.items() if not (name == "parallel" and post_norm(view))}


@torch.no_grad()
def logits(view, tokens):
    with Float64Throughout():
        return view.forward(tokens)


def caught(view, tokens, *sites):
    """Copies of the sites of every layer in one pass."""
    kept = {site: [] for site in sites}
    with view.tapped({site: lambda layer, value, site=site: kept[site].append(value.clone()) for site in sites}):
        logits(view, tokens)
    return kept


@pytest.mark.parametrize("name", VARIANTS)
def test_every_edit_changes_the_model_and_is_undone_bit_for_bit(name):
    view = view_of(name)
    tokens = input_ids(view.model)
    before, hooks = logits(view, tokens), n_hooks(view)
    for label, edit in fitting(view).items():
        with edited(view, edit):
            changed = not torch.equal(logits(view, tokens), before)
        inert = label == "parallel" and view.family.residual is Residual.PARALLEL
        assert changed is not inert, label
        assert torch.equal(logits(view, tokens), before), label
        assert n_hooks(view) == hooks, label


@pytest.mark.parametrize("name", VARIANTS)
def test_every_edit_is_undone_after_an_exception_in_the_middle_of_a_pass(name):
    view = view_of(name)
    tokens = input_ids(view.model)
    before, hooks = logits(view, tokens), n_hooks(view)

    def stop(layer, value):
        if layer == 1:
            raise StopHereError

    for edit in fitting(view).values():
        with pytest.raises(StopHereError), edited(view, edit), view.tapped({"ffn_out": stop}):
            logits(view, tokens)
        assert n_hooks(view) == hooks
    assert torch.equal(logits(view, tokens), before)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_changed_token_leaves_the_past_of_an_edited_model_as_it_was(name):
    view, place = view_of(name), 8
    tokens = input_ids(view.model)
    changed = tokens.clone()
    changed[:, place] = 3 + (tokens[:, place] - 2) % (view.config.vocab_size - 3)
    for label, edit in fitting(view).items():
        with edited(view, edit):
            before, after = logits(view, tokens), logits(view, changed)
        if VARIANTS[name].family in EXPERTS:
            assert (before[:, :place] - after[:, :place]).abs().max() < 1e-12, label
        else:
            assert torch.equal(before[:, :place], after[:, :place]), label
        seen_later = (before[:, place:] != after[:, place:]).any()
        assert seen_later or (label == "prefix" and place < LENGTH - 4), label


@pytest.mark.parametrize("name", [name for name in VARIANTS if not {name, VARIANTS[name].family} & set(NORMED)])
def test_parallel_layers_add_the_field_at_resid_pre_and_keep_the_sum(name):
    view = view_of(name)
    tokens = input_ids(view.model)
    with edited(view, ParallelFFN(layers=(1,))):
        sites = caught(view, tokens, *SITES)
    pre, A, F, post = (sites[site][1] for site in SITES)
    with Float64Throughout(), torch.no_grad():
        assert (F - ffn_field(view, 1, pre)).abs().max() < 1e-12
    assert (pre + A + F - post).abs().max() < 1e-12


@pytest.mark.parametrize("name", NORMED)
def test_parallel_layers_are_refused_where_the_stream_itself_is_normed(name):
    with (
        pytest.raises(Refused, match=f"{VARIANTS[name].family} norms the stream between attention and FFN"),
        edited(view_of(name), ParallelFFN()),
    ):
        pass


def test_a_tap_of_resid_mid_inside_a_parallel_edit_sees_the_stream_itself():
    view = view_of("llama")
    tokens = input_ids(view.model)
    with edited(view, ParallelFFN()):
        sites = caught(view, tokens, "resid_pre", "attn_out", "resid_mid")
    for pre, A, mid in zip(*sites.values(), strict=True):
        assert torch.equal(pre + A, mid)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gemma2", "granite", "bert", "opt"])
def test_radial_and_tangential_parts_add_up_to_what_the_ffn_writes(name):
    view = view_of(name)
    tokens = input_ids(view.model)
    stream = "resid_pre" if view.family.residual is Residual.PARALLEL else "resid_mid"
    whole = caught(view, tokens, stream, "ffn_out")
    parts = []
    for edit in (RadialFFN(layers=(0,)), TangentialFFN(layers=(0,))):
        with edited(view, edit):
            parts.append(caught(view, tokens, "ffn_out")["ffn_out"][0])
    y, F = whole[stream][0], whole["ffn_out"][0]
    radial, tangential = parts
    assert (radial + tangential - F).abs().max() < 1e-12
    assert torch.linalg.vecdot(tangential, y).abs().max() < 1e-10
    assert (torch.cosine_similarity(radial, y, dim=-1).abs() - 1).abs().max() < 1e-12


def test_radial_only_leaves_every_direction_as_attention_left_it():
    view = view_of("llama")
    with edited(view, RadialFFN()):
        sites = caught(view, input_ids(view.model), "resid_mid", "resid_post")
    for mid, post in zip(*sites.values(), strict=True):
        along = torch.cosine_similarity(mid, post, dim=-1)
        # a token whose FFN would shrink it through zero comes out at the opposite point of the same line
        assert (along.abs() - 1).abs().max() < 1e-12


@pytest.mark.parametrize("spare", ["first", "massive"])
def test_spared_tokens_get_what_the_ffn_wrote(spare):
    view = view_of("llama")
    tokens = input_ids(view.model)
    with torch.no_grad():
        view.model.get_input_embeddings().weight[int(tokens[0, 6])] *= 500
    whole = caught(view, tokens, "ffn_out")["ffn_out"][0]
    with edited(view, ZeroFFN(layers=(0,), spare=spare)):
        left = caught(view, tokens, "ffn_out")["ffn_out"][0]
    spared = torch.zeros(tokens.shape, dtype=torch.bool)
    spared[:, 0] = True
    if spare == "massive":
        spared |= tokens == tokens[0, 6]
    assert (left - whole)[spared].abs().max() < 1e-9  # attention is mixed in another order where it is read
    assert not left[~spared].any()


@pytest.mark.parametrize("side", ["left", "right"])
def test_sparing_the_first_token_knows_padding(side):
    view = view_of("llama")
    tokens = input_ids(view.model)
    pad = torch.zeros_like(tokens[:, :5])
    padded = torch.cat([pad, tokens] if side == "left" else [tokens, pad], 1)
    valid = torch.ones_like(padded, dtype=torch.bool)
    place = slice(5, None) if side == "left" else slice(0, -5)
    valid[:, : 5 if side == "left" else 0] = False
    valid[:, padded.shape[1] - (5 if side == "right" else 0) :] = False
    with Float64Throughout(), torch.no_grad():
        for spare in ("first", "massive"):
            with edited(view, ZeroFFN(spare=spare)):
                alone, inside = view.forward(tokens), view.forward(padded, valid)[:, place]
            assert (alone - inside).abs().max() < 1e-9


def test_top_attention_keeps_the_largest_weights_and_the_sum_of_each_row():
    probs = torch.rand(2, 3, 5, 7, dtype=torch.float64)
    kept = strongest(probs, 2)
    assert ((kept > 0).sum(-1) == 2).all()
    assert torch.allclose(kept.sum(-1), probs.sum(-1), atol=1e-14, rtol=0)
    assert torch.equal(kept.argmax(-1), probs.argmax(-1))
    assert torch.equal(strongest(probs, 7), probs)
    few = probs * (torch.arange(7) < 2)
    assert torch.equal(strongest(few, 2), few)


def test_another_prefix_is_the_text_of_the_next_row_up_to_the_kept_positions():
    view = view_of("gpt2")
    tokens = input_ids(view.model, batch=3)
    mixed = torch.cat([tokens.roll(-1, 0)[:, :-4], tokens[:, -4:]], 1)
    with edited(view, OtherPrefix(keep=4)):
        assert torch.equal(logits(view, tokens), logits(view, tokens))
        edited_logits = logits(view, tokens)
    assert torch.equal(edited_logits, logits(view, mixed))


@pytest.mark.parametrize(
    ("edit", "batch", "message"),
    [
        (OtherPrefix(keep=LENGTH), 2, f"the last {LENGTH} positions asked for; the windows have {LENGTH}"),
        (OtherPrefix(keep=0), 2, "leaves 0 positions"),
        (OtherPrefix(keep=3), 1, "a batch of one window"),
        (GateFFN(gates=(1.0,)), 2, "1 gates given for 3 layers"),
        (TopAttention(k=0), 2, "the 0 largest attention weights"),
        (ZeroFFN(spare="last"), 2, "spare='last' asked for"),
    ],
)
def test_bad_input_is_one_sentence(edit, batch, message):
    view = view_of("llama")
    tokens = input_ids(view.model, batch=batch)
    with pytest.raises(RheoscopeError, match=message), edited(view, edit):
        logits(view, tokens)
