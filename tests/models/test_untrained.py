"""The untrained null runs fresh weights in the trained ones' place, and never writes to these."""

import gc

import pytest
import torch
from torch import nn

from rheoscope.errors import Refused, RheoscopeError
from rheoscope.models.precision import Float64Throughout
from rheoscope.models.untrained import untrained
from rheoscope.models.view import ModelView
from tests.models.views import caught, marks, outputs, tokens_of
from tests.tiny import FAMILIES, tiny


def viewed(name, **options):
    model = tiny(name, **options)
    with Float64Throughout():
        return ModelView(model)


def numbers(model):
    """Where every parameter's and buffer's numbers lie, and what they are."""
    everything = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tensor.data_ptr(), tensor.dtype, tensor.detach().clone()) for name, tensor in everything]


def same(before, model):
    for (name, place, dtype, value), (other, tensor) in zip(
        before, [*model.named_parameters(), *model.named_buffers()], strict=True
    ):
        assert name == other
        assert (tensor.data_ptr(), tensor.dtype) == (place, dtype), name
        assert torch.equal(tensor.detach(), value), name


@pytest.mark.parametrize("family", FAMILIES)
def test_afterwards_every_number_is_in_its_place_and_the_outputs_are_equal_to_the_bit(family):
    view = viewed(family)
    tokens = tokens_of(view)
    before, hooks, trained = numbers(view.model), marks(view.model), outputs(view, tokens)
    with untrained(view, 0):
        null = outputs(view, tokens)
        same(before, view.model)  # between two passes too
    assert not torch.allclose(null, trained, atol=1e-2)
    same(before, view.model)
    assert marks(view.model) == hooks
    assert torch.equal(outputs(view, tokens), trained)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_seed_decides_the_numbers(family):
    view = viewed(family)
    tokens = tokens_of(view)

    def null(seed):
        with untrained(view, seed):
            return outputs(view, tokens)

    first = null(3)
    assert torch.equal(null(3), first)
    assert not torch.allclose(null(4), first, atol=1e-6)


def test_a_null_is_the_same_in_every_pass_and_for_every_batch_of_one_block():
    view = viewed("llama")
    tokens = tokens_of(view)
    with untrained(view, 0):
        together = outputs(view, tokens)
        torch.testing.assert_close(outputs(view, tokens[1:]), together[1:], rtol=0, atol=1e-12)


def test_the_global_generator_is_left_alone():
    view = viewed("llama")
    state = torch.get_rng_state()
    with untrained(view, 0):
        outputs(view, tokens_of(view))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_a_model_starts_training_from(family):
    view = viewed(family)
    scale = getattr(view.config, "initializer_range", 0.02)
    seen = {}

    def look(module, *_):
        seen.update({id(p): p.detach().clone() for p in module.parameters()})

    with untrained(view, 0):
        hooks = [block.register_forward_pre_hook(look) for block in view.blocks]
        outputs(view, tokens_of(view))
        for hook in hooks:
            hook.remove()
    matrices = [fresh for fresh in seen.values() if fresh.dim() > 1 and fresh.numel() > 1000]
    assert len(matrices) >= 3
    spread = torch.tensor([matrix.std() / scale for matrix in matrices])
    # some families scale the output projections down by sqrt(2 n_layers) = 2.4, or cut the tails at 3 sigma
    assert ((spread > 0.3) & (spread < 1.1)).all()
    assert spread.max() > 0.8
    assert all(abs(float(matrix.mean())) < 5 * scale / matrix.numel() ** 0.5 for matrix in matrices)
    gains = [fresh for fresh in seen.values() if fresh.dim() == 1 and fresh.numel() > 1]
    assert all((gain == 0).all() or (gain == 1).all() or float(gain.std()) < 2 * scale for gain in gains)


def test_layers_and_matrices_of_one_layer_differ():
    view = viewed("llama")
    weights = []

    def look(module, *_):
        weights.extend(p.detach().clone() for p in (module.q_proj.weight, module.o_proj.weight.T))

    with untrained(view, 0):
        hooks = [block.self_attn.register_forward_pre_hook(look) for block in view.blocks]
        outputs(view, tokens_of(view))
        for hook in hooks:
            hook.remove()
    flat = torch.stack([weight.flatten() for weight in weights])
    correlation = torch.corrcoef(flat) - torch.eye(len(flat))
    assert correlation.abs().max() < 0.1  # 2520 numbers each


