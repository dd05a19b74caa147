"""Whole checkpoints open: folders, shards, bare models, the hub's cache, in the class, dtype and place asked for."""

import logging
import socket
import subprocess
import sys

import pytest
import torch
import transformers
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rheoscope.errors import RheoscopeError
from rheoscope.models import load as load_module
from rheoscope.models.load import builtin_models, load
from tests.models.checkpoints import GONE, saved, with_config, with_tensors
from tests.models.views import marks
from tests.tiny import FAMILIES, VARIANTS, input_ids, tiny

# The grouped matrix products of experts want rows of a multiple of 16 bytes.
WIDTHS = {"hidden_size": 48, "intermediate_size": 40, "moe_intermediate_size": 16}
ALIGNED = {family: WIDTHS for family in ("mixtral", "qwen3_moe", "gpt_oss")}


def logits(model):
    with torch.no_grad():
        return model(input_ids(model)).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_opens_as_what_it_was(family, tmp_path):
    model = tiny(family, dtype=torch.float32, **ALIGNED.get(family, {}))
    saved(model, tmp_path)
    view = load(tmp_path)
    assert type(view.model) is type(model)
    assert view.ref == str(tmp_path)
    assert view.causal == VARIANTS[family].causal
    assert view.tokenizer.convert_tokens_to_ids("w17") == 17
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), view.model.parameters(), strict=True))
    view.model.set_attn_implementation("eager")
    view.model.config._experts_implementation = "eager"
    assert torch.equal(logits(view.model), logits(model))


@pytest.mark.parametrize("family", ALIGNED)
def test_experts_run_in_float64_too(family, tmp_path):
    view = load(saved(tiny(family), tmp_path), dtype="float64")
    assert view.forward(input_ids(view.model)).dtype == torch.float64


def test_shards_make_one_model(tmp_path):
    model = tiny("llama", dtype=torch.float32)
    saved(model, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 5
    assert torch.equal(load(tmp_path).model.lm_head.weight, model.lm_head.weight)


def test_a_folder_without_a_tokenizer_opens_without_one(tmp_path):
    tiny("llama", dtype=torch.float32).save_pretrained(tmp_path)
    assert load(tmp_path).tokenizer is None


def test_tied_weights_are_one_tensor(tmp_path):
    model = load(saved("llama:tied", tmp_path)).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_the_dtype_asked_for_is_the_dtype_got(dtype, tmp_path):
    view = load(saved("llama", tmp_path), dtype=dtype)
    assert view.dtype == getattr(torch, dtype)
    assert {parameter.dtype for parameter in view.model.parameters()} == {view.dtype}


def test_on_a_cpu_the_dtype_is_float32_unless_another_is_asked_for(tmp_path):
    saved(tiny("llama", dtype=torch.bfloat16), tmp_path)
    assert load(tmp_path, device="cpu").dtype == torch.float32


@pytest.mark.parametrize("device", ["cpu", "auto", "map"])
def test_a_device_may_be_named_or_found(device, tmp_path):
    assert load(saved("llama", tmp_path), device=device).device.type in ("cpu", "cuda", "mps")


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], "LlamaForCausalLM", [], GONE])
def test_a_causal_model_keeps_its_head(architectures, tmp_path):
    view = load(with_config(saved("llama", tmp_path), architectures=architectures))
    assert type(view.model) is LlamaForCausalLM
    assert view.has_loss


def test_an_encoder_that_names_no_class_opens_bare(tmp_path):
    saved(tiny("bert", dtype=torch.float32, bare=True), tmp_path)
    view = load(with_config(tmp_path, architectures=GONE))
    assert type(view.model).__name__ == "BertModel"


@pytest.mark.parametrize("family", ["bert", "roberta", "llama", "gpt2"])
def test_a_bare_model_opens_bare_and_a_missing_pooler_does_not_matter(family, tmp_path):
    saved(tiny(family, dtype=torch.float32, bare=True), tmp_path)
    with_tensors(tmp_path, lambda t: [t.pop(key) for key in list(t) if "pooler" in key])
    view = load(tmp_path)
    assert not view.has_loss
    assert view.forward(input_ids(view.model)).shape[-1] == view.d_model


def test_a_classifier_opens_as_one(tmp_path):
    saved(transformers.BertForSequenceClassification(transformers.BertConfig(**VARIANTS["bert"].kwargs)), tmp_path)
    assert type(load(tmp_path).model).__name__ == "BertForSequenceClassification"


def test_old_buffers_in_a_checkpoint_do_not_matter(tmp_path):
    saved("llama", tmp_path)
    with_tensors(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(5)}))
    assert load(tmp_path).n_layers == 3


