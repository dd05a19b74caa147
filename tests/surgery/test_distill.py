"""Distillation lowers what it is asked to lower, leaves the rest alone, and goes on where it was stopped."""

import copy

import pytest
import torch

from rheoscope.errors import RheoscopeError
from rheoscope.models.view import ModelView
from rheoscope.surgery.distill import Distillation, distil, trainable
from rheoscope.surgery.edits_sinks import DropHeads
from rheoscope.surgery.restructure import restructured
from tests.instruments.texts import random_corpus
from tests.tiny import tiny

EDIT = DropHeads(heads=((1, 0), (1, 1), (1, 2)))


@pytest.fixture(scope="module")
def view():
    return ModelView(tiny("llama", dtype=torch.float32))


def test_the_match_falls_and_embeddings_stay(view):
    edited = restructured(view, [EDIT])
    trained = trainable(edited)
    frozen = {name: p.clone() for name, p in edited.named_parameters() if name not in trained}
    result = distil(view, edited, random_corpus(), Distillation(steps=40, rate=1e-3, windows=12, match=100.0))
    assert result.losses[-1][1] < 0.7 * result.losses[0][1]
    assert frozen
    assert all(torch.equal(p, frozen[name]) for name, p in edited.named_parameters() if name in frozen)
    assert all(p.requires_grad and p.grad is None for p in edited.parameters())


def test_a_stopped_distillation_goes_on_to_the_same_numbers(view, tmp_path):
    whole, parts = restructured(view, [EDIT]), restructured(view, [EDIT])
    distil(view, whole, random_corpus(), Distillation(steps=7))
    memory = tmp_path / "state.safetensors"
    distil(view, parts, random_corpus(), Distillation(steps=4), memory=memory)
    again = restructured(view, [EDIT])
    result = distil(view, again, random_corpus(), Distillation(steps=7), memory=memory)
    assert (result.steps, len(result.losses)) == (7, 3)
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), again.parameters(), strict=True))


def test_a_memory_of_something_else_or_no_end_is_refused(view, tmp_path):
    memory = tmp_path / "state.safetensors"
    edited = restructured(view, [EDIT])
    with pytest.raises(RheoscopeError, match="without an end"):
        distil(view, edited, random_corpus(), Distillation())
    distil(view, edited, random_corpus(), Distillation(steps=1), memory=memory)
    with pytest.raises(RheoscopeError, match="another model, plan or text"):
        distil(view, edited, random_corpus(seed=1), Distillation(steps=1), memory=memory)
    memory.write_bytes(b"nothing")
    with pytest.raises(RheoscopeError, match="keeps no distillation"):
        distil(view, edited, random_corpus(), Distillation(steps=1), memory=memory)


def test_a_memory_of_one_that_began_from_other_weights_is_refused(view, tmp_path):
    """With and without the refit, edits, text and settings are the same; a single other weight is enough."""
    memory = tmp_path / "state.safetensors"
    distil(view, restructured(view, [EDIT]), random_corpus(), Distillation(steps=1), memory=memory)
    for layer in (0, 1):
        edited = restructured(view, [EDIT])
        with torch.no_grad():
            edited.blocks[layer].self_attn.o_proj.weight[0, 0] += 1e-3
        with pytest.raises(RheoscopeError, match="or one that began from other weights"):
            distil(view, edited, random_corpus(), Distillation(steps=2), memory=memory)


def test_a_memory_of_the_same_weights_under_another_configuration_is_refused(view, tmp_path):
    memory = tmp_path / "state.safetensors"
    distil(view, restructured(view, [EDIT]), random_corpus(), Distillation(steps=1), memory=memory)
    other = ModelView(copy.deepcopy(view.model))
    other.config.rms_norm_eps = 0.1
    with pytest.raises(RheoscopeError, match="another model, plan or text"):
        distil(other, restructured(view, [EDIT]), random_corpus(), Distillation(steps=1), memory=memory)


def test_minutes_end_a_distillation(view):
    result = distil(view, restructured(view, [EDIT]), random_corpus(), Distillation(minutes=0.001))
    assert result.steps >= 1


@pytest.fixture(scope="module")
def half():
    return ModelView(tiny("llama", dtype=torch.bfloat16))


def test_in_half_precision_steps_smaller_than_its_spacing_add_up(half):
    """Steps of at most 5e-4 on gains above 0.5, where bfloat16 numbers are 4e-3 apart: each alone is rounded away."""
    edited = restructured(half, [EDIT])
    gains = [block.input_layernorm.weight for block in edited.blocks]
    before = [gain.detach().clone() for gain in gains]
    distil(half, edited, random_corpus(), Distillation(steps=40, rate=5e-4, windows=12))
    moved = [(gain != old)[old.abs() > 0.5] for gain, old in zip(gains, before, strict=True)]
    assert torch.cat(moved).float().mean() > 0.3
    assert {p.dtype for p in edited.parameters()} == {torch.bfloat16}


def test_a_stopped_distillation_in_half_precision_goes_on_to_the_same_numbers(half, tmp_path):
    whole, again, memory = restructured(half, [EDIT]), restructured(half, [EDIT]), tmp_path / "state.safetensors"
    distil(half, whole, random_corpus(), Distillation(steps=25, rate=5e-4))
    distil(half, restructured(half, [EDIT]), random_corpus(), Distillation(steps=20, rate=5e-4), memory=memory)
    result = distil(half, again, random_corpus(), Distillation(steps=25, rate=5e-4), memory=memory)
    assert len(result.losses) == 5
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), again.parameters(), strict=True))
