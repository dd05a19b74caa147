"""Sizes with names have the parameters that their names say."""

import pytest
import torch

from rheoscope.errors import RheoscopeError
from rheoscope.nets.config import KINDS
from rheoscope.nets.decoder import RheoscopeForCausalLM
from rheoscope.nets.presets import PRESETS, preset_config

NAMED = {name: float(name[:-1]) * 1e6 for name in PRESETS if name != "micro"}
# Token and position embeddings, 12 d² per layer, and two vectors for each of the 2 L + 1 norms.
COUNTED = {
    "micro": 838_016,
    "7M": 7_254_400,
    "18M": 17_656_576,
    "30M": 30_318_720,
    "51M": 51_439_104,
    "125M": 124_356_864,
    "355M": 354_601_984,
}


def parameters(size, kind="softmax"):
    with torch.device("meta"):
        return RheoscopeForCausalLM(preset_config(size, kind)).num_parameters()


@pytest.mark.parametrize("size", PRESETS)
def test_parameters_are_those_counted_by_hand(size):
    assert parameters(size) == COUNTED[size]


@pytest.mark.parametrize("size", NAMED)
def test_parameters_are_within_four_percent_of_the_name(size):
    assert parameters(size) == pytest.approx(NAMED[size], rel=0.04)


def test_a_damping_costs_one_vector_and_one_number_per_head_and_layer():
    assert parameters("18M", "sd") - parameters("18M") == 6 * 4 * (256 + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_no_kind_adds_more_than_half_a_percent(kind):
    assert 1 <= parameters("51M", kind) / parameters("51M") < 1.005


def test_an_unknown_size_is_refused():
    with pytest.raises(RheoscopeError, match="no size is called '7m'; the sizes are micro, 7M"):
        preset_config("7m")
