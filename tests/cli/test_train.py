"""`rheoscope train`: what it offers exists, and what it refuses it says how to mend."""

import re

import pytest

from rheoscope.cli import train as module
from rheoscope.cli.train import train
from rheoscope.nets import KINDS
from rheoscope.nets.presets import PRESETS
from tests.corpus.small_tokenizers import byte_tokenizer


def test_the_kinds_and_sizes_that_help_names_are_those_there_are():
    assert re.split(r", | or ", module.KINDS) == list(KINDS)
    size = train.__annotations__["size"]
    assert all(f"{name}" in str(size) for name in PRESETS)


def test_a_tokenizer_without_an_end_of_text_is_refused_with_what_to_give(command, text, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = tokenizer.bos_token = tokenizer.sep_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    outcome = command("train", "sd", "--text", text, "--tokenizer", "endless", "--out", "net")
    assert outcome.code == 2, outcome
    assert "by which documents are joined: give one that has, bytes, or bpe:N" in outcome.err.splitlines()[-1]
    assert not (tmp_path / "net").exists()


@pytest.mark.parametrize("rate", ["-1", "0", "nan", "inf"])
def test_a_learning_rate_that_trains_nothing_is_refused_before_a_folder_is_made(command, text, tmp_path, rate):
    outcome = command("train", "sd", "--text", text, "--learning-rate", rate, "--out", "net")
    assert outcome.code == 2, outcome
    assert "it must be a finite number above 0" in outcome.err.splitlines()[-1]
    assert not (tmp_path / "net").exists()
