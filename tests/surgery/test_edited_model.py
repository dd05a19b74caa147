"""Edited models as transformers uses them: generate, train, save, read in a new process, edit again."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import rheoscope
from rheoscope.errors import Refused, RheoscopeError
from rheoscope.models.view import ModelView
from rheoscope.surgery.edited_model import EditedConfig, EditedForCausalLM, save_edited
from rheoscope.surgery.edits import edited
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.edits_sinks import DropHeads, UniformMixing
from rheoscope.surgery.edits_structure import DropAttention, Parallelize
from rheoscope.surgery.mixing import StateLayer
from rheoscope.surgery.restructure import restructured
from tests.surgery.restructuring import EXAMPLES, group, logits_of, refused_for
from tests.tiny import VARIANTS, input_ids, tiny

SAVED = {
    "llama": "all at once",
    "llama:tied": "drop",
    "gpt2": "constant",
    "opt": "shrink",
    "gemma2": "gate",
    "mixtral": "gate",
    "gpt_oss": "drop",
    "qwen3": "fused",
    "phi3": "drop",
    "bert": "diagonal",
    "rheoscope_decoder": "linear",
}


def single(name):
    """A view of a tiny model in float32, as users have them."""
    return ModelView(tiny(name, dtype=torch.float32))


def mixed_edits(view):
    """Layer 0 without attention, layer 1 with fewer heads, layer 2 linear."""
    return [DropAttention(layers=(0,)), DropHeads(heads=group(view)), Linearize(layers=(2,))]


def new_process(code, *arguments):
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)


READ = """
import sys, rheoscope, torch
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    kept = torch.load(folder + ".pt")
    mine = rheoscope.load(folder).model
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    for model in (mine, theirs):
        with torch.no_grad():
            logits = model(kept["tokens"], use_cache=False).logits if "use" in kept else model(kept["tokens"]).logits
        assert torch.equal(logits, kept["logits"]), (folder, (logits - kept["logits"]).abs().max())
