"""A checkpoint that claims more than it holds is refused at once; one that changes leaves the opened model alone."""

import os
import struct
import time

import gguf
import pytest
import torch
from huggingface_hub import constants

from rheoscope.models import load as load_module
from rheoscope.models.load import load
from tests.models.checkpoints import refusal, saved, with_config
from tests.models.gguf_files import write_llama
from tests.tiny import tiny

AT_ONCE = 20.0  # seconds; 2^24 layers take more than three times as long
TOKENS = torch.arange(3, 16)[None]


@pytest.mark.parametrize(
    ("entry", "part"),
    [
        ({"num_hidden_layers": 2**24}, "speaks of 16777216 layers and holds 30 tensors"),
        ({"num_hidden_layers": 2**60}, "speaks of 1152921504606846976 layers and holds 30 tensors"),
        ({"vocab_size": 2**28}, "parameters, and its files can hold"),
        ({"intermediate_size": 2**28}, "parameters, and its files can hold"),
        ({"head_dim": 2**24}, "parameters, and its files can hold"),
    ],
)
def test_more_than_the_files_can_hold_is_refused_at_once(folder, entry, part):
    started = time.monotonic()
    assert part in refusal(with_config(folder, **entry))
    assert time.monotonic() - started < AT_ONCE


def test_layers_that_a_gguf_file_does_not_hold_are_refused_at_once(tmp_path):
    path = write_llama(tiny("llama", dtype=torch.float32), tmp_path / "a.gguf")
    content = path.read_bytes()
    key = gguf.Keys.LLM.BLOCK_COUNT.format(arch="llama").encode()
    at = content.index(key) + len(key) + 4  # past the type of the value
    assert struct.unpack("<I", content[at : at + 4]) == (3,)
    path.write_bytes(content[:at] + struct.pack("<I", 2**24) + content[at + 4 :])
    started = time.monotonic()
    assert "speaks of 16777216 layers and holds" in refusal(path)
    assert time.monotonic() - started < AT_ONCE


def levelled(path):
    """The same file with every weight equal, written where it is."""
    content = path.read_bytes()
    (header,) = struct.unpack("<Q", content[:8])
    with path.open("r+b") as file:
        file.seek(8 + header)
        file.write(struct.pack("<f", 0.0625) * ((len(content) - 8 - header) // 4))


def test_an_opened_model_keeps_its_numbers_when_its_file_is_written_anew(folder):
    view = load(folder)
    before = view.forward(TOKENS)
    levelled(folder / "model.safetensors")
    assert torch.equal(view.forward(TOKENS), before)
    assert not torch.equal(load(folder).forward(TOKENS), before)


def test_the_same_of_a_model_of_the_hub_whose_files_are_links(tmp_path, monkeypatch):
    commit, repository = "0" * 40, tmp_path / "models--org--name"
    snapshot = saved("llama", repository / "snapshots" / commit)
    (repository / "blobs").mkdir()
    blob = repository / "blobs" / "f00d"
    (snapshot / "model.safetensors").rename(blob)
    (snapshot / "model.safetensors").symlink_to("../../blobs/f00d")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    view = load("org/name")
    before = view.forward(TOKENS)
    levelled(blob)
    assert torch.equal(view.forward(TOKENS), before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="what ends the process is tried in a fork of it")
def test_a_file_that_is_cut_short_does_not_end_the_process(folder):
    child = os.fork()
    if not child:
        view = load(folder)
        os.truncate(folder / "model.safetensors", 100)
        view.forward(TOKENS)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_file_that_changes_while_it_is_read_is_told(folder, monkeypatch):
    found = load_module.model_class

    def slow(*arguments, **options):
        kind = found(*arguments, **options)
        original = kind.from_pretrained

        def reading(*where, **how):
            read = original(*where, **how)
            os.utime(folder / "model.safetensors", (1, 1))
            return read

        monkeypatch.setattr(kind, "from_pretrained", reading)
        return kind

    monkeypatch.setattr(load_module, "model_class", slow)
    assert "model.safetensors changed while" in refusal(folder)


def test_half_precision_is_read_as_before(folder):
    assert load(folder, dtype="bfloat16").dtype == torch.bfloat16
