"""A tiny model with a tokenizer and a text on disk, and the command line run in this process."""

import random
from functools import partial

import pytest
import torch

from tests.corpus.small_tokenizers import byte_tokenizer, encoder_tokenizer
from tests.tiny import tiny

from .running import run

CONTEXT = 40


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Folder of a tiny GPT-2 whose tokenizer reads any text."""
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    tokenizer = byte_tokenizer()
    tiny("gpt2", dtype=torch.float32, vocab_size=len(tokenizer), n_positions=CONTEXT).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    """Folder of a tiny BERT."""
    folder = tmp_path_factory.mktemp("models") / "bert"
    tiny("bert", dtype=torch.float32).save_pretrained(folder)
    encoder_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A text of ten lines, 200 characters each."""
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    letters = random.Random(0)
    lines = ("".join(letters.choices("the cat sat on a mat. ", k=200)) for _ in range(10))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def command(tmp_path):
    """Runs `rheoscope` with the given arguments in an empty folder."""
    return partial(run, tmp_path)
