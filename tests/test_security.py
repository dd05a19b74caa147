"""Nothing that is read runs code or leads out of its folder: what the program text may not hold, and files that try."""

import ast
import json
import os
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import xarray as xr
from huggingface_hub import constants
from safetensors.torch import save_file

import rheoscope
from rheoscope.errors import RheoscopeError
from rheoscope.models.load import load
from rheoscope.run import Run
from rheoscope.surgery.plan import Plan
from rheoscope.surgery.plan_file import _Loader
from tests.models.checkpoints import refusal, saved
from tests.small_run import small_run

PACKAGE = Path(rheoscope.__file__).parent
UNSAFE_MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "subprocess",
    "runpy",
    "code",
}
UNSAFE_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "pd.read_pickle",
    "pandas.read_pickle",
}
# A call of these is safe with this argument alone.
GUARDED = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "np.save": ("allow_pickle", False),
    "np.lib.format.write_array": ("allow_pickle", False),
    "np.lib.format.read_array": ("allow_pickle", False),
}
# Where a module is imported by a name that is no literal: names that stand in the same file.
IMPORTS_BY_NAME = {"__init__.py", "registration.py"}


def calls_and_imports(path):
    """(name of what is called, the call) and (module, None) for all of one file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0], None
        elif isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def faults(path):
    """What a file may not hold."""
    for name, call in calls_and_imports(path):
        if call is None:
            if name in UNSAFE_MODULES:
                yield f"imports {name}"
            continue
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name in UNSAFE_CALLS or given.get("shell") == "True":
            yield f"calls {name}"
        if name in GUARDED and given.get(GUARDED[name][0]) != str(GUARDED[name][1]):
            yield f"calls {name} without {GUARDED[name][0]}={GUARDED[name][1]}"
        reads_yaml = name.startswith("yaml.") and name.endswith("load") and name != "yaml.safe_load"
        if reads_yaml and given.get("Loader") != "_Loader":
            yield f"calls {name} with a loader of {given.get('Loader')}"
        by_name = name.endswith("import_module") and not isinstance(call.args[0], ast.Constant)
        if by_name and path.name not in IMPORTS_BY_NAME:
            yield "imports a module by a name that is made up"


def test_the_program_text_holds_nothing_that_runs_what_it_reads():
    files = list(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    assert {str(path.relative_to(PACKAGE)): found for path in files if (found := list(faults(path)))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from joblib import load",
        "eval('1')",
        "import os\nos.system('ls')",
        "torch.load('a')",
        "torch.load('a', weights_only=False)",
        "np.load('a')",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.unsafe_load(text)",
        "import_module(name)",
        "run('ls', shell=True)",
    ],
)
def test_what_would_run_it_is_found(tmp_path, text):
    (tmp_path / "a.py").write_text(text)
    assert list(faults(tmp_path / "a.py"))


def test_the_loader_of_plans_makes_plain_values_alone():
    assert {tag.rsplit(":", 1)[1] for tag in _Loader.yaml_constructors if tag} <= {
        *("null", "bool", "int", "float", "str", "seq", "map")
    }
    assert not _Loader.yaml_multi_constructors


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.mkdir [{crater}]",
        "edits: !!python/object/apply:os.mkdir [{crater}]",
        "edits: [!!python/object/new:os.mkdir [{crater}]]",
        "edits: [{{edit: !!python/name:os.mkdir '', path: {crater}}}]",
        "edits: [{{edit: os.mkdir, path: {crater}}}]",
        "edits: [{{edit: __import__('os').mkdir}}]",
        "edits: [{{edit: rheoscope.surgery.edits.Edit}}]",
        "edits: [{{edit: DropHeads, heads: [[0, 0]], __class__: {crater}}}]",
    ],
)
def test_a_plan_names_no_code(text, tmp_path):
    with pytest.raises(RheoscopeError):
        Plan.of_yaml(text.format(crater=tmp_path / "crater"))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def sharded(tmp_path, monkeypatch):
    """A model in several files, and one more file outside its folder."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = saved("llama", tmp_path / "model", max_shard_size="20KB")
    first = sorted(folder.glob("*.safetensors"))[0]
    shutil.copy(first, tmp_path / "outside.safetensors")
    return folder


