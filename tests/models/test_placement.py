"""Models whose weights are on disk or packed: the numbers of the whole model, and what cannot be read is refused."""

import numpy as np
import pytest
import torch
from torch import nn

from rheoscope.errors import Refused
from rheoscope.instruments.measure import measure, weights_hash
from rheoscope.models.load import load
from rheoscope.models.placement import at_hand, has_numbers, linear_map
from rheoscope.models.untrained import untrained
from tests.instruments.texts import random_corpus
from tests.tiny import tiny

CORPUS = random_corpus(lengths=(29,) * 12)
MIXED = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Folder of a tiny model of some family, in float32."""

    def saved(name):
        folder = tmp_path_factory.mktemp("placed") / name.replace(":", "-")
        tiny(name, dtype=torch.float32).save_pretrained(folder)
        return folder

    return saved


def on_disk(view):
    return [name for name, parameter in view.model.named_parameters() if parameter.is_meta]


@pytest.mark.parametrize("name", ["llama:tied", "gpt2", "gemma2"])
def test_a_model_on_disk_gives_the_numbers_of_the_whole_model_with_its_nulls(name, folder_of):
    folder = folder_of(name)
    whole, away = load(folder), load(folder, device="disk")
    assert len(on_disk(away)) == len(list(away.model.named_parameters())) > 0
    assert weights_hash(away) == weights_hash(whole)
    names = ("loss", "routing", "steering", "sinks")
    one, other = (measure(view, CORPUS, instruments=names) for view in (whole, away))
    for instrument in names:
        assert set(one[instrument]) == set(other[instrument])
        assert not [key for key in other[instrument].attrs if "refused" in key]
        for variable, values in one[instrument].items():
            np.testing.assert_array_equal(other[instrument][variable], values, err_msg=str(variable))
    assert on_disk(away) == [name for name, _ in away.model.named_parameters()]  # and there they are afterwards


def test_parts_may_lie_in_different_places(folder_of):
    folder = folder_of("llama")
    whole, mixed = load(folder), load(folder, device_map=MIXED)
    assert {name.split(".")[2] for name in on_disk(mixed) if "layers" in name} == {"1", "2"}
    for layer in range(3):
        torch.testing.assert_close(mixed.weights.W_Q(layer), whole.weights.W_Q(layer), rtol=0, atol=0)
        torch.testing.assert_close(mixed.weights.W_O(layer), whole.weights.W_O(layer), rtol=0, atol=0)
    one, other = (measure(view, CORPUS, instruments=["loss", "routing"]) for view in (whole, mixed))
    np.testing.assert_array_equal(one["routing"].routing_share, other["routing"].routing_share)
    np.testing.assert_array_equal(one["loss"].nll, other["loss"].nll)


def test_other_weights_on_disk_have_another_hash(tmp_path):
    hashes = set()
    for seed in (0, 1):
        tiny("llama", seed=seed, dtype=torch.float32).save_pretrained(tmp_path / str(seed))
        hashes.add(weights_hash(load(tmp_path / str(seed), device="disk")))
    assert len(hashes) == 2


@pytest.mark.parametrize("block", ["at_hand", "untrained"])
def test_what_is_fetched_is_put_back_also_after_an_error(block, folder_of):
    view = load(folder_of("llama"), device="disk")
    tokens = torch.arange(3, 11)[None]
    before, away = view.forward(tokens), on_disk(view)

    def broken_off():
        with at_hand(view.blocks[1]) if block == "at_hand" else untrained(view, 0):
            assert on_disk(view) != away or block == "untrained"
            assert torch.equal(view.forward(tokens), before) == (block == "at_hand")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken_off()
    assert on_disk(view) == away
    assert torch.equal(view.forward(tokens), before)


class Rounded(nn.Linear):
    """A projection that keeps its weights as whole numbers and one scale per row, as quantised ones do."""

    def __init__(self, plain: nn.Linear):
        super().__init__(plain.in_features, plain.out_features, bias=plain.bias is not None)
        weight = plain.weight.detach()
        self.scale = weight.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = plain.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x) * self.scale.to(x), self.bias)


def test_a_quantised_model_is_read_as_what_its_modules_do(folder_of):
    view, plain = (load(folder_of("llama:biases")) for _ in range(2))
    for block in view.blocks:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(block.self_attn, name, Rounded(getattr(block.self_attn, name)))
    module = view.part(1, "self_attn.q_proj")
    exact = (module.weight * module.scale).T
    torch.testing.assert_close(linear_map(module, transposed=False), exact, rtol=1e-5, atol=1e-6)
    difference = (view.weights.W_Q(1) - plain.weights.W_Q(1)).abs().max()
    assert 0 < difference < 0.01 * plain.weights.W_Q(1).abs().max()
    assert not has_numbers(view.model)
    run = measure(view, CORPUS, instruments=["loss", "routing", "steering", "sinks"])
    assert run["routing"].kernel_routing_share.notnull().all()
    assert "quantised" in run["routing"].attrs["null_refused"]
    assert "defect_first_order" not in run["steering"]


def test_a_module_that_cannot_be_asked_is_refused():
    module = nn.Linear(5, 7)
    module.weight = nn.Parameter(torch.zeros(7, 5, dtype=torch.int8), requires_grad=False)
    with pytest.raises(Refused, match=r"stored as int8 and cannot be read through it .*: load the model dequantised"):
        linear_map(module, transposed=False)
