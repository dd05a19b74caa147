"""What is wrong with a model is said in one sentence that tells what to do; nothing that does not fit is let by."""

import json
import os
import pickle
import shutil

import pytest
import torch
import transformers

from rheoscope.errors import Refused
from rheoscope.models.load import load
from tests.models.checkpoints import GONE, refusal, saved, with_config, with_tensors
from tests.tiny import ALL, REFUSED, VARIANTS, tiny


@pytest.mark.parametrize(
    "text", ["{", "", "[", "[" * 100_000, "{'model_type': 'llama'}", "\0", '{"model_type": "llama"']
)
def test_a_configuration_that_is_no_json(folder, text):
    (folder / "config.json").write_text(text)
    assert "config.json is no JSON" in refusal(folder)
    assert refusal(folder).endswith("fetch or save the model again")


def test_a_configuration_that_is_no_text(folder):
    (folder / "config.json").write_bytes(b"\xff\xfe{}")
    assert "config.json is no JSON ('utf-8' codec can't decode" in refusal(folder)


@pytest.mark.parametrize(
    "value", [[], "llama", 3, None, {}, {"architectures": ["LlamaForCausalLM"]}, {"model_type": 3}]
)
def test_a_configuration_that_names_no_model_type(folder, value):
    (folder / "config.json").write_text(json.dumps(value))
    assert refusal(folder).endswith("names no model_type: give the folder of a transformers checkpoint")


def test_a_model_type_that_transformers_does_not_know(folder):
    said = refusal(with_config(folder, model_type="foozle"))
    assert "model type `foozle`" in said
    assert "install a newer transformers" in said


@pytest.mark.parametrize(
    "entries",
    [
        {"num_hidden_layers": "three"},
        {"num_attention_heads": 0},
        {"num_attention_heads": None},
        {"hidden_act": "nothing"},
        {"rope_parameters": {"rope_type": "nothing"}},
        {"vocab_size": -1},
        {"pad_token_id": 10**6},
    ],
)
def test_a_configuration_whose_values_make_no_model(folder, entries):
    said = refusal(with_config(folder, **entries))
    assert "cannot be read" in said or "of shape" in said
    assert "correct config.json" in said


@pytest.mark.parametrize(
    ("architecture", "part"),
    [
        ("FooForCausalLM", "names the architecture 'FooForCausalLM', which transformers"),
        ("pipeline", "names the architecture 'pipeline', which transformers"),
        ("__version__", "names the architecture '__version__', which transformers"),
        ("GPT2LMHeadModel", "has the model type 'llama' and names the architecture 'GPT2LMHeadModel'"),
        ("LlamaModel", "has lm_head.weight, for which LlamaModel with its config.json has no place"),
        ("LlamaForSequenceClassification", "lacks 1 weights of LlamaForSequenceClassification, the first score.weight"),
    ],
)
def test_an_architecture_that_is_not_the_checkpoints(folder, architecture, part):
    assert part in refusal(with_config(folder, architectures=[architecture]))


@pytest.mark.parametrize("architectures", [[{}], [["LlamaForCausalLM"]], [None], [3], {"a": 1}, 7])
def test_architectures_that_are_no_names(folder, architectures):
    said = refusal(with_config(folder, architectures=architectures))
    assert "which name no class" in said or "cannot be read" in said


@pytest.mark.parametrize(
    ("entries", "part"),
    [
        ({"num_hidden_layers": 2}, "has model.layers.2.input_layernorm.weight, for which LlamaForCausalLM"),
        (
            {"num_hidden_layers": 4},
            "lacks 9 weights of LlamaForCausalLM, the first model.layers.3.input_layernorm",
        ),
        (
            {"attention_bias": True},
            "lacks 12 weights of LlamaForCausalLM, the first model.layers.0.self_attn.k",
        ),
        (
            {"intermediate_size": 39},
            "has model.layers.0.mlp.down_proj.weight of shape (42, 37) where its config",
        ),
        ({"vocab_size": 64}, "has lm_head.weight of shape (61, 42) where its config.json makes it (64, 42)"),
    ],
)
def test_weights_that_do_not_fit_the_configuration(folder, entries, part):
    assert part in refusal(with_config(folder, **entries))


