"""A folder appears whole or not at all."""

import os
import sys

import pytest
import torch

from rheoscope.errors import RheoscopeError
from rheoscope.models.view import ModelView
from rheoscope.surgery import save
from rheoscope.surgery.edits_structure import DropAttention
from rheoscope.surgery.restructure import restructured
from rheoscope.surgery.save import refuse_folder, save_edited
from tests.corpus.small_tokenizers import byte_tokenizer
from tests.tiny import tiny


@pytest.fixture(scope="module")
def model():
    return restructured(ModelView(tiny("llama", dtype=torch.float32)), [DropAttention(layers=(1,))])


def test_all_files_come_in_one_step(model, tmp_path):
    folder = save_edited(model, None, tmp_path / "a" / "edited", files={"plan.yaml": "edits: []\n"})
    assert (folder / "plan.yaml").read_text() == "edits: []\n"
    assert {"config.json", "model.safetensors", "plan.yaml"} <= {path.name for path in folder.iterdir()}
    assert os.listdir(tmp_path / "a") == ["edited"]


def test_an_existing_folder_is_refused_and_replaced_whole_when_asked(model, tmp_path):
    folder = save_edited(model, None, tmp_path / "edited", files={"plan.yaml": "old"})
    for check in (lambda: save_edited(model, None, folder), lambda: refuse_folder(folder)):
        with pytest.raises(RheoscopeError, match="exists: choose another folder, or allow overwriting"):
            check()
    assert (folder / "plan.yaml").read_text() == "old"
    save_edited(model, None, folder, overwrite=True)
    assert not (folder / "plan.yaml").exists()
    assert os.listdir(tmp_path) == ["edited"]


def test_what_is_no_model_is_never_overwritten(model, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_bytes(b"")
    with pytest.raises(RheoscopeError, match=r"holds one\.jpg and no model"):
        save_edited(model, None, tmp_path / "photos", overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(RheoscopeError, match="is a file: give the name of a folder"):
        save_edited(model, None, tmp_path / "file", overwrite=True)
    with pytest.raises(RheoscopeError, match="give a name without folders"):
        save_edited(model, None, tmp_path / "new", files={"../x": ""})
    assert sorted(os.listdir(tmp_path)) == ["file", "photos"]


@pytest.mark.parametrize("name", ["thesis.docx", "checkpoint-100", "pytorch_model.bin", "training.json", "model.txt"])
def test_a_folder_that_holds_more_than_a_model_is_never_overwritten(model, tmp_path, name):
    folder = save_edited(model, None, tmp_path / "edited", files={"notes.txt": "of the same call"})
    save_edited(model, None, folder, overwrite=True, files={"notes.txt": "again"})
    (folder / "notes.txt").unlink()
    (folder / name).mkdir() if "-" in name else (folder / name).write_text("mine")
    before = sorted(os.listdir(folder))
    for check in (
        lambda: save_edited(model, None, folder, overwrite=True),
        lambda: refuse_folder(folder, overwrite=True),
    ):
        with pytest.raises(RheoscopeError, match=f"holds {name}, which is no part of a saved model"):
            check()
    assert sorted(os.listdir(folder)) == before


def test_all_that_a_saved_model_consists_of_may_be_replaced(model, tmp_path):
    folder = tmp_path / "edited"
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    for name in ("README.md", ".gitattributes", "verification.json"):
        (folder / name).write_text("")
    save_edited(model, tokenizer, folder, overwrite=True)
    save_edited(model, tokenizer, folder, overwrite=True)
    assert (folder / "additional_chat_templates" / "tools.jinja").exists()
    assert not (folder / "README.md").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="two names are exchanged in one step on Linux alone")
def test_no_moment_is_without_the_old_folder_or_the_new_one(model, tmp_path, monkeypatch):
    folder = save_edited(model, None, tmp_path / "edited", files={"plan.yaml": "old"})
    rename, seen = type(tmp_path).rename, []

    def watched(path, target):
        seen.append(path.name)
        return rename(path, target)

    monkeypatch.setattr(type(tmp_path), "rename", watched)
    save_edited(model, None, folder, overwrite=True)
    assert seen == []  # the names are exchanged by one call of the system
    monkeypatch.setattr(save, "_exchanged", lambda *_: False)
    save_edited(model, None, folder, overwrite=True)
    assert seen[0] == "edited"  # where there is no such call, the old one steps aside
    assert os.listdir(tmp_path) == ["edited"]


class Broken:
    """A tokenizer that fails while it is written."""

    def __init__(self, error):
        self.error = error

    def save_pretrained(self, folder):
        raise self.error


@pytest.mark.parametrize(
    ("error", "expected"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left on device"), RheoscopeError)],
)
def test_an_interruption_or_a_full_disk_leaves_nothing_behind(model, tmp_path, error, expected):
    with pytest.raises(expected, match=None if expected is KeyboardInterrupt else "No space left"):
        save_edited(model, Broken(error), tmp_path / "edited")
    assert os.listdir(tmp_path) == []
    folder = save_edited(model, None, tmp_path / "edited", files={"plan.yaml": "kept"})
    with pytest.raises(expected):
        save_edited(model, Broken(error), folder, overwrite=True)
    assert (folder / "plan.yaml").read_text() == "kept"
    assert os.listdir(tmp_path) == ["edited"]


def test_an_unwritable_place_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    for check in (refuse_folder, lambda folder: save_edited(None, None, folder)):
        with pytest.raises(RheoscopeError, match="written"):
            check(tmp_path / "file" / "edited")
    refuse_folder(tmp_path / "new")
    assert os.listdir(tmp_path) == ["file"]
