"""Edited models and networks of ours in a new process: read bit for bit, and unknown without rheoscope."""

import subprocess
import sys

import pytest
import torch

from rheoscope.surgery.edited_model import save_edited
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.restructure import restructured
from tests.surgery.restructuring import EXAMPLES, mixed_edits, refused_for, single
from tests.tiny import VARIANTS, input_ids

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