def test_a_class_of_our_own_that_is_registered_opens(tmp_path):
    class OwnConfig(LlamaConfig):
        model_type = "own_for_test"

    class OwnForCausalLM(LlamaForCausalLM):
        config_class = OwnConfig

    AutoConfig.register("own_for_test", OwnConfig)
    AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM)
    torch.manual_seed(0)
    OwnForCausalLM(OwnConfig(**VARIANTS["llama"].kwargs)).save_pretrained(tmp_path)
    view = load(tmp_path)
    assert type(view.model) is OwnForCausalLM
    assert view.family is None


def test_code_of_its_own_runs_only_when_it_is_trusted(tmp_path):
    saved("llama", tmp_path)
    code = "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
    (tmp_path / "configuration_own.py").write_text(
        f'{code}class OwnConfig(LlamaConfig):\n    model_type = "own_code"\n'
    )
    (tmp_path / "modeling_own.py").write_text(
        f"{code}from .configuration_own import OwnConfig\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    with_config(tmp_path, model_type="own_code", auto_map=auto_map, architectures=["OwnForCausalLM"])
    with pytest.raises(RheoscopeError, match=r"custom code.*or allow code of its own that you trust"):
        load(tmp_path)
    view = load(tmp_path, trust_remote_code=True)
    assert type(view.model).__name__ == "OwnForCausalLM"
    assert view.has_loss


def test_a_model_of_the_hub_opens_from_the_local_cache_without_a_network(tmp_path, monkeypatch):
    folder = tmp_path / "models--org--name"
    commit = "0" * 40
    saved("llama", folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for ref in ("org/name", "org/name@main", "org/name@"):
        view = load(ref)
        assert view.ref == ref
        assert view.tokenizer.convert_tokens_to_ids("w17") == 17


def test_whether_the_hub_answers_is_asked_once_and_an_offline_switch_or_a_proxy_settle_it(monkeypatch):
    asked = []

    def refuse(address, timeout):
        asked.append(address)
        raise OSError("no network")

    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.example")
    assert not load_module._hub_reachable()
    assert asked == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert not load_module._hub_reachable()
    assert asked == [("hub.example", 443)]
    monkeypatch.setenv("https_proxy", "http://proxy.example")
    assert load_module._hub_reachable()
    assert len(asked) == 1


def test_opening_is_silent_and_leaves_the_settings_of_transformers_as_they_were(tmp_path, capfd):
    saved("llama", tmp_path)
    transformers.logging.set_verbosity(logging.WARNING)
    capfd.readouterr()
    load(tmp_path)
    assert capfd.readouterr() == ("", "")
    assert transformers.logging.get_verbosity() == logging.WARNING
    assert transformers.logging.is_progress_bar_enabled()


def test_an_opened_model_is_in_evaluation_mode_and_untouched(tmp_path):
    view = load(saved("llama", tmp_path))
    assert not view.model.training
    hooks, taps, chosen = marks(view.model)
    assert not any(sum(counts) for counts in hooks.values())
    assert not any(taps.values())
    assert set(chosen.values()) == {"sdpa"}


def test_what_is_saved_again_gives_the_same_outputs_in_a_new_process(tmp_path):
    view = load(saved("qwen3", tmp_path / "first"))
    view.model.save_pretrained(tmp_path / "second")
    torch.save(view.forward(torch.arange(3, 16)[None]).detach(), tmp_path / "outputs.pt")
    script = (
        "import sys, torch; from rheoscope.models.load import load\n"
        f"view = load({str(tmp_path / 'second')!r})\n"
        f"expected = torch.load({str(tmp_path / 'outputs.pt')!r})\n"
        "sys.exit(not torch.equal(view.forward(torch.arange(3, 16)[None]), expected))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_built_in_models_are_found_by_name(tmp_path, monkeypatch):
    saved("llama", tmp_path / "zoo" / "small")
    (tmp_path / "zoo" / "unfinished").mkdir()
    monkeypatch.setattr(load_module, "files", lambda package: tmp_path / "packages")
    monkeypatch.setattr(load_module, "builtin_models", lambda: {"small": tmp_path / "zoo" / "small"})
    view = load("builtin:small")
    assert (view.ref, view.n_layers) == ("builtin:small", 3)
    with pytest.raises(RheoscopeError, match="no built-in model is called 'large': give one of small"):
        load("builtin:large")


def test_every_built_in_model_has_a_configuration():
    for name, folder in builtin_models().items():
        assert (folder / "config.json").is_file(), name
