"""Data sets of the hub, through a stand-in for `datasets`: what is asked of it, and what it may say."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from huggingface_hub.errors import HTTPError

from .test_readers import refusal, texts


class NoBuilderError(Exception):
    """An error of `datasets` that is of no common kind."""


def hub(monkeypatch, load_dataset):
    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    module.exceptions = SimpleNamespace(DatasetsError=NoBuilderError)
    monkeypatch.setitem(sys.modules, "datasets", module)


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("hf:a/b", (("a/b",), "train")),
        ("hf:a/b:test", (("a/b",), "test")),
        ("hf:a/b:raw-v1:test", (("a/b", "raw-v1"), "test")),
    ],
)
def test_a_hub_data_set_is_streamed(monkeypatch, source, asked):
    calls = []

    def load_dataset(*names, split, streaming):
        calls.append((names, split))
        assert streaming
        return [{"text": "one"}, {"text": ""}, {"text": "two"}]

    hub(monkeypatch, load_dataset)
    assert texts(source) == ["one", "two"]
    assert calls == [asked]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionError("Couldn't reach 'a/b' on the Hub\nand more"), "Couldn't reach 'a/b' on the Hub"),
        (ConnectionError(), "ConnectionError"),
        (HTTPError("timed out"), "timed out"),
        (RuntimeError("Dataset scripts are no longer supported, but found b.py"), "Dataset scripts are no longer"),
        (NoBuilderError("\nno builder"), "no builder"),
        (KeyError("features"), "no entry 'features'"),
    ],
)
def test_what_the_hub_or_its_library_says_is_told_in_one_sentence(monkeypatch, error, said):
    def load_dataset(*_, **__):
        raise error

    hub(monkeypatch, load_dataset)
    assert f'the data set "a/b", split "test", cannot be read ({said}' in refusal("hf:a/b:test")


def test_a_hub_data_set_without_a_name_is_told(monkeypatch):
    hub(monkeypatch, None)
    assert "names no data set" in refusal("hf:")


def test_the_hub_without_its_library_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert 'pip install "rheoscope[hub]"' in refusal("hf:a/b")