def with_shard(folder, name):
    """The folder with another name for its first file in the index."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = sorted(set(index["weight_map"].values()))[0]
    index["weight_map"] = {key: name if shard == first else shard for key, shard in index["weight_map"].items()}
    path.write_text(json.dumps(index))
    return folder


def test_an_index_does_not_lead_out_of_the_folder(sharded, tmp_path):
    for name in (
        "../outside.safetensors",
        str(tmp_path / "outside.safetensors"),
        "a/../../outside.safetensors",
        "..",
        "",
    ):
        assert "leads out of the folder" in refusal(with_shard(sharded, name))


def test_an_index_that_holds_no_names_is_told(sharded):
    path = sharded / "model.safetensors.index.json"
    for content in ("[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": null}}'):
        path.write_text(content)
        assert "index" in refusal(sharded)


def test_files_that_are_links_as_the_hub_keeps_them_are_read(sharded, tmp_path):
    (tmp_path / "blobs").mkdir()
    for number, path in enumerate(sorted(sharded.glob("*.safetensors"))):
        path.rename(tmp_path / "blobs" / str(number))
        path.symlink_to(f"../blobs/{number}")
    assert load(sharded).n_layers == 3


def test_a_run_that_leads_elsewhere_is_refused(tmp_path):
    secret = tmp_path / "secret.h5"
    with h5py.File(secret, "w") as file:
        file["x"] = np.arange(5.0)
    (tmp_path / "secret.bin").write_bytes(bytes(400))

    def linked(file):
        file["loss/x"] = h5py.ExternalLink(secret, "/x")

    def soft(file):
        file["loss/x"] = h5py.SoftLink("/loss/nll_mean")

    def virtual(file):
        layout = h5py.VirtualLayout(shape=(5,), dtype="f8")
        layout[:] = h5py.VirtualSource(secret, "x", shape=(5,))
        file.create_virtual_dataset("loss/x", layout)

    def outside(file):
        file.create_dataset("loss/x", shape=(50,), dtype="f8", external=[(str(tmp_path / "secret.bin"), 0, 400)])

    for change in (linked, soft, virtual, outside):
        path = small_run().save(tmp_path / "run.nc", overwrite=True)
        with h5py.File(path, "r+") as file:
            change(file)
        with pytest.raises(RheoscopeError, match=r"loss/x (leads elsewhere|is kept in another file)"):
            Run.load(path)


def test_a_run_that_claims_what_it_cannot_hold_is_refused_before_memory_is_taken(tmp_path):
    for shape in ((2**28,), (2**40,), (2**20, 2**20)):
        path = small_run().save(tmp_path / "run.nc", overwrite=True)
        with h5py.File(path, "r+") as file:
            file.create_dataset("loss/x", shape=shape, dtype="f8", chunks=True, compression="gzip")
        with pytest.raises(RheoscopeError, match=r"loss/x claims .* bytes and cannot hold them"):
            Run.load(path)


def test_a_group_that_holds_itself_is_no_endless_loop(tmp_path):
    path = small_run().save(tmp_path / "run.nc")
    with h5py.File(path, "r+") as file:
        file["loss/again"] = file["/"]
    with pytest.raises(RheoscopeError):
        Run.load(path)


def test_an_array_of_zeros_that_compresses_best_is_read(tmp_path):
    run = Run.of({"routing": xr.Dataset({"x": ("lag", np.zeros(3_000_000))})}, {})
    path = run.save(tmp_path / "run.nc")
    assert os.path.getsize(path) < 100_000
    assert Run.load(path)["routing"].x.size == 3_000_000


def test_a_checkpoint_of_one_tensor_is_no_model(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = saved("llama", tmp_path)
    save_file({"x": torch.zeros(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert "speaks of 3 layers and holds 1 tensors" in refusal(folder)
