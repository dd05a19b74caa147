"""A GGUF file opens dequantised, with the positions it was trained for, and can be saved as an ordinary model."""

import gguf
import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rheoscope.errors import Refused, RheoscopeError
from rheoscope.models.check import check
from rheoscope.models.gguf_file import LLAMA3, llama3_factors
from rheoscope.models.load import load
from tests.models.gguf_files import rounded, write_llama
from tests.tiny import input_ids, tiny

KINDS = gguf.GGMLQuantizationType
BLOCKS = {"hidden_size": 96, "intermediate_size": 64, "head_dim": 16}  # rows of a multiple of 32, as blocks want
THETA = {"rope_type": "default", "rope_theta": 500.0}
SCALED = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, **LLAMA3}


def logits(model):
    with torch.no_grad():
        return model(input_ids(model)).logits


@pytest.mark.parametrize("name", ["llama", "llama:mqa", "llama:mha", "llama:tied"])
def test_a_file_in_float32_gives_the_models_outputs(name, tmp_path):
    model = tiny(name, dtype=torch.float32, rope_parameters=THETA)
    view = load(write_llama(model, tmp_path / "tiny.gguf"))
    assert view.model_type == "llama"
    assert view.config.rope_parameters["rope_theta"] == 500.0
    # the sum of float32 rounding errors of three layers, on outputs of about 5
    torch.testing.assert_close(logits(view.model), logits(model), rtol=0, atol=1e-4)
    for (key, own), (other, read) in zip(model.named_parameters(), view.model.named_parameters(), strict=True):
        assert key == other
        assert torch.equal(own, read), key


@pytest.mark.parametrize("kind", [KINDS.Q8_0, KINDS.Q4_0, KINDS.F16, KINDS.BF16])
def test_a_quantised_file_gives_the_outputs_of_its_rounded_weights(kind, tmp_path):
    model = tiny("llama", dtype=torch.float32, **BLOCKS)
    view = load(write_llama(model, tmp_path / "tiny.gguf", kind))
    exact = logits(model)
    rounded(model, kind)
    torch.testing.assert_close(logits(view.model), logits(model), rtol=0, atol=1e-4)
    assert not torch.allclose(logits(view.model), exact, atol=1e-4)
    assert {parameter.dtype for parameter in view.model.parameters()} == {torch.float32}
    assert all(finding.status == "holds" for finding in check(view))


@pytest.mark.parametrize("kind", [KINDS.F32, KINDS.Q8_0])
def test_what_was_read_can_be_saved_and_opened_as_an_ordinary_model(kind, tmp_path):
    view = load(write_llama(tiny("llama", dtype=torch.float32, **BLOCKS), tmp_path / "tiny.gguf", kind))
    view.model.save_pretrained(tmp_path / "saved")
    view.tokenizer.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert torch.equal(logits(again.model), logits(view.model))
    assert again.tokenizer("ab c")["input_ids"] == view.tokenizer("ab c")["input_ids"]
    assert not hasattr(again.config, "quantization_config")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_file_opens_in_the_dtype_asked_for(dtype, tmp_path):
    view = load(write_llama(tiny("llama", dtype=torch.float32), tmp_path / "tiny.gguf"), dtype=dtype)
    assert {parameter.dtype for parameter in view.model.parameters()} == {getattr(torch, dtype)}


def test_its_vocabulary_becomes_the_tokenizer(tmp_path):
    tokenizer = load(write_llama(tiny("llama", dtype=torch.float32), tmp_path / "tiny.gguf")).tokenizer
    assert tokenizer("abc")["input_ids"] == [29, 5]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_opening_is_silent(tmp_path, capfd):
    path = write_llama(tiny("llama", dtype=torch.float32), tmp_path / "tiny.gguf")
    capfd.readouterr()
    load(path)
    assert capfd.readouterr() == ("", "")


def with_table(factors):
    """Adds the table of frequency factors that llama.cpp writes for Llama 3."""
    return lambda writer: writer.add_tensor("rope_freqs.weight", factors.float().numpy())


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_factors_of_llama_3_are_those_of_transformers(factor):
    parameters = SCALED | {"factor": factor}
    config = tiny("llama", head_dim=64, rope_parameters=parameters, max_position_embeddings=131072).config
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = parameters["rope_theta"] ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    torch.testing.assert_close((plain / scaled.double()), llama3_factors(parameters, 64), rtol=1e-5, atol=0)


def test_the_positions_of_llama_3_survive_the_file(tmp_path):
    model = tiny("llama", dtype=torch.float32, head_dim=64, rope_parameters=SCALED, max_position_embeddings=131072)
    table = with_table(llama3_factors(SCALED, 64))
    view = load(write_llama(model, tmp_path / "tiny.gguf", more=table))
    assert view.config.rope_parameters == SCALED
    torch.testing.assert_close(logits(view.model), logits(model), rtol=0, atol=1e-4)
    view.model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "saved").model), logits(view.model))


def test_a_table_of_factors_that_is_not_llama_3s_is_refused(tmp_path):
    model = tiny("llama", dtype=torch.float32)
    path = write_llama(model, tmp_path / "tiny.gguf", more=with_table(torch.linspace(1, 3, 5)))
    with pytest.raises(
        Refused, match=r"scales its rotary embedding \(rope_freqs.weight\), which .*: open the original"
    ):
        load(path)


def scaled_by(kind, factor, path):
    def scale(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(factor)

    return write_llama(tiny("llama", dtype=torch.float32), path, more=scale)


@pytest.mark.parametrize(("kind", "factor"), [("yarn", 4.0), ("linear", 2.0)])
def test_a_scaling_that_transformers_drops_is_refused(kind, factor, tmp_path):
    with pytest.raises(Refused, match=rf"scales its rotary embedding \({kind}\), .*: open the original checkpoint"):
        load(scaled_by(kind, factor, tmp_path / "tiny.gguf"))


@pytest.mark.parametrize(("kind", "factor"), [("linear", 1.0), ("none", 1.0)])
def test_a_scaling_that_scales_nothing_is_none(kind, factor, tmp_path):
    assert load(scaled_by(kind, factor, tmp_path / "tiny.gguf")).n_layers == 3


def said(path):
    with pytest.raises(RheoscopeError) as raised:
        load(path)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("keep", [0, 3, 10, 30, 100, 500, 1500, 2500, 5000, 0.5, 0.99])
def test_a_file_that_is_cut_off(keep, tmp_path):
    path = write_llama(tiny("llama", dtype=torch.float32), tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if isinstance(keep, float) else keep])
    assert said(path).endswith("fetch or convert the file again")


@pytest.mark.parametrize("at", [0, 4, 24, 60, 600])
def test_a_file_with_garbage_in_its_header(at, tmp_path):
    path = write_llama(tiny("llama", dtype=torch.float32), tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + b"\xff" * 16 + whole[at + 16 :])
    assert said(path).endswith("fetch or convert the file again")


def test_a_tensor_that_is_missing_is_not_made_up(tmp_path):
    model = tiny("llama", dtype=torch.float32)
    path = write_llama(model, tmp_path / "tiny.gguf", drop="model.layers.1.mlp.up_proj.weight")
    assert "lacks 1 weights of LlamaForCausalLM, the first model.layers.1.mlp.up_proj.weight" in said(path)


def test_a_tensor_that_is_no_number_is_named(tmp_path):
    model = tiny("llama", dtype=torch.float32)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    assert "NaN or infinite numbers in model.layers.1.mlp.up_proj.weight" in said(
        write_llama(model, tmp_path / "t.gguf")
    )
