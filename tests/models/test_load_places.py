"""A name that leads nowhere, a hub out of reach, a dtype or device that is none: one sentence each."""

import socket

import pytest
import transformers
from huggingface_hub import constants
from huggingface_hub.errors import HTTPError

from rheoscope.models import load as load_module
from tests.models.checkpoints import refusal, saved


@pytest.mark.parametrize(
    ("ref", "part"),
    [
        ("models/llama/v2/7b", "there is no such folder, and it is no hub name"),
        ("./llama", "there is no such folder"),
        ("/nowhere/llama", "there is no such folder"),
        ("~nobody/llama", "there is no such folder"),
        ("org/na me", "there is no such folder"),
        ("a\0b", "there is no such folder"),
        ("x" * 5000, "the name is too long"),
        ("nowhere.gguf", "no GGUF file at nowhere.gguf"),
        ("builtin:nothing", "no built-in model is called 'nothing'"),
        ("builtin:", "no built-in model is called ''"),
        ("", "a model with an empty name asked for"),
        (" ", "a model with an empty name asked for"),
    ],
)
def test_a_place_where_there_is_nothing(ref, part):
    assert part in refusal(ref)


def test_a_folder_without_a_configuration_and_a_file_that_is_no_model(folder, tmp_path):
    assert refusal(tmp_path).endswith("has no config.json: give the folder of a transformers checkpoint")
    assert "is a file but no .gguf: give a model folder" in refusal(folder / "model.safetensors")


@pytest.mark.parametrize("ref", ["org/name", "gpt2", "org/name@v1"])
def test_a_hub_that_cannot_be_reached(ref, monkeypatch, tmp_path):
    def refuse(*_args, **_options):
        raise OSError("no network")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(socket, "create_connection", refuse)
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    said = refusal(ref)
    assert said.startswith(f"the configuration of {ref} cannot be read: the hub cannot be reached")
    assert said.endswith("give a local folder, or go online")


def test_a_name_that_the_hub_does_not_have(monkeypatch):
    def unknown(*_args, **_options):
        raise OSError("org/name is not a valid model identifier.\nIf this is a private repository, log in.")

    monkeypatch.setattr(load_module, "_hub_reachable", lambda: True)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unknown)
    said = refusal("org/name")
    assert (
        "(org/name is not a valid model identifier): check the name, log in to the hub if the model is private" in said
    )


def test_a_connection_that_breaks_off_while_a_model_is_fetched(monkeypatch):
    def broken(*_args, **_options):
        raise HTTPError("timed out")

    monkeypatch.setattr(load_module, "_hub_reachable", lambda: True)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", broken)
    assert "the configuration of org/name cannot be read (timed out): check the name" in refusal("org/name")


def test_a_folder_whose_name_speaks_of_connections_is_not_taken_for_the_hub(tmp_path):
    folder = saved("llama", tmp_path / "connect-offline")
    (folder / "tokenizer.json").write_text("{")
    assert "hub" not in refusal(folder)


@pytest.mark.parametrize("dtype", ["float3", "fp16", "", "int8"])
def test_a_dtype_that_is_none(folder, dtype):
    assert refusal(folder, dtype=dtype).endswith("give auto, float64, float32, bfloat16, float16")


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "meta", "", "cpu:x"])
def test_a_device_that_is_none(folder, device):
    assert refusal(folder, device=device).endswith("give cpu, cuda, mps or auto")