def test_a_weight_that_is_missing_is_named_and_not_made_up(folder):
    with_tensors(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    said = refusal(folder)
    assert (
        "lacks 1 weights of LlamaForCausalLM, the first model.layers.1.mlp.up_proj.weight: save it again whole" in said
    )


def test_an_expert_that_is_missing_is_not_made_up(tmp_path):
    saved("mixtral", tmp_path)
    with_tensors(tmp_path, lambda t: t.pop(next(key for key in t if "experts" in key)))
    assert "cannot be read" in refusal(tmp_path) or "lacks" in refusal(tmp_path)


def test_a_bias_that_the_configuration_does_not_know_of_is_not_dropped(folder):
    with_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(60)}))
    assert "has model.layers.0.self_attn.q_proj.bias, for which LlamaForCausalLM" in refusal(folder)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_numbers_that_are_none_are_named(folder, bad, device):
    with_tensors(folder, lambda t: t["model.layers.1.mlp.up_proj.weight"][3].fill_(bad))
    said = refusal(folder, device=device)
    assert "has NaN or infinite numbers in model.layers.1.mlp.up_proj.weight" in said
    assert said.endswith("fetch or save it again")


@pytest.mark.parametrize("keep", [0, 4, 300, 20_000, -1])
def test_a_file_of_weights_that_is_cut_off(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    said = refusal(folder)
    assert f"the weights of {folder} cannot be read (" in said
    assert said.endswith("fetch or save the checkpoint again")


def test_a_file_of_weights_that_is_something_else(folder):
    (folder / "model.safetensors").write_bytes(b"<html>not found</html>" * 100)
    assert "cannot be read (Error while deserializing header" in refusal(folder)


def test_a_shard_that_is_missing(tmp_path):
    saved("llama", tmp_path, max_shard_size="20KB")
    next(tmp_path.glob("model-00002*")).unlink()
    assert "model-00002" in refusal(tmp_path)


def test_an_index_of_shards_that_is_no_json(tmp_path):
    saved("llama", tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert "the weights of" in refusal(tmp_path)


class Bomb:
    """Something that acts when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, (os.environ["BOMB"],)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl"])
def test_pickled_weights_are_refused_and_not_read(folder, name, tmp_path, monkeypatch):
    monkeypatch.setenv("BOMB", str(tmp_path / "crater"))
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    assert f"holds pickled weights only ({name}), which are never read" in refusal(folder)
    assert not (tmp_path / "crater").exists()


def test_a_folder_with_no_weights(folder):
    (folder / "model.safetensors").unlink()
    assert refusal(folder).endswith("holds no safetensors: give the folder of a whole checkpoint")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "nothing"}, "added_tokens": []}'),
        ("tokenizer.json", None),
        ("tokenizer_config.json", "{"),
    ],
)
def test_a_tokenizer_that_is_broken(folder, file, text):
    (folder / file).unlink() if text is None else (folder / file).write_text(text)
    said = refusal(folder)
    assert f"the tokenizer of {folder} cannot be read (" in said
    assert said.endswith("fetch or save its files again")


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_is_not_handled_is_refused_before_any_weight_is_read(name, tmp_path):
    variant = ALL[name]
    getattr(transformers, variant.config)(**variant.kwargs).save_pretrained(tmp_path)
    with pytest.raises(Refused, match=r"use a family of docs/families\.md"):
        load(tmp_path)


def test_a_model_of_pictures_is_refused(tmp_path):
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=32)).save_pretrained(tmp_path)
    assert "reads models of text only" in refusal(tmp_path)


def test_a_checkpoint_that_needs_a_package_names_it(folder):
    entries = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert "the weights of" in refusal(with_config(folder, **entries))


def test_nothing_is_refused_that_is_whole(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert load(with_config(copy, architectures=GONE)).n_parameters == tiny("llama").num_parameters()
    assert VARIANTS["llama"].kwargs["num_hidden_layers"] == load(folder).n_layers
