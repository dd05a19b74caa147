"""Adapters: trained in place of the weights, merged exactly, resumed to the same numbers, refused without peft."""

import importlib.util

import pytest
import torch

from rheoscope.errors import RheoscopeError
from rheoscope.models.view import ModelView
from rheoscope.surgery import adapters as module
from rheoscope.surgery.adapters import adapters, refuse_adapters
from rheoscope.surgery.distill import Distillation, distil
from rheoscope.surgery.restructure import restructured
from tests.instruments.texts import random_corpus
from tests.surgery.restructuring import EXAMPLES
from tests.tiny import input_ids, tiny

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
quiet = pytest.mark.filterwarnings("ignore")  # what peft imports warns of its own future
PLACES = [("llama", "all at once"), ("gpt2", "linear"), ("qwen3", "fused"), ("mixtral", "drop"), ("opt", "shrink")]


def single(name):
    return ModelView(tiny(name, dtype=torch.float32))


def a_model(view, example):
    return restructured(view, EXAMPLES[example](view))


@needs_peft
@quiet
@pytest.mark.parametrize(("name", "example"), PLACES)
def test_merging_keeps_what_the_adapters_gave_and_the_way_the_model_is_built(name, example):
    view = single(name)
    edited = a_model(view, example)
    tokens = input_ids(view.model)
    shapes = {key: p.shape for key, p in edited.state_dict().items()}
    with torch.no_grad():
        before = edited(tokens).logits
        with adapters(edited, 3, seed=0) as trained:
            assert torch.equal(edited(tokens).logits, before)  # B is 0 at first
            generator = torch.Generator().manual_seed(1)
            for parameter in trained.values():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            with_adapters = edited(tokens).logits
        merged = edited(tokens).logits
    assert trained
    assert (with_adapters - before).abs().max() > 1e-2
    torch.testing.assert_close(merged, with_adapters, rtol=1e-4, atol=1e-4)
    assert {key: p.shape for key, p in edited.state_dict().items()} == shapes
    assert all(p.requires_grad for p in edited.parameters())


@needs_peft
@quiet
def test_a_distillation_through_adapters_lowers_the_match_by_matrices_of_that_rank():
    view = single("llama")
    edited = a_model(view, "drop")
    start = {name: p.clone() for name, p in edited.named_parameters()}
    settings = Distillation(steps=40, rate=1e-2, windows=12, match=100.0, lora_rank=2)
    result = distil(view, edited, random_corpus(), settings)
    assert result.losses[-1][1] < 0.8 * result.losses[0][1]
    changes = {name: (p - start[name]).detach() for name, p in edited.named_parameters()}
    ranks = {name: int(torch.linalg.matrix_rank(d, rtol=1e-4)) for name, d in changes.items() if d.any()}
    assert set(ranks.values()) == {2}
    assert all("layers" in name for name in ranks)


@needs_peft
@quiet
def test_a_stopped_distillation_through_adapters_goes_on_to_the_same_numbers(tmp_path):
    view, memory = single("llama"), tmp_path / "state.safetensors"
    whole, again = a_model(view, "drop"), a_model(view, "drop")
    distil(view, whole, random_corpus(), Distillation(steps=7, lora_rank=2))
    distil(view, a_model(view, "drop"), random_corpus(), Distillation(steps=4, lora_rank=2), memory=memory)
    result = distil(view, again, random_corpus(), Distillation(steps=7, lora_rank=2), memory=memory)
    assert (result.steps, len(result.losses)) == (7, 3)
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), again.parameters(), strict=True))
    with pytest.raises(RheoscopeError, match="another model, plan or text"):
        distil(view, a_model(view, "drop"), random_corpus(), Distillation(steps=7, lora_rank=3), memory=memory)


def test_without_peft_or_with_a_rank_of_nothing_one_sentence_says_so(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(RheoscopeError, match=r"they need peft, which is not installed: pip install rheoscope\[lora\]"):
        refuse_adapters(8)
    view = single("llama")
    with pytest.raises(RheoscopeError, match="they need peft"):
        distil(view, a_model(view, "drop"), random_corpus(), Distillation(steps=1, lora_rank=4))
    with pytest.raises(RheoscopeError, match="adapters of rank 0 asked for: give 1 or more"):
        refuse_adapters(0)