def test_the_head_stays_as_it_is_also_when_it_is_tied_to_the_embedding():
    view = viewed("llama:tied")
    weight, seen = view.model.lm_head.weight.detach().clone(), []
    hook = view.model.lm_head.register_forward_pre_hook(lambda module, *_: seen.append(module.weight.detach().clone()))
    with untrained(view, 0):
        first = caught(view, tokens_of(view), "resid_pre")["resid_pre"][0]
    hook.remove()
    assert torch.equal(seen[0], weight)
    assert first.std() < 0.05  # the embedding was fresh: initializer_range is 0.02


def test_activations_can_be_tapped_meanwhile():
    view = viewed("llama")
    plain = caught(view, tokens_of(view), "q")["q"]
    with untrained(view, 0):
        null = caught(view, tokens_of(view), "q")["q"]
    assert all(not torch.allclose(a, b, atol=1e-2) for a, b in zip(plain, null, strict=True))


class BrokenError(Exception):
    """What goes wrong in these tests."""


@pytest.mark.parametrize("error", [BrokenError, KeyboardInterrupt])
@pytest.mark.parametrize("site", ["resid_pre", "attn_probs", "ffn_out", "resid_post"])
def test_an_error_or_ctrl_c_leaves_the_trained_weights(site, error):
    view = viewed("llama")
    before, hooks, trained = numbers(view.model), marks(view.model), outputs(view, tokens_of(view))

    def fail(layer, value):
        raise error

    with pytest.raises(error), untrained(view, 0):
        outputs(view, tokens_of(view), {site: fail}, layers=[1])
    same(before, view.model)
    assert marks(view.model) == hooks
    assert torch.equal(outputs(view, tokens_of(view)), trained)


def test_a_pass_after_one_that_broke_off_is_the_same_null_and_loses_nothing():
    view = viewed("llama")
    before = numbers(view.model)

    def fail(*_):
        raise BrokenError

    with untrained(view, 0):
        null = outputs(view, tokens_of(view))
        hook = view.part(1, "mlp").register_forward_hook(fail)
        for _ in range(2):
            with pytest.raises(BrokenError):
                outputs(view, tokens_of(view))
        hook.remove()
        assert torch.equal(outputs(view, tokens_of(view)), null)
    same(before, view.model)


def test_a_null_inside_a_null_is_refused_and_one_after_it_is_not():
    view = viewed("llama")
    before = numbers(view.model)
    again = untrained(ModelView(view.model), 1)
    with (
        untrained(view, 0),
        pytest.raises(RheoscopeError, match="inside another of the same model: end that one first"),
    ):
        again.__enter__()
    with untrained(view, 1):
        outputs(view, tokens_of(view))
    same(before, view.model)


@pytest.mark.parametrize("weight", [torch.zeros(3, dtype=torch.int8), torch.zeros(3, device="meta")])
def test_weights_that_cannot_be_exchanged_are_refused(weight):
    view = viewed("llama")
    view.model.register_parameter("more", nn.Parameter(weight, requires_grad=False))
    with pytest.raises(Refused, match="the weights are quantised or missing: measure without nulls"):
        untrained(view, 0).__enter__()


def test_no_more_than_one_block_is_held_twice():
    view = viewed("llama", num_hidden_layers=8)
    place = {id(p): p.data_ptr() for p in view.model.parameters()}
    most = 0

    def count(*_):
        nonlocal most
        most = max(most, sum(p.numel() for p in view.model.parameters() if p.data_ptr() != place[id(p)]))

    with untrained(view, 0):
        hooks = [module.register_forward_hook(count, prepend=True) for module in view.model.modules()]
        outputs(view, tokens_of(view))
        for hook in hooks:
            hook.remove()
    assert most == sum(p.numel() for p in view.blocks[0].parameters())
    gc.collect()
    assert all(p.data_ptr() == place[id(p)] for p in view.model.parameters())
