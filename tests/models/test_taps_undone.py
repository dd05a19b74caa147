"""Whatever happens while a model is tapped, it is afterwards what it was: hooks, implementation, outputs to the bit."""

import gc
import weakref
from contextlib import ExitStack
from itertools import permutations

import pytest
import torch

from rheoscope.models.check import check
from rheoscope.models.interface import taps_of
from rheoscope.models.precision import Float64Throughout
from rheoscope.models.taps import SITES
from rheoscope.models.view import ModelView
from tests.models.views import caught, marks, outputs, replacing, sites_of, tokens_of, view_of
from tests.tiny import FAMILIES, tiny


@pytest.fixture(params=["eager", "sdpa"])
def model(request):
    """A llama of our own, attending by one of transformers' implementations."""
    model = tiny("llama")
    model.set_attn_implementation(request.param)
    return model


@pytest.fixture
def view(model):
    with Float64Throughout():
        return ModelView(model)


class BrokenError(Exception):
    """What goes wrong in these tests."""


def failing(error):
    def fail(*_):
        raise error

    return fail


def unchanged(view, before, plain):
    """Marks and outputs are as before, the latter bit for bit."""
    assert marks(view.model) == before
    assert torch.equal(outputs(view, tokens_of(view)), plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_tapping_every_site_leaves_nothing_behind(family):
    view = view_of(family)
    before, plain = marks(view.model), outputs(view, tokens_of(view))
    caught(view, tokens_of(view), *sites_of(view), "attention")
    outputs(view, tokens_of(view), {site: lambda layer, x: 0.9 * x for site in sites_of(view)})
    unchanged(view, before, plain)


def test_opening_and_checking_a_model_leaves_nothing_behind(model):
    model(tokens_of(view_of("llama")), output_attentions=True)  # transformers puts hooks in place that stay
    before = marks(model)
    with Float64Throughout():
        view = ModelView(model)
        assert marks(model) == before
        check(view)
    assert marks(model) == before


@pytest.mark.parametrize("error", [BrokenError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("site", SITES)
def test_an_error_or_ctrl_c_inside_a_tap_leaves_nothing_behind(view, site, error):
    before, plain = marks(view.model), outputs(view, tokens_of(view))
    everything = {other: lambda layer, x: 0.9 * x for other in sites_of(view)}
    with pytest.raises(error), view.tapped(everything):
        outputs(view, tokens_of(view), {site: failing(error())}, layers=[1])
    unchanged(view, before, plain)


def test_an_error_inside_the_forward_pass_leaves_nothing_behind(view):
    before, plain = marks(view.model), outputs(view, tokens_of(view))
    hook = view.part(1, "mlp").register_forward_hook(failing(BrokenError()))
    with pytest.raises(BrokenError):
        outputs(view, tokens_of(view), {site: lambda layer, x: 0.9 * x for site in sites_of(view)})
    hook.remove()
    unchanged(view, before, plain)


def test_an_error_in_the_middle_leaves_the_taps_in_place_for_the_next_pass(view):
    expected = outputs(view, tokens_of(view), {"q": replacing(torch.zeros_like)})
    with view.tapped({"q": replacing(torch.zeros_like)}):
        with pytest.raises(BrokenError):
            outputs(view, tokens_of(view), {"z": failing(BrokenError())})
        assert torch.equal(outputs(view, tokens_of(view)), expected)


def test_a_refused_site_leaves_nothing_behind():
    view = view_of("gptj")
    before = marks(view.model)
    with (
        pytest.raises(Exception, match="no resid_mid"),
        view.tapped({"q": lambda *_: None, "resid_mid": lambda *_: None}),
    ):
        pass
    assert marks(view.model) == before


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_blocks_may_end_in_any_order_and_those_left_still_act(view, order):
    before, plain = marks(view.model), outputs(view, tokens_of(view))
    edits = [
        {"q": lambda layer, q: 0.5 * q},
        {"attn_probs": lambda layer, p: 0.9 * p},
        {"resid_mid": lambda layer, x: x + 0.1},
    ]
    blocks = [ExitStack() for _ in edits]
    for block, edit in zip(blocks, edits, strict=True):
        block.enter_context(view.tapped(edit))
    for step, ended in enumerate(order):
        blocks[ended].close()
        left = {site: tap for i in sorted(order[step + 1 :]) for site, tap in edits[i].items()}
        assert torch.equal(outputs(view, tokens_of(view)), outputs_of(view, left))
    unchanged(view, before, plain)


def outputs_of(view, edits):
    """Outputs of a fresh view of the same weights under edits."""
    model = tiny("llama")
    model.set_attn_implementation(view.model.config._attn_implementation)
    with Float64Throughout():
        return outputs(ModelView(model), tokens_of(view), edits)


def test_the_same_taps_twice_keep_their_place_when_the_inner_ones_end(view):
    halve, add = {"q": lambda layer, q: 0.5 * q}, {"q": lambda layer, q: q + 1}
    with view.tapped(halve), view.tapped(add):
        expected = outputs(view, tokens_of(view))
        with view.tapped(halve):
            assert not torch.equal(outputs(view, tokens_of(view)), expected)
        assert torch.equal(outputs(view, tokens_of(view)), expected)  # first halved, then added to


def test_two_views_of_one_model_do_not_disturb_each_other(view):
    before, plain = marks(view.model), outputs(view, tokens_of(view))
    seen = []
    with view.tapped({"z": lambda layer, z: seen.append(layer)}):
        with Float64Throughout():
            other = ModelView(view.model)
        seen.clear()
        with other.tapped({"q": lambda layer, q: 0.5 * q}):
            edited = outputs(view, tokens_of(view))
        assert seen == [0, 1, 2]
        seen.clear()
        outputs(view, tokens_of(view))
        assert seen == [0, 1, 2]
    assert not torch.allclose(edited, plain)
    unchanged(view, before, plain)


def test_a_part_is_replaced_by_all_views_before_the_next_part_is_read_by_any(view):
    with Float64Throughout():
        other = ModelView(view.model)
    seen = []
    with view.tapped({"attn_scores": lambda layer, s: seen.append(s.clone())}, layers=[0]):
        outputs(other, tokens_of(view), {"q": lambda layer, q: 0.5 * q})
    plain = caught(view, tokens_of(view), "attn_scores")["attn_scores"][0]
    torch.testing.assert_close(seen[0], 0.5 * plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_two_models_that_share_one_configuration_do_not_disturb_each_other(first_to_end):
    one, two = tiny("llama"), tiny("llama", seed=1)
    for module in two.modules():
        if hasattr(module, "config"):
            module.config = one.config
    with Float64Throughout():
        views = [ModelView(one), ModelView(two)]
    before, plain = [marks(v.model) for v in views], [outputs(v, tokens_of(v)) for v in views]
    edit = {"attn_probs": lambda layer, p: 0.5 * p}
    edited = [outputs(v, tokens_of(v), edit) for v in views]
    blocks = [ExitStack() for _ in views]
    for view, block in zip(views, blocks, strict=True):
        block.enter_context(view.tapped(edit))
    blocks[first_to_end].close()
    left = 1 - first_to_end
    assert torch.equal(outputs(views[left], tokens_of(views[left])), edited[left])
    other = outputs(views[first_to_end], tokens_of(views[first_to_end]))
    torch.testing.assert_close(other, plain[first_to_end], rtol=0, atol=1e-12)  # untouched, though it attends by ours
    blocks[left].close()
    for view, mark, logits in zip(views, before, plain, strict=True):
        unchanged(view, mark, logits)


def test_taps_do_not_keep_a_model_alive():
    with Float64Throughout():
        view = ModelView(tiny("llama"))
    outputs(view, tokens_of(view), {site: lambda layer, x: None for site in sites_of(view)})
    model, attention = weakref.ref(view.model), weakref.ref(view.attentions[0])
    del view
    gc.collect()
    assert model() is None
    assert attention() is None


def test_taps_at_a_module_are_listed_while_they_last(view):
    assert not taps_of(view.attentions[1])
    with view.tapped({"q": lambda layer, q: None}, layers=[1]):
        assert [tapped.layer for tapped in taps_of(view.attentions[1])] == [1]
        assert not taps_of(view.attentions[0])
    assert not taps_of(view.attentions[1])


def test_a_tap_may_itself_run_the_model(view):
    plain = outputs(view, tokens_of(view))
    runs = []

    def run_again(layer, _x):
        if not runs:
            runs.append(None)
            runs[0] = outputs(view, tokens_of(view))

    assert torch.equal(outputs(view, tokens_of(view), {"resid_post": run_again}, layers=[1]), plain)
    assert torch.equal(runs[0], plain)
