"""Tiny checkpoints on disk, whole and broken."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rheoscope.errors import LONGEST_QUOTED, RheoscopeError
from rheoscope.models.load import load
from tests.tiny import VOCAB, tiny

GONE: Any = object()  # as a value: take the entry out of config.json


def tokenizer() -> PreTrainedTokenizerFast:
    """One word per token of the tiny models."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2", "unk_token": "w3"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


def saved(model: PreTrainedModel | str, folder: Path, **options: Any) -> Path:
    """The folder with a model, or the tiny one of that name in float32, and a tokenizer saved in it."""
    model = tiny(model, dtype=torch.float32) if isinstance(model, str) else model
    model.save_pretrained(folder, **options)
    tokenizer().save_pretrained(folder)
    return folder


def with_config(folder: Path, **entries: Any) -> Path:
    """The folder with other entries in its config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not GONE}))
    return folder


def with_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """The folder with its weights changed in place."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def refusal(ref: str | Path, **options: Any) -> str:
    """What `load` says: one sentence of one line that names the model and ends with what to do."""
    with pytest.raises(RheoscopeError) as raised:
        load(ref, **options)
    said = str(raised.value)
    assert "\n" not in said
    assert not said.endswith(".")
    assert ": " in said  # what is the case: what to do
    assert len(said) < LONGEST_QUOTED + 300
    return said
