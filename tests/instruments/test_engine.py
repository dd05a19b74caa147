"""One pass serves all instruments, keeps nothing of a layer, and leaves nothing on the model."""

import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import xarray as xr

from rheoscope.corpus import batches
from rheoscope.errors import RheoscopeError
from rheoscope.instruments.engine import BATCH_TOKENS, batch_size_for, refuse_window, run_pass
from rheoscope.instruments.instrument import Instrument
from rheoscope.instruments.loss import Loss
from rheoscope.instruments.routing.routing import Routing
from rheoscope.models.view import ModelView
from tests.tiny import tiny

from .texts import random_corpus

CORPUS = random_corpus()
SITES = ("resid_pre", "attn_in", "attention", "attn_out", "resid_mid", "ffn_in", "ffn_out", "resid_post")


class Witness(Instrument):
    """Notes what it was shown, and which tensors of earlier layers are still alive when the next one is shown."""

    name = "witness"
    sites = frozenset(SITES)
    reads_output = True

    @dataclass(frozen=True)
    class Options:
        """Nothing to choose."""

    def __init__(self, view, corpus, options=None):
        super().__init__(view, corpus, options)
        self.shown, self.outputs, self.alive = [], [], []
        self.of_last_layer = {}

    def observe(self, layer, sites, batch):
        self.alive += [name for name, reference in self.of_last_layer.items() if reference() is not None]
        parts = {name: getattr(sites, name) for name in SITES}
        assert all(value is not None for value in parts.values())
        parts |= {name: getattr(sites.attention, name) for name in ("q", "k", "v", "scores", "probs")}
        del parts["resid_post"]  # which is the next layer's resid_pre
        if layer == 0:
            del parts["resid_pre"]  # the embeddings, which transformers itself holds until the end
        self.of_last_layer = {name: weakref.ref(value) for name, value in parts.items()}
        self.shown.append((layer, batch.windows.tolist()))

    def observe_output(self, output, batch):
        self.outputs.append(tuple(output.shape))

    def finalize(self):
        return xr.Dataset()


def traces_on(model):
    """Everything a pass could leave behind: hooks, attributes, the chosen attention, gradients, random state."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_always_called")
    return {
        "hooks": [name for name, module in model.named_modules() if any(getattr(module, kind) for kind in hooks)],
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "attention": model.config._attn_implementation,
        "gradients": [name for name, parameter in model.named_parameters() if parameter.grad is not None],
        "requires": [parameter.requires_grad for parameter in model.parameters()],
        "bytes": [parameter.detach().numpy().tobytes() for parameter in model.parameters()],
        "buffers": [buffer.numpy().tobytes() for buffer in model.buffers()],
        "random": torch.get_rng_state().tolist(),
        "grad mode": torch.is_grad_enabled(),
    }


def test_every_layer_of_every_batch_is_shown_once_and_in_order():
    view = ModelView(tiny("llama"))
    witness = Witness(view, CORPUS)
    run_pass(view, batches(CORPUS, 5), [witness])
    windows = ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11])
    assert witness.shown == [(layer, some) for some in windows for layer in range(3)]
    assert witness.outputs == [(5, 29, 61), (5, 29, 61), (2, 29, 61)]


def test_no_tensor_of_a_layer_outlives_the_layer():
    view = ModelView(tiny("llama"))
    witness = Witness(view, CORPUS)
    run_pass(view, batches(CORPUS, 5), [Loss(view, CORPUS), Routing(view, CORPUS), witness])
    assert len(witness.of_last_layer) == 12
    assert witness.alive == []
    assert [name for name, reference in witness.of_last_layer.items() if reference() is not None] == []


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "gemma2"])
def test_a_pass_leaves_nothing_on_the_model(family):
    view = ModelView(tiny(family))
    before = traces_on(view.model)
    run_pass(view, batches(CORPUS, 5), [Witness(view, CORPUS), Routing(view, CORPUS)])
    assert traces_on(view.model) == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_pass_that_breaks_off_leaves_nothing_on_the_model_either(error):
    view = ModelView(tiny("llama"))
    before = traces_on(view.model)

    class Broken(Witness):
        def observe(self, layer, sites, batch):
            if layer == 1:
                raise error("in the middle")

    with pytest.raises(error, match="in the middle"):
        run_pass(view, batches(CORPUS, 5), [Broken(view, CORPUS)])
    assert traces_on(view.model) == before


def test_the_head_is_run_only_for_those_who_read_logits():
    view = ModelView(tiny("llama"))
    calls = []
    view.model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    run_pass(view, batches(CORPUS, 6), [Routing(view, CORPUS)])
    assert calls == []
    run_pass(view, batches(CORPUS, 6), [Routing(view, CORPUS), Loss(view, CORPUS)])
    assert calls == [1, 1]


def test_readings_are_the_same_alone_and_in_company():
    view = ModelView(tiny("gemma2"))
    alone, company = Routing(view, CORPUS), Routing(view, CORPUS)
    run_pass(view, batches(CORPUS, 4), [alone])
    run_pass(view, batches(CORPUS, 4), [Witness(view, CORPUS), company, Loss(view, CORPUS)])
    expected, found = alone.finalize(), company.finalize()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=str(name))


def test_progress_is_told_after_every_batch():
    view = ModelView(tiny("gpt2"))
    told = []
    loss = Loss(view, CORPUS)
    run_pass(view, batches(CORPUS, 5), [loss], task="some", total=12, progress=lambda *what: told.append(what))
    assert told == [("some", 5, 12), ("some", 10, 12), ("some", 12, 12)]


def test_a_batch_is_two_thousand_tokens_or_one_window_and_fewer_for_a_large_vocabulary():
    view = ModelView(tiny("gpt2"))
    assert batch_size_for(view, 29) == BATCH_TOKENS // 29
    assert batch_size_for(view, 5000) == 1
    view.model.lm_head.weight = torch.nn.Parameter(torch.empty(2**20, 1, device="meta"))  # 4 MiB of logits a token
    assert batch_size_for(view, 16) == 8


def test_a_window_longer_than_the_context_is_refused():
    view = ModelView(tiny("gpt2"), ref="some/model")
    refuse_window(view, 31)
    with pytest.raises(RheoscopeError, match="windows of 32 tokens asked for; some/model takes at most 31"):
        refuse_window(view, 32)