print("equal")
"""


def saved(view, example, folder):
    """The folder of an edited model, and its logits beside it."""
    model = restructured(view, EXAMPLES[example](view))
    save_edited(model, None, folder)
    tokens = input_ids(view.model)
    with torch.no_grad():
        torch.save({"tokens": tokens, "logits": model(tokens).logits}, f"{folder}.pt")
    return folder


def test_a_new_process_reads_the_same_model_bit_for_bit(tmp_path):
    folders = [saved(single(name), example, tmp_path / name.replace(":", "-")) for name, example in SAVED.items()]
    done = new_process(READ, *folders)
    assert done.stdout.strip().endswith("equal"), done.stderr[-2000:]


@pytest.mark.slow
def test_a_new_process_reads_every_edit_of_every_family_bit_for_bit(tmp_path):
    folders = []
    for place, name in enumerate(VARIANTS):
        view = single(name)
        kept = [example for example in EXAMPLES if not refused_for(name, example, view)]
        assert len(kept) >= 3, name
        folders += [saved(view, example, tmp_path / f"{place}-{example.replace(' ', '-')}") for example in kept]
    done = new_process(READ, *folders)
    assert done.stdout.strip().endswith("equal"), done.stderr[-2000:]


def test_without_rheoscope_the_model_type_is_unknown_and_nothing_is_read(tmp_path):
    view = single("llama")
    folder = save_edited(restructured(view, mixed_edits(view)), None, tmp_path / "edited")
    code = "import sys; from transformers import AutoModelForCausalLM as A; A.from_pretrained(sys.argv[1])"
    done = new_process(code, folder)
    assert done.returncode != 0
    assert "model type `rheoscope_edited` but Transformers does not recognize" in done.stderr


def test_importing_rheoscope_loads_neither_torch_nor_transformers():
    code = "import sys, rheoscope; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    assert new_process(code).stdout.strip() == "[]"


AUTO = {
    "rheoscope first": "import rheoscope; from transformers import AutoConfig",
    "transformers first": "from transformers import AutoConfig; import rheoscope",
    "Auto classes of models first": "from transformers import AutoModelForCausalLM, AutoConfig; import rheoscope",
    "tokenizers first": "import rheoscope; from transformers import AutoTokenizer, AutoConfig",
    "a model of transformers first": "import rheoscope; from transformers import LlamaForCausalLM, AutoConfig",
    "the trainer first": "import rheoscope; from transformers import Trainer, AutoConfig",
}
READ_BOTH = """
import sys
edited, plain = (AutoConfig.from_pretrained(folder) for folder in sys.argv[1:])
print(type(edited).__name__, type(edited.text_config).__name__, type(plain).__name__, edited.rounds[0][0]["edit"])
from transformers import AutoModelForCausalLM
print(*(type(AutoModelForCausalLM.from_pretrained(folder)).__name__ for folder in sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def two_folders(tmp_path_factory):
    """A network of ours, edited and as it is."""
    folder = tmp_path_factory.mktemp("types")
    view = single("rheoscope_decoder")
    view.model.save_pretrained(folder / "plain")
    return save_edited(restructured(view, [Linearize(layers=(2,))]), None, folder / "edited"), folder / "plain"


@pytest.mark.parametrize("order", AUTO)
def test_auto_classes_read_both_of_our_types_in_a_new_process(two_folders, order):
    done = new_process(AUTO[order] + READ_BOTH, *two_folders)
    assert done.stdout.splitlines() == [
        "EditedConfig RheoscopeConfig RheoscopeConfig Linearize",
        "EditedForCausalLM RheoscopeForCausalLM",
    ], done.stderr[-2000:]


def test_without_rheoscope_the_configuration_is_unknown_too(tmp_path):
    view = single("llama")
    folder = save_edited(restructured(view, mixed_edits(view)), None, tmp_path / "edited")
    done = new_process("import sys; from transformers import AutoConfig as A; A.from_pretrained(sys.argv[1])", folder)
    assert done.returncode != 0
    assert "model type `rheoscope_edited` but Transformers does not recognize" in done.stderr


@pytest.mark.parametrize("module", ["rheoscope.models.checkpoint", "rheoscope.nets", "rheoscope.surgery.mixing"])
def test_transformers_knows_our_types_whichever_module_comes_first(module):
    code = f"import {module}; from transformers import AutoConfig; print(AutoConfig.for_model('rheoscope_edited'))"
    done = new_process(code)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gptj", "qwen2", "opt", "rheoscope_decoder"])
def test_generating_with_a_cache_and_with_padding_on_the_left_changes_nothing(name):
    view = single(name)
    model = restructured(view, mixed_edits(view))
    tokens = input_ids(view.model)
    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    cached = model.generate(tokens, use_cache=True, **options)
    assert torch.equal(cached, model.generate(tokens, use_cache=False, **options))
    assert torch.equal(cached[:1], model.generate(tokens[:1], **options))
    width = 4
    padded = torch.cat([torch.zeros(2, width, dtype=torch.long), tokens], 1)
    mask = (torch.arange(padded.shape[1]) >= width).long().expand(2, -1)
    left = model.generate(padded, attention_mask=mask, **options)
    assert torch.equal(left[:, padded.shape[1] :], cached[:, tokens.shape[1] :])


def test_beams_and_chunks_go_through_the_states():
    view = single("llama")
    model = restructured(view, mixed_edits(view))
    tokens = input_ids(view.model)
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with_states = model.generate(tokens, use_cache=True, **options)
    assert torch.equal(with_states, model.generate(tokens, use_cache=False, **options))
    cache = DynamicCache()
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        parts = [model(part, cache=cache, use_cache=True).logits for part in tokens.split((5, 1, 3, 4), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


def test_the_state_of_linear_layers_does_not_grow_with_the_context():
    view = single("llama")
    model = restructured(view, [Linearize()])

    def kept(length):
        with torch.no_grad():
            cache = model(input_ids(view.model, length=length), use_cache=True).cache
        assert cache.get_seq_length() == length
        assert all(isinstance(layer, StateLayer) and layer.keys is None for layer in cache.layers)
        return [tuple(layer.state.shape) for layer in cache.layers]

    assert kept(3) == kept(29) == [(2, view.n_kv_heads, view.d_head, view.d_value + 1)] * 3


def test_a_cache_that_cannot_hold_states_is_refused():
    view = single("llama")
    model = restructured(view, mixed_edits(view))
    tokens = input_ids(view.model)
    with pytest.raises(RheoscopeError, match="a static cache was given"):
        model(tokens, cache=StaticCache(config=view.config, max_cache_len=32))
    with torch.no_grad():
        foreign = view.model(tokens, use_cache=True).cache
    with pytest.raises(RheoscopeError, match="holds keys of layer 0, which keeps none"):
        model(tokens, cache=foreign)
    own = model(tokens, use_cache=True).cache
    with pytest.raises(RheoscopeError, match="generate without an assistant"):
        own.layers[0].crop(-1)


def test_training_with_checkpointing_gives_the_same_gradients():
    view = single("llama")
    tokens = input_ids(view.model)
    gradients = []
    for checkpointing in (False, True):
        model = restructured(view, [*mixed_edits(view), Parallelize(layers=(1,))]).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        out = model(tokens, labels=tokens)
        assert out.loss.isfinite()
        out.loss.backward()
        gradients.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert len(gradients[0]) > 20
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient)


def test_saved_edited_and_saved_again_it_is_still_the_model(tmp_path):
    view = single("llama")
    first = save_edited(restructured(view, mixed_edits(view)), None, tmp_path / "first")
    once = rheoscope.load(first)
    twice = restructured(once, [DropHeads(heads=((1, 0), (1, 1), (1, 2)))])
    second = save_edited(twice, None, tmp_path / "second")
    config = json.loads((second / "config.json").read_text())
    assert [[edit["edit"] for edit in edits] for edits in config["rounds"]] == [
        ["DropAttention", "DropHeads", "Linearize"],
        ["DropHeads"],
    ]
    assert config["text_config"]["model_type"] == "llama"
    read = rheoscope.load(second)
    assert torch.equal(logits_of(read), logits_of(ModelView(twice)))
    assert read.sizes[1].n_heads == 0


def test_a_view_of_an_edited_model_reads_streams_and_edits_and_refuses_what_layers_do_not_share():
    view = single("llama")
    new = ModelView(restructured(view, mixed_edits(view)), ref="edited")
    assert [size.n_heads for size in new.sizes] == [0, 3, 6]
    assert new.has_loss
    seen = {}

    def keep(site):
        def tap(layer, x):
            seen[site, layer] = x.clone()

        return tap

    taps = {site: keep(site) for site in ("resid_pre", "attn_out", "ffn_out", "resid_post")}
    with new.tapped(taps):
        logits_of(new)
    for layer in range(3):
        total = seen["resid_pre", layer] + seen["attn_out", layer] + seen["ffn_out", layer]
        torch.testing.assert_close(total, seen["resid_post", layer])
    with pytest.raises(Refused, match="after its edits this model has 0, 3, 6"):
        _ = new.n_heads
    with pytest.raises(Refused, match=r"attn_probs asked for in layers \[0\]"), edited(new, UniformMixing()):
        pass
    plain = logits_of(new)
    with edited(new, UniformMixing(layers=(1,))):
        assert not torch.allclose(logits_of(new), plain)
    assert torch.equal(logits_of(new), plain)
    with pytest.raises(Refused, match="its attention away"):
        new.weights.W_Q(0)
    assert new.weights.W_Q(1).shape == (3, 42, 10)


def test_sites_inside_fused_layers_are_refused():
    view = single("llama")
    new = ModelView(restructured(view, [Parallelize(layers=(1,), fused=True)]))
    with (
        pytest.raises(Refused, match=r"ffn_out asked for in layers \[1\]; an edit has fused"),
        new.tapped({"ffn_out": print}),
    ):
        pass
    with new.tapped({"resid_post": lambda layer, x: None, "z": lambda layer, z: None}):
        logits_of(new)


def test_another_attention_implementation_and_unknown_arguments_are_refused():
    view = single("distilbert")
    model = restructured(view, [DropAttention(layers=(1,))])
    with pytest.raises(RheoscopeError, match="cache given; DistilBertForMaskedLM does not take it"):
        model(input_ids(view.model), cache=DynamicCache())
    with pytest.raises(Refused, match="attention by 'eager' asked for"):
        model.set_attn_implementation("eager")


def test_a_configuration_that_is_no_edited_model_is_refused():
    with pytest.raises(RheoscopeError, match="without the configuration of the original"):
        EditedForCausalLM(EditedConfig())
    with pytest.raises(RheoscopeError, match="names no original model type"):
        EditedConfig(text_config={"model_type": "rheoscope_edited"})
    view = single("llama")
    model = restructured(view, mixed_edits(view))
    assert model.config.vocab_size == view.config.vocab_size
    assert AutoModelForCausalLM.from_config(model.config).num_parameters() == model.num_parameters()
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = model.config.no_such_thing
