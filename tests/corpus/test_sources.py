"""Names of texts that name nothing."""

import sys

import pytest

from rheoscope.corpus.sources import documents
from rheoscope.errors import RheoscopeError


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_folder_one_is_in(name, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("the cat")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RheoscopeError, match="a text with an empty name was asked for"):
        documents(name, split="file", field="text")
    assert [document.text for document in documents(".", split="file", field="text")] == ["the cat"]


def test_the_home_of_nobody_holds_no_file():
    with pytest.raises(RheoscopeError, match=r"there is no file ~nosuchuser/a\.txt"):
        list(documents("~nosuchuser/a.txt", split="file", field="text"))


def test_standard_input_that_is_closed_is_told(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(RheoscopeError, match="standard input was asked for and is closed"):
        documents("-", split="file", field="text")
